// Vector clocks: which accesses of memory are ordered, by the program and not by luck.
//
// Each stream and the host have a component. The clock of an actor says, for every component, up to which of its tasks
// all is known to have happened before what the actor does next. Two accesses of the same bytes, of which one writes,
// must be ordered; otherwise they are a race, whichever of them was faster this time.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace lag {

constexpr int kDevices = 2;
constexpr int kStreamsOfADevice = 32;
constexpr int kLanes = kDevices * kStreamsOfADevice;
// The component of the host. All its threads share it, because the device does not see how they wait for each other.
constexpr int kHost = kLanes;

struct VectorClock {
  std::array<uint64_t, kLanes + 1> ticks{};

  void join(const VectorClock& other) {
    for (size_t i = 0; i < ticks.size(); i++) ticks[i] = std::max(ticks[i], other.ticks[i]);
  }
};

struct Extent {
  uintptr_t begin, end;
};

struct Access {
  int lane;
  uint64_t tick;
  const char* name;
  bool writes;
};

// Two accesses of the same bytes that nothing orders; `count` pairs of these names were found.
struct Race {
  Access first, second;
  uintptr_t address;
  int64_t count;
};

// The last write of each byte, and the reads since then.
class History {
 public:
  void access(Extent bytes, const Access& access, const VectorClock& clock) {
    if (bytes.begin >= bytes.end) return;
    auto at = split(bytes.begin);
    split(bytes.end);
    for (auto part = at; part != touched_.end() && part->first < bytes.end; ++part) check(*part, access, clock);
    if (access.writes) {
      touched_.erase(touched_.lower_bound(bytes.begin), touched_.lower_bound(bytes.end));
      touched_.emplace(bytes.begin, Touched{bytes.end, access, {}});
    } else {
      add_read(bytes, access);
    }
  }

  void forget(Extent bytes) {
    split(bytes.begin);
    split(bytes.end);
    touched_.erase(touched_.lower_bound(bytes.begin), touched_.lower_bound(bytes.end));
  }

  std::vector<Race> races() const {
    std::vector<Race> found;
    for (const auto& [key, race] : races_) found.push_back(race);
    return found;
  }

  void clear_races() { races_.clear(); }

 private:
  struct Touched {
    uintptr_t end;
    std::optional<Access> write;
    std::vector<Access> reads;  // the last one of each lane
  };
  using Parts = std::map<uintptr_t, Touched>;

  // Makes `address` a boundary between parts; returns the first part that does not begin before it.
  Parts::iterator split(uintptr_t address) {
    auto after = touched_.lower_bound(address);
    if (after == touched_.begin()) return after;
    auto part = std::prev(after);
    if (part->second.end <= address) return after;
    Touched rest = part->second;
    part->second.end = address;
    return touched_.emplace_hint(after, address, std::move(rest));
  }

  void add_read(Extent bytes, const Access& access) {
    uintptr_t covered = bytes.begin;
    auto part = touched_.lower_bound(bytes.begin);
    while (covered < bytes.end) {
      if (part == touched_.end() || part->first > covered) {  // bytes that nothing has touched yet
        uintptr_t end = part == touched_.end() ? bytes.end : std::min(part->first, bytes.end);
        part = touched_.emplace_hint(part, covered, Touched{end, std::nullopt, {}});
      }
      auto& reads = part->second.reads;
      std::erase_if(reads, [&](const Access& read) { return read.lane == access.lane; });
      reads.push_back(access);
      covered = part->second.end;
      ++part;
    }
  }

  void check(const Parts::value_type& part, const Access& access, const VectorClock& clock) {
    if (part.second.write) require_order(*part.second.write, access, clock, part.first);
    if (!access.writes) return;
    for (const Access& read : part.second.reads) require_order(read, access, clock, part.first);
  }

  void require_order(const Access& earlier, const Access& later, const VectorClock& clock, uintptr_t address) {
    if (clock.ticks[earlier.lane] >= earlier.tick) return;
    auto key = std::make_tuple(std::string(earlier.name), earlier.writes, std::string(later.name), later.writes);
    auto [race, is_new] = races_.try_emplace(key, Race{earlier, later, address, 0});
    race->second.count++;
  }

  Parts touched_;
  std::map<std::tuple<std::string, bool, std::string, bool>, Race> races_;
};

}  // namespace lag

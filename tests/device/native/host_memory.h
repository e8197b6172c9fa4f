// Memory of the host that copies may use while the host goes on: what was registered, and what was allocated so.
//
// A copy from or to registered memory is a task of its stream. Any other host memory is pageable: its copies are
// staged and synchronous. As with cuMemHostRegister, a copy must lie in one registration.
#pragma once

#include <cstdlib>

#include "memory.h"

namespace lag {

// The results of cuMemHostRegister and cuMemHostUnregister.
constexpr int kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kAlreadyRegistered = 712, kNotRegistered = 713;

enum class HostMemory { kPageable, kRegistered, kBroken };

class Registrations {
 public:
  int64_t allocations = 0;       // of registered memory, by the allocator below
  int64_t failing_calls = 0;     // the next calls to add that fail, as for a machine that cannot pin more

  int add_locked(uintptr_t begin, size_t nbytes) {
    if (nbytes == 0 || begin == 0) return kInvalidValue;
    if (failing_calls > 0) return failing_calls--, kOutOfMemory;
    if (overlaps(begin, begin + nbytes)) return kAlreadyRegistered;
    ranges_[begin] = begin + nbytes;
    return kSuccess;
  }

  int remove_locked(uintptr_t begin) {
    auto found = ranges_.find(begin);
    if (found == ranges_.end()) return kNotRegistered;
    host_accesses_locked({found->first, found->second}, "unregister", true);
    forget_locked(begin);
    return kSuccess;
  }

  void forget_locked(uintptr_t begin) {
    auto found = ranges_.find(begin);
    history.forget({found->first, found->second});
    ranges_.erase(found);
  }

  HostMemory kind_locked(Extent bytes) const {
    auto after = ranges_.upper_bound(bytes.begin);
    if (after != ranges_.begin() && bytes.end <= std::prev(after)->second) return HostMemory::kRegistered;
    return overlaps(bytes.begin, bytes.end) ? HostMemory::kBroken : HostMemory::kPageable;
  }

  size_t registered_bytes() const {
    size_t total = 0;
    for (auto [begin, end] : ranges_) total += end - begin;
    return total;
  }

 private:
  bool overlaps(uintptr_t begin, uintptr_t end) const {
    auto after = ranges_.lower_bound(end);
    return after != ranges_.begin() && std::prev(after)->second > begin;
  }

  std::map<uintptr_t, uintptr_t> ranges_;  // begin -> end
};

inline Registrations& registrations = *new Registrations;

// What `pin_memory()` gets. Freed memory is kept until the tasks that were submitted before have ended, as CUDA's
// allocator keeps it by events.
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, nullptr, &free_later, c10::Device(c10::kCPU)};
    Lock lock(world);
    free_unused_locked();
    size_t size = (nbytes + 4095) / 4096 * 4096;
    void* address = std::aligned_alloc(4096, size);
    TORCH_CHECK_WITH(OutOfMemoryError, address != nullptr, "lag: no registered memory of ", nbytes, " bytes");
    registrations.allocations++;
    registrations.add_locked(uintptr_t(address), size);
    return {address, address, &free_later, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_later; }
  void copy_data(void* target, const void* source, size_t nbytes) const override {
    default_copy_data(target, source, nbytes);
  }
  static void free_unused_locked() {
    std::erase_if(freed(), [](const Freed& item) {
      for (const Event& use : item.uses)
        if (lane_locked(use.lane).done < use.seq) return false;
      registrations.forget_locked(uintptr_t(item.address));
      std::free(item.address);
      return true;
    });
  }

 private:
  struct Freed {
    void* address;
    std::vector<Event> uses;
  };
  static std::vector<Freed>& freed() {
    static auto& list = *new std::vector<Freed>;
    return list;
  }
  static void free_later(void* address) {
    if (address == nullptr) return;
    Lock lock(world);
    Freed item{address, {}};
    each_lane_locked([&](Lane& lane) {
      if (lane.done < lane.submitted) item.uses.push_back(lane.now_locked());
    });
    freed().push_back(std::move(item));
    free_unused_locked();
  }
};

inline PinnedAllocator& pinned_allocator = *new PinnedAllocator;

}  // namespace lag

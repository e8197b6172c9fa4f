// Virtual time: when each task would begin and end on a device whose links and kernels have given speeds.
//
// The times follow from the order of calls, the streams, the events and the speeds alone, so they are the same in each
// run, however busy the machine is. Each engine of a device does one task at a time and takes the first gap that is
// long enough. Without speeds, all durations are zero.
#pragma once

#include <algorithm>
#include <array>
#include <map>
#include <string>
#include <vector>

#include "clocks.h"

namespace lag {

enum class Engine { kCompute, kHostToDevice, kDeviceToHost, kCollective, kNone };
constexpr int kEngines = 5;

// Seconds of a task = latency + bytes / bytes_per_second + flops / flops_per_second; a speed of 0 is infinite.
struct Speed {
  double latency_seconds = 0, bytes_per_second = 0, flops_per_second = 0;
};

struct Span {
  const char* name;
  int lane;
  Engine engine;
  double begin_seconds, end_seconds, bytes;
};

class Schedule {
 public:
  // The host's own time, which a wait for a task moves to the task's end.
  double host_seconds = 0;
  double host_seconds_of_a_task = 0;
  std::array<Speed, kEngines> speeds;
  std::map<std::string, double> kernel_seconds;  // of kernels whose time is set by name
  bool records = false;
  std::vector<Span> spans;

  // Places a task that may begin at `ready` and returns its end.
  double place(const char* name, int lane, Engine engine, double ready, double bytes, double flops) {
    double duration = seconds(name, engine, bytes, flops);
    double begin = duration > 0 ? occupy(busy_[lane / kStreamsOfADevice][int(engine)], ready, duration) : ready;
    if (records && engine != Engine::kNone)
      spans.push_back(Span{name, lane, engine, begin, begin + duration, bytes});
    return begin + duration;
  }

  void reset() { *this = Schedule(); }

 private:
  using Intervals = std::map<double, double>;  // begin -> end

  double seconds(const char* name, Engine engine, double bytes, double flops) const {
    if (engine == Engine::kNone) return 0;
    if (auto set = kernel_seconds.find(name); set != kernel_seconds.end()) return set->second;
    const Speed& speed = speeds[int(engine)];
    double total = speed.latency_seconds;
    if (speed.bytes_per_second > 0) total += bytes / speed.bytes_per_second;
    if (speed.flops_per_second > 0) total += flops / speed.flops_per_second;
    return total;
  }

  static double occupy(Intervals& busy, double ready, double duration) {
    double begin = ready;
    auto next = busy.upper_bound(begin);
    if (next != busy.begin()) begin = std::max(begin, std::prev(next)->second);
    while (next != busy.end() && next->first < begin + duration) begin = std::max(begin, (next++)->second);
    busy[begin] = begin + duration;
    return begin;
  }

  std::array<std::array<Intervals, kEngines>, kDevices> busy_;
};

}  // namespace lag

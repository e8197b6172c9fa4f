// Streams whose tasks run late, each in order on a thread of its own, and the events between them.
//
// A task begins when its lag is over or when the host waits for it, directly or through the events that other streams
// wait for. To ask for an event again and again is to wait for it, too. So a lag does not make a test slow, and cannot
// make one hang.
//
// One mutex, `world`, guards all state of the device. No thread holds it while it runs a task, waits for the GIL or
// calls torch. Functions whose name ends in `_locked` need it.
#pragma once

#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>

#include "clocks.h"
#include "schedule.h"
#include "torch_headers.h"

namespace lag {

// The state is never destroyed, because the threads of the streams live until the process ends.
inline std::mutex& world = *new std::mutex;
inline History& history = *new History;
inline Schedule& schedule = *new Schedule;
inline VectorClock& host_clock = *new VectorClock;

using Lock = std::unique_lock<std::mutex>;
using Time = std::chrono::steady_clock;

// The moment after the first `seq` tasks of a stream.
struct Event {
  int lane = 0;
  uint64_t seq = 0;
  VectorClock clock;
  double seconds = 0;  // in virtual time
};

// What a task does, as the device must know it before the task runs.
struct Work {
  const char* name;
  std::function<void()> run;
  std::vector<Extent> reads, writes;
  Engine engine = Engine::kCompute;
  double bytes = 0, flops = 0;
};

struct Task {
  uint64_t seq;
  Time::time_point due;
  const char* name;
  std::function<void()> run;
  std::optional<std::pair<int, uint64_t>> awaited;  // another lane, and the task that must have ended there
};

inline int64_t random_lag_us = 0;
inline uint64_t random_seed = 0;
// How many tasks were outstanding at once, as a test's proof that the host ran ahead.
inline uint64_t most_outstanding = 0;

struct Lane {
  const int id;
  std::condition_variable wakes, finished;
  std::deque<Task> tasks;
  uint64_t submitted = 0, done = 0, demanded = 0;
  std::string error;  // of the first task that failed; it stays, as an error of a CUDA context does
  int64_t lag_us = 0;
  std::minstd_rand random;
  VectorClock clock;
  double free_at_seconds = 0;
  bool has_thread = false;

  explicit Lane(int lane_id) : id(lane_id) { reseed(); }

  int device() const { return id / kStreamsOfADevice; }
  int stream() const { return id % kStreamsOfADevice; }

  void reseed() { random.seed(unsigned(random_seed * 2654435761u + id + 1)); }

  int64_t next_lag_us() { return lag_us + (random_lag_us > 0 ? int64_t(random()) % random_lag_us : 0); }

  void demand_locked(uint64_t seq) {
    if (seq <= demanded) return;
    demanded = seq;
    wakes.notify_one();
  }

  void require_no_error_locked() const {
    TORCH_CHECK(error.empty(), "lag:", device(), ", stream ", stream(), ": ", error);
  }

  Event now_locked() const { return Event{id, submitted, clock, free_at_seconds}; }
};

inline Lane& lane_locked(int id) {
  static std::array<Lane*, kLanes>& lanes = *new std::array<Lane*, kLanes>{};
  if (lanes[id] == nullptr) lanes[id] = new Lane(id);
  return *lanes[id];
}

template <class Act>
void each_lane_locked(Act act) {
  for (int id = 0; id < kLanes; id++) act(lane_locked(id));
}

// The lanes whose first task waits for another lane.
inline std::set<Lane*>& blocked = *new std::set<Lane*>;

inline bool may_begin_locked(Lane& lane, Lock& lock) {
  const Task& task = lane.tasks.front();
  bool is_demanded = lane.demanded >= task.seq;
  if (!is_demanded && Time::now() < task.due) {
    lane.wakes.wait_until(lock, task.due);
    return false;
  }
  if (!task.awaited) return true;
  Lane& other = lane_locked(task.awaited->first);
  if (other.done >= task.awaited->second) return true;
  if (is_demanded) other.demand_locked(task.awaited->second);
  blocked.insert(&lane);
  lane.wakes.wait(lock);
  blocked.erase(&lane);
  return false;
}

inline void run_next(Lane& lane, Lock& lock) {
  Task task = std::move(lane.tasks.front());
  lane.tasks.pop_front();
  lock.unlock();
  std::string failed;
  try {
    if (task.run) task.run();
  } catch (const c10::Error& e) {
    failed = e.what_without_backtrace();
  } catch (const std::exception& e) {
    failed = e.what();
  }
  task.run = nullptr;
  lock.lock();
  if (!failed.empty() && lane.error.empty()) lane.error = std::string(task.name) + " failed: " + failed;
  lane.done = task.seq;
  lane.finished.notify_all();
  for (Lane* other : blocked) other->wakes.notify_one();
}

inline void run_lane(Lane& lane) {
  // One thread for each kernel: sums then have one order, and the streams share the processors.
  at::set_num_threads(1);
  Lock lock(world);
  while (true) {
    lane.wakes.wait(lock, [&] { return !lane.tasks.empty(); });
    if (may_begin_locked(lane, lock)) run_next(lane, lock);
  }
}

// A forked process has none of the streams' threads, so its tasks would never run.
inline bool is_forked = false;
inline const int fork_handler = pthread_atfork(nullptr, nullptr, [] { is_forked = true; });

inline void require_threads() {
  TORCH_CHECK(!is_forked, "lag: this process was forked from one that uses the device, and cannot use it: spawn it");
}

inline void push_locked(Lane& lane, Task task) {
  if (is_forked) return;
  lane.tasks.push_back(std::move(task));
  most_outstanding = std::max(most_outstanding, lane.submitted - lane.done);
  if (!lane.has_thread) {
    lane.has_thread = true;
    std::thread([&lane] { run_lane(lane); }).detach();
  }
  lane.wakes.notify_one();
}

// Begins a task of a lane: what the host has seen and what the lane did before come before it.
inline void next_moment_locked(Lane& lane) {
  lane.submitted++;
  lane.clock.join(host_clock);
  lane.clock.ticks[lane.id] = lane.submitted;
}

inline void note_accesses_locked(const Lane& lane, const Work& work, const VectorClock& clock) {
  for (const Extent& bytes : work.reads) history.access(bytes, {lane.id, lane.submitted, work.name, false}, clock);
  for (const Extent& bytes : work.writes) history.access(bytes, {lane.id, lane.submitted, work.name, true}, clock);
}

// Whether this thread of the host has submitted tasks. One that only waits, as for bytes that it hands over, does not
// delay the others, so its waits take none of the host's virtual time.
inline thread_local bool thread_submits = false;

// How often this thread of the host has asked for one event since it submitted a task.
struct Asked {
  int lane = -1;
  uint64_t seq = 0;
  int times = 0;
};
inline thread_local Asked asked;
// A thread that has asked so often, and does nothing else with the device, waits for the event.
constexpr int kAsksOfAWait = 4;

inline Event submit_locked(Lane& lane, Work work) {
  thread_submits = true;
  asked = {};
  next_moment_locked(lane);
  note_accesses_locked(lane, work, lane.clock);
  schedule.host_seconds += schedule.host_seconds_of_a_task;
  double ready = std::max(lane.free_at_seconds, schedule.host_seconds);
  lane.free_at_seconds = schedule.place(work.name, lane.id, work.engine, ready, work.bytes, work.flops);
  auto due = Time::now() + std::chrono::microseconds(lane.next_lag_us());
  push_locked(lane, Task{lane.submitted, due, work.name, std::move(work.run), std::nullopt});
  return lane.now_locked();
}

inline Event submit(Lane& lane, Work work) {
  require_threads();
  Lock lock(world);
  return submit_locked(lane, std::move(work));
}

// Overwrites freed bytes in the order of the lane. Where another lane used them, too, `seen` has what the allocator has
// seen of it; the lane itself does not come to know of that.
inline void overwrite_locked(Lane& lane, Extent bytes, const VectorClock& seen, std::function<void()> run) {
  next_moment_locked(lane);
  VectorClock clock = lane.clock;
  clock.join(seen);
  note_accesses_locked(lane, Work{"free", nullptr, {}, {bytes}}, clock);
  push_locked(lane, Task{lane.submitted, Time::now(), "free", std::move(run), std::nullopt});
}

// Makes a lane wait for an event. `orders` false: it waits, but a program must not rely on it.
inline void wait_for_locked(Lane& lane, const Event& event, bool orders = true) {
  if (event.lane == lane.id) return;
  next_moment_locked(lane);
  if (orders) lane.clock.join(event.clock);
  lane.free_at_seconds = std::max(lane.free_at_seconds, event.seconds);
  push_locked(lane, Task{lane.submitted, Time::now(), "wait", nullptr, std::pair{event.lane, event.seq}});
}


inline void host_waits_locked(const Event& event, Lock& lock) {
  Lane& lane = lane_locked(event.lane);
  lane.demand_locked(event.seq);
  lane.finished.wait(lock, [&] { return lane.done >= event.seq; });
  host_clock.join(event.clock);
  if (thread_submits) schedule.host_seconds = std::max(schedule.host_seconds, event.seconds);
}

inline void host_waits(const Event& event) {
  require_threads();
  Lock lock(world);
  host_waits_locked(event, lock);
  lane_locked(event.lane).require_no_error_locked();
}

// A poll takes no virtual time, because how often a program polls, and with which answer, depends on the machine.
inline bool is_over(const Event& event) {
  Lock lock(world);
  if (lane_locked(event.lane).done < event.seq) {
    if (asked.lane != event.lane || asked.seq != event.seq) asked = {event.lane, event.seq, 0};
    if (++asked.times >= kAsksOfAWait) lane_locked(event.lane).demand_locked(event.seq);
    return false;
  }
  host_clock.join(event.clock);
  return true;
}

inline void host_waits_for_device(int device) {
  Lock lock(world);
  each_lane_locked([&](Lane& lane) {
    if (lane.device() == device) host_waits_locked(lane.now_locked(), lock);
  });
  each_lane_locked([&](Lane& lane) {
    if (lane.device() == device) lane.require_no_error_locked();
  });
}

// An access by the host itself, for what the device cannot see: a test or the guarded arena declares it.
inline void host_accesses_locked(Extent bytes, const char* name, bool writes) {
  uint64_t tick = ++host_clock.ticks[kHost];
  history.access(bytes, Access{kHost, tick, name, writes}, host_clock);
}

}  // namespace lag

// The device "lag": a CPU that behaves like an accelerator whose streams lag. This file is the Python face of the rest.
#include "autocast.h"
#include "clocks.h"
#include "collectives.h"
#include "host_memory.h"
#include "memory.h"
#include "operators.h"
#include "schedule.h"
#include "streams.h"

namespace py = pybind11;

namespace lag {

static c10::impl::DeviceGuardImplRegistrar guard_registrar(kType, new Guard);
static c10::AllocatorRegisterer<kType> allocator_registerer(&device_allocator);

static std::string lane_name(int lane) {
  if (lane == kHost) return "the host";
  return c10::str("lag:", lane / kStreamsOfADevice, ", stream ", lane % kStreamsOfADevice);
}

static py::dict race_fields(const Race& race) {
  py::dict fields;
  fields["first"] = race.first.name;
  fields["first_writes"] = race.first.writes;
  fields["first_lane"] = lane_name(race.first.lane);
  fields["second"] = race.second.name;
  fields["second_writes"] = race.second.writes;
  fields["second_lane"] = lane_name(race.second.lane);
  fields["address"] = race.address;
  fields["count"] = race.count;
  return fields;
}

// Back to the state after loading, but for the memory that tensors have.
static void reset() {
  Lock lock(world);
  random_lag_us = 0;
  random_seed = 0;
  most_outstanding = 0;
  each_lane_locked([&](Lane& lane) {
    lane.lag_us = 0;
    lane.reseed();
    host_waits_locked(lane.now_locked(), lock);
    lane.error.clear();
    lane.free_at_seconds = 0;
  });
  schedule.reset();
  history.clear_races();
  registrations.failing_calls = 0;
  PinnedAllocator::free_unused_locked();
  for (int device = 0; device < kDevices; device++) memory_of(device).limit_bytes = kSpanBytes;
}

static void set_random_lag(int64_t most_us, uint64_t seed) {
  Lock lock(world);
  random_lag_us = most_us;
  random_seed = seed;
  each_lane_locked([](Lane& lane) { lane.reseed(); });
}

static void set_lag(int64_t us, std::optional<c10::Stream> stream) {
  Lock lock(world);
  if (stream) {
    lane_locked(lane_id(stream->device_index(), int(stream->id()))).lag_us = us;
    return;
  }
  each_lane_locked([us](Lane& lane) { lane.lag_us = us; });
}

static py::dict memory_counters(int device) {
  Lock lock(world);
  Memory& memory = memory_of(device);
  py::dict fields;
  fields["allocations"] = memory.counters.allocations;
  fields["segments"] = memory.counters.segments;
  fields["allocated_bytes"] = memory.counters.allocated_bytes;
  fields["peak_bytes"] = memory.counters.peak_bytes;
  fields["reserved_bytes"] = memory.counters.reserved_bytes;
  return fields;
}

static int64_t allocations_of(const c10::Stream& stream) {
  Lock lock(world);
  return memory_of(stream.device_index()).allocations_by_lane[lane_id(stream.device_index(), int(stream.id()))];
}

static std::vector<py::tuple> spans() {
  std::vector<Span> recorded;
  {
    Lock lock(world);
    recorded = schedule.spans;
  }
  std::vector<py::tuple> rows;
  for (const Span& span : recorded)
    rows.push_back(py::make_tuple(span.name, span.lane / kStreamsOfADevice, span.lane % kStreamsOfADevice,
                                  int(span.engine), span.begin_seconds, span.end_seconds, span.bytes));
  return rows;
}

PYBIND11_MODULE(lag_native, module) {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  auto release = py::call_guard<py::gil_scoped_release>();
  module.attr("DEVICES") = kDevices;
  module.def("reset", &reset, release);
  module.def("synchronize", &host_waits_for_device, release);
  module.def("current_device", [] { return current_device; });
  module.def("set_device", [](int device) { Guard().setDevice({kType, c10::DeviceIndex(device)}); });
  module.def("default_generator", [](int device) { return default_generator(c10::DeviceIndex(device)); });

  module.def("set_lag_us", &set_lag);
  module.def("set_random_lag_us", &set_random_lag);
  module.def("is_idle", [](const c10::Stream& stream) {
    Lock lock(world);
    const Lane& lane = lane_locked(lane_id(stream.device_index(), int(stream.id())));
    return lane.done == lane.submitted;
  });
  module.def("most_outstanding", [] {
    Lock lock(world);
    return most_outstanding;
  });

  module.def("memory_counters", &memory_counters);
  module.def("allocations_of", &allocations_of);
  module.def("set_memory_limit", [](int device, size_t nbytes) {
    Lock lock(world);
    memory_of(device).limit_bytes = nbytes;
  });

  module.def("register_host", [](uintptr_t address, size_t nbytes) {
    Lock lock(world);
    return registrations.add_locked(address, nbytes);
  });
  module.def("unregister_host", [](uintptr_t address) {
    Lock lock(world);
    return registrations.remove_locked(address);
  });
  module.def("registered_bytes", [] {
    Lock lock(world);
    return registrations.registered_bytes();
  });
  module.def("host_allocations", [] {
    Lock lock(world);
    return registrations.allocations;
  });
  module.def("fail_registrations", [](int64_t calls) {
    Lock lock(world);
    registrations.failing_calls = calls;
  });

  module.def("races", [] {
    std::vector<Race> found;
    {
      Lock lock(world);
      found = history.races();
    }
    py::list rows;
    for (const Race& race : found) rows.append(race_fields(race));
    return rows;
  });
  module.def("clear_races", [] {
    Lock lock(world);
    history.clear_races();
  });
  module.def("host_accesses", [](uintptr_t address, size_t nbytes, const std::string& name, bool writes) {
    const char* kept = interned(name);
    Lock lock(world);
    host_accesses_locked({address, address + nbytes}, kept, writes);
  });

  module.def("set_speed", [](int engine, double latency_seconds, double bytes_per_second, double flops_per_second) {
    Lock lock(world);
    schedule.speeds.at(engine) = Speed{latency_seconds, bytes_per_second, flops_per_second};
  });
  module.def("set_kernel_seconds", [](const std::string& name, double seconds) {
    Lock lock(world);
    schedule.kernel_seconds[name] = seconds;
  });
  module.def("set_host_seconds_of_a_task", [](double seconds) {
    Lock lock(world);
    schedule.host_seconds_of_a_task = seconds;
  });
  module.def("host_works", [](double seconds) {
    Lock lock(world);
    return schedule.host_seconds += seconds;
  });
  module.def("record_spans", [](bool records) {
    Lock lock(world);
    schedule.records = records;
    schedule.spans.clear();
  });
  module.def("spans", &spans);

  module.def("make_group", [](c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size) {
    return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<StreamGroup>(std::move(gloo), rank, size));
  });
}

}  // namespace lag

// What torch asks of an accelerator: devices, streams, events, generators, and storages that change their size.
#pragma once

#include "host_memory.h"

namespace lag {

constexpr auto kType = c10::DeviceType::PrivateUse1;

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  static constexpr c10::DeviceType static_type = kType;

  Guard() = default;
  explicit Guard(c10::DeviceType) {}

  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kType, c10::DeviceIndex(current_device)}; }
  void setDevice(c10::Device device) const override {
    if (!device.has_index()) return;
    TORCH_CHECK(device.index() >= 0 && device.index() < kDevices, "lag: invalid device ordinal ", int(device.index()));
    current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Stream getStream(c10::Device device) const override { return stream(device, current_streams[index(device)]); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::array<std::atomic<int>, kDevices> made{};
    return stream(device, 1 + made[index(device)]++ % (kStreamsOfADevice - 1));  // in turn, as CUDA's pool
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    c10::Stream before = getStream(next.device());
    current_streams[index(next.device())] = int(next.id());
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return &lane(stream); }

  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    Lock lock(world);
    Event& recorded = *static_cast<Event*>(*event) = lane_locked(id(stream)).now_locked();
    // The event of an idle stream is over when the host records it.
    recorded.seconds = std::max(recorded.seconds, schedule.host_seconds);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    Lock lock(world);
    wait_for_locked(lane_locked(id(stream)), *static_cast<Event*>(event));
  }
  bool queryEvent(void* event) const override { return event == nullptr || is_over(*static_cast<Event*>(event)); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) host_waits(*static_cast<Event*>(event));
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    TORCH_CHECK(first != nullptr && second != nullptr, "lag: both events must be recorded");
    return (static_cast<Event*>(second)->seconds - static_cast<Event*>(first)->seconds) * 1e3;  // virtual milliseconds
  }
  bool queryStream(const c10::Stream& stream) const override { return is_over(now(stream)); }
  void synchronizeStream(const c10::Stream& stream) const override { host_waits(now(stream)); }
  void synchronizeDevice(const c10::DeviceIndex device) const override { host_waits_for_device(device); }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    device_allocator.recordStream(pointer, stream);
  }

 private:
  static int index(c10::Device device) { return device.has_index() ? device.index() : current_device; }
  static c10::Stream stream(c10::Device device, int stream_id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, c10::DeviceIndex(index(device))), stream_id);
  }
  static int id(const c10::Stream& stream) { return lane_id(stream.device_index(), int(stream.id())); }
  static Lane& lane(const c10::Stream& stream) {
    Lock lock(world);
    return lane_locked(id(stream));
  }
  static Event now(const c10::Stream& stream) {
    Lock lock(world);
    return lane_locked(id(stream)).now_locked();
  }
};

// Random numbers depend on the seed and on how many kernels have drawn before, as Philox' do on CUDA: they are settled
// when a kernel is submitted, however late it runs.
class DeviceGenerator final : public c10::GeneratorImpl {
 public:
  explicit DeviceGenerator(c10::DeviceIndex device)
      : GeneratorImpl(c10::Device(kType, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  static c10::DeviceType device_type() { return kType; }
  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 && state.dtype() == caffe2::TypeMeta::Make<uint8_t>(),
                "lag: the state of a generator has 16 bytes");
    std::memcpy(&seed_, state.data(), 8);
    std::memcpy(&offset_, static_cast<const char*>(state.data()) + 8, 8);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    at::Tensor state = at::empty({16}, at::kByte);
    std::memcpy(state.data_ptr(), &seed_, 8);
    std::memcpy(static_cast<char*>(state.data_ptr()) + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }

  // The seed of the CPU generator with which the next kernel draws.
  uint64_t next_seed() {
    std::lock_guard<std::mutex> lock(mutex_);
    uint64_t mixed = seed_ + ++offset_ * 0x9e3779b97f4a7c15u;
    mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9u;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebu;
    return mixed ^ (mixed >> 31);
  }

 private:
  DeviceGenerator* clone_impl() const override {
    auto* copy = new DeviceGenerator(device_.index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }

  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

inline const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto& generators = *new std::array<at::Generator, kDevices>{at::make_generator<DeviceGenerator>(0),
                                                                     at::make_generator<DeviceGenerator>(1)};
  return generators[device < 0 ? current_device : device];
}

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return c10::DeviceIndex(current_device); }
  void setCurrentDevice(c10::DeviceIndex device) const override { Guard().setDevice({kType, device}); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice({kType, device}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* address) const override {
    Lock lock(world);
    return registrations.kind_locked({uintptr_t(address), uintptr_t(address) + 1}) == HostMemory::kRegistered;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  at::Device getDeviceFromPtr(void* address) const override {
    for (int device = 0; device < kDevices; device++)
      if (memory_of(device).has(address)) return {kType, c10::DeviceIndex(device)};
    TORCH_CHECK(false, "lag: this address is not of a device");
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<DeviceGenerator>(device < 0 ? c10::DeviceIndex(current_device) : device);
  }
  // As on CUDA, new memory comes from the pool of the current stream, also where the size stays the same.
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
    c10::DeviceGuard guard(impl->device());
    c10::DataPtr fresh(nullptr, impl->device());
    if (nbytes > 0) {
      fresh = device_allocator.allocate(nbytes);
      if (impl->data() != nullptr)
        device_allocator.copy_data(fresh.get(), impl->data(), std::min(nbytes, impl->nbytes()));
    }
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(nbytes);
  }
};

}  // namespace lag

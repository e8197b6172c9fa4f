// Memory of the device: a caching allocator, whose blocks belong to the stream that asked for them.
//
// As with CUDA's, a freed block may be used at once by its own stream, also while a late task still reads or writes it;
// other streams that use it must be recorded. Freed bytes are overwritten with 0xff, which is NaN, in the order of the
// stream.
//
// The host has no access to the addresses that tensors have. The kernels use a second mapping of the same pages.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <unordered_map>

#include "streams.h"

namespace lag {

constexpr size_t kSpanBytes = size_t(1) << 36;  // of addresses; pages are taken as they are touched
constexpr size_t kRounding = 512, kSmall = size_t(1) << 20, kSegment = size_t(2) << 20;

inline thread_local int current_device = 0;
inline thread_local std::array<int, kDevices> current_streams{};

inline int lane_id(int device, int stream) { return device * kStreamsOfADevice + stream; }
inline Lane& current_lane_locked(int device) { return lane_locked(lane_id(device, current_streams[device])); }
inline Lane& current_lane(int device) {
  Lock lock(world);
  return current_lane_locked(device);
}

// Where kernels find what the tensors have at `address`.
inline char* kernel_address(const void* address) { return (char*)address + kSpanBytes; }

struct Block {
  char* address;
  size_t size;
  int lane;
  bool is_small;
  bool is_free = false;
  Block *previous = nullptr, *next = nullptr;  // its neighbours in the segment
  std::set<int> other_lanes;                   // that were recorded as its users
};

struct SmallestFirst {
  bool operator()(const Block* a, const Block* b) const {
    return std::pair(a->size, a->address) < std::pair(b->size, b->address);
  }
};

struct MemoryCounters {
  int64_t allocations = 0, segments = 0;  // calls since the start; the latter are what cudaMalloc would be called for
  size_t allocated_bytes = 0, peak_bytes = 0, reserved_bytes = 0, peak_reserved_bytes = 0;
};

class Memory {
 public:
  explicit Memory(int device) : device_(device) {
    void* at = mmap(nullptr, 2 * kSpanBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(at != MAP_FAILED, "lag: no address space of ", 2 * kSpanBytes, " bytes: ", std::strerror(errno));
    base_ = static_cast<char*>(at);
    file_ = memfd_create("lag", MFD_CLOEXEC);
    TORCH_CHECK(file_ >= 0 && ftruncate(file_, kSpanBytes) == 0, "lag: memfd: ", std::strerror(errno));
    void* shown = mmap(base_ + kSpanBytes, kSpanBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE,
                       file_, 0);
    TORCH_CHECK(shown != MAP_FAILED, "lag: mmap of the kernels' view: ", std::strerror(errno));
  }

  MemoryCounters counters;
  std::map<int, int64_t> allocations_by_lane;
  size_t limit_bytes = kSpanBytes;

  void* allocate(size_t nbytes) {
    require_threads();
    Lock lock(world);
    release_unused_locked();
    size_t size = (std::max(nbytes, size_t(1)) + kRounding - 1) / kRounding * kRounding;
    int lane = current_lane_locked(device_).id;
    Block* block = find_locked(lane, size);
    if (block == nullptr) block = new_segment_locked(lane, size, lock);
    block = split_locked(block, size);
    live_[block->address] = block;
    counters.allocations++;
    allocations_by_lane[lane]++;
    counters.allocated_bytes += block->size;
    counters.peak_bytes = std::max(counters.peak_bytes, counters.allocated_bytes);
    return block->address;
  }

  void free(void* address) {
    Lock lock(world);
    auto found = live_.find(static_cast<char*>(address));
    Block* block = found->second;
    live_.erase(found);
    counters.allocated_bytes -= block->size;
    std::vector<Event> uses;
    for (int lane : block->other_lanes) uses.push_back(lane_locked(lane).now_locked());
    block->other_lanes.clear();
    if (uses.empty()) return release_locked(block, VectorClock());
    used_.emplace_back(block, std::move(uses));
  }

  void record_locked(void* address, int lane) {
    auto found = live_.find(static_cast<char*>(address));
    if (found != live_.end() && found->second->lane != lane) found->second->other_lanes.insert(lane);
  }

  bool has(const void* address) const { return address >= base_ && address < base_ + kSpanBytes; }

  // Gives whole segments back that nothing uses; waits for the streams.
  void empty_cache() {
    Lock lock(world);
    empty_cache_locked(lock);
  }

 private:
  using Pool = std::set<Block*, SmallestFirst>;

  Block* find_locked(int lane, size_t size) {
    Pool& pool = pools_[{lane, size <= kSmall}];
    Block wanted{nullptr, size, lane, false};
    auto found = pool.lower_bound(&wanted);
    if (found == pool.end()) return nullptr;
    Block* block = *found;
    pool.erase(found);
    block->is_free = false;
    return block;
  }

  Block* new_segment_locked(int lane, size_t size, Lock& lock) {
    size_t segment = (size + kSegment - 1) / kSegment * kSegment;
    if (counters.reserved_bytes + segment > limit_bytes) empty_cache_locked(lock);
    bool has_room = counters.reserved_bytes + segment <= limit_bytes && top_ + segment <= kSpanBytes;
    TORCH_CHECK_WITH(OutOfMemoryError, has_room, "lag:", device_, " is out of memory: tried to allocate ", size,
                     " bytes; ", counters.allocated_bytes, " bytes are allocated, ", counters.reserved_bytes, " of ",
                     limit_bytes, " bytes are reserved");
    auto* block = new Block{base_ + top_, segment, lane, size <= kSmall};
    top_ += segment;
    std::memset(kernel_address(block->address), 0xff, segment);
    counters.segments++;
    counters.reserved_bytes += segment;
    counters.peak_reserved_bytes = std::max(counters.peak_reserved_bytes, counters.reserved_bytes);
    return block;
  }

  Block* split_locked(Block* block, size_t size) {
    if (block->size - size < (block->is_small ? kRounding : kSmall)) return block;
    auto* rest = new Block{block->address + size, block->size - size, block->lane, block->is_small};
    rest->previous = block;
    rest->next = block->next;
    if (rest->next) rest->next->previous = rest;
    block->next = rest;
    block->size = size;
    keep_locked(rest);
    return block;
  }

  void keep_locked(Block* block) {
    block->is_free = true;
    pools_[{block->lane, block->is_small}].insert(block);
  }

  void release_locked(Block* block, const VectorClock& seen) {
    char* at = kernel_address(block->address);
    size_t size = block->size;
    Extent bytes{uintptr_t(block->address), uintptr_t(block->address) + size};
    overwrite_locked(lane_locked(block->lane), bytes, seen, [at, size] { std::memset(at, 0xff, size); });
    if (block->next && block->next->is_free) block = merge_locked(block, block->next);
    if (block->previous && block->previous->is_free) block = merge_locked(block->previous, block);
    keep_locked(block);
  }

  Block* merge_locked(Block* first, Block* second) {
    Pool& pool = pools_[{first->lane, first->is_small}];
    pool.erase(first);
    pool.erase(second);
    first->size += second->size;
    first->next = second->next;
    if (first->next) first->next->previous = first;
    delete second;
    return first;
  }

  // Releases the freed blocks whose other users have ended.
  void release_unused_locked() {
    std::vector<std::pair<Block*, std::vector<Event>>> kept;
    for (auto& [block, uses] : used_) {
      auto is_pending = [](const Event& use) { return lane_locked(use.lane).done < use.seq; };
      if (std::any_of(uses.begin(), uses.end(), is_pending)) {
        kept.emplace_back(block, std::move(uses));
        continue;
      }
      VectorClock seen;
      for (const Event& use : uses) seen.join(use.clock);
      release_locked(block, seen);
    }
    used_ = std::move(kept);
  }

  void empty_cache_locked(Lock& lock) {
    for (int stream = 0; stream < kStreamsOfADevice; stream++)
      host_waits_locked(lane_locked(lane_id(device_, stream)).now_locked(), lock);
    release_unused_locked();
    for (int stream = 0; stream < kStreamsOfADevice; stream++)  // for the overwriting of what was released
      host_waits_locked(lane_locked(lane_id(device_, stream)).now_locked(), lock);
    for (auto& [key, pool] : pools_)
      for (auto at = pool.begin(); at != pool.end();) {
        Block* block = *at;
        if (block->previous || block->next) {
          ++at;
          continue;
        }
        at = pool.erase(at);
        fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, block->address - base_, block->size);
        history.forget({uintptr_t(block->address), uintptr_t(block->address) + block->size});
        counters.reserved_bytes -= block->size;
        delete block;
      }
  }

  int device_;
  int file_ = -1;
  char* base_ = nullptr;
  size_t top_ = 0;
  std::unordered_map<char*, Block*> live_;
  std::map<std::pair<int, bool>, Pool> pools_;                       // by lane and size
  std::vector<std::pair<Block*, std::vector<Event>>> used_;          // freed, but recorded lanes may use them
};

inline Memory& memory_of(int device) {
  static auto& memories = *new std::array<std::unique_ptr<Memory>, kDevices>{};
  static std::mutex making;
  std::lock_guard<std::mutex> lock(making);
  if (!memories[device]) memories[device] = std::make_unique<Memory>(device);
  return *memories[device];
}

inline void free_block(void* address) {
  for (int device = 0; device < kDevices; device++)
    if (memory_of(device).has(address)) return memory_of(device).free(address);
}

class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    c10::Device device(c10::DeviceType::PrivateUse1, c10::DeviceIndex(current_device));
    if (nbytes == 0) return {nullptr, nullptr, &free_block_or_nothing, device};
    void* address = memory_of(current_device).allocate(nbytes);
    return {address, address, &free_block_or_nothing, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block_or_nothing; }
  void copy_data(void* target, const void* source, size_t nbytes) const override {
    auto from = uintptr_t(source), to = uintptr_t(target);
    submit(current_lane(current_device),
           Work{"copy_data", [=] { std::memcpy(kernel_address(target), kernel_address(source), nbytes); },
                {{from, from + nbytes}}, {{to, to + nbytes}}, Engine::kCompute, 2.0 * nbytes});
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    for (int device = 0; device < kDevices; device++) memory_of(device).empty_cache();
  }
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    Lock lock(world);
    int device = stream.device_index();
    memory_of(device).record_locked(pointer.get(), lane_id(device, int(stream.id())));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Lock lock(world);
    const MemoryCounters& counters = memory_of(device).counters;
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = stats.active_bytes[0].current = int64_t(counters.allocated_bytes);
    stats.allocated_bytes[0].peak = stats.active_bytes[0].peak = int64_t(counters.peak_bytes);
    stats.reserved_bytes[0].current = int64_t(counters.reserved_bytes);
    stats.reserved_bytes[0].peak = int64_t(counters.peak_reserved_bytes);
    stats.num_device_alloc = counters.segments;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    Lock lock(world);
    MemoryCounters& counters = memory_of(device).counters;
    counters.peak_bytes = counters.allocated_bytes;
    counters.peak_reserved_bytes = counters.reserved_bytes;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    Lock lock(world);
    const Memory& memory = memory_of(device);
    return {memory.limit_bytes - memory.counters.reserved_bytes, memory.limit_bytes};
  }

 private:
  static void free_block_or_nothing(void* address) {
    if (address != nullptr) free_block(address);
  }
};

inline DeviceAllocator& device_allocator = *new DeviceAllocator;

}  // namespace lag

// Collectives as tasks of streams, as NCCL's are: a call returns at once, and the stream orders it.
//
// The bytes are exchanged by a group of gloo. Tasks of one group run in the order of the calls, on whichever streams,
// because all ranks must launch them in one order; a program must not take that for an order between its streams.
#pragma once

#include "operators.h"

namespace lag {

class StreamWork final : public c10d::Work {
 public:
  StreamWork(Event done, int device, std::vector<at::Tensor> kept)
      : done_(done), device_(device), kept_(std::move(kept)) {}

  bool isCompleted() override { return is_over(done_); }
  bool isSuccess() const override { return true; }
  // The current stream waits, not the host.
  void synchronize() override {
    Lock lock(world);
    wait_for_locked(current_lane_locked(device_), done_);
    lock.unlock();
    kept_.clear();
  }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }

 private:
  Event done_;
  int device_;
  std::vector<at::Tensor> kept_;  // until the wait, as NCCL's group keeps the tensors of asynchronous calls
};

class StreamGroup final : public c10d::Backend {
 public:
  StreamGroup(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size)
      : Backend(rank, size), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override { return "lag"; }

  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override {
    return collective("broadcast", {}, tensors, options.asyncOp, [options](auto& gloo, auto&, auto& outputs) {
      return gloo.broadcast(outputs, options);
    });
  }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    return collective("all_reduce", {}, tensors, options.asyncOp, [options](auto& gloo, auto&, auto& outputs) {
      return gloo.allreduce(outputs, options);
    });
  }
  c10::intrusive_ptr<c10d::Work> reduce(std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& options) override {
    return collective("reduce", {}, tensors, options.asyncOp, [options](auto& gloo, auto&, auto& outputs) {
      return gloo.reduce(outputs, options);
    });
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& options) override {
    return collective("all_gather", {input}, {output}, options.asyncOp, [options](auto& gloo, auto& in, auto& out) {
      return gloo._allgather_base(out[0], in[0], options);
    });
  }
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions& options) override {
    return collective("all_gather", inputs, outputs.at(0), options.asyncOp, [options](auto& gloo, auto& in, auto& out) {
      std::vector<std::vector<at::Tensor>> lists{out};
      return gloo.allgather(lists, in, options);
    });
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                      const c10d::ReduceScatterOptions& options) override {
    return collective("reduce_scatter", {input}, {output}, options.asyncOp,
                      [options](auto& gloo, auto& inputs, auto& outputs) {
                        return gloo._reduce_scatter_base(outputs[0], inputs[0], options);
                      });
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override {
    at::Tensor token = at::zeros({1}, at::TensorOptions().device(kType, c10::DeviceIndex(current_device)));
    std::vector<at::Tensor> tokens{token};
    auto work = allreduce(tokens, c10d::AllreduceOptions());
    work->wait();
    token.item();  // as NCCL's group, the host waits for a barrier
    return work;
  }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void abort() override { gloo_->abort(); }
  void shutdown() override {
    for (int device = 0; device < kDevices; device++) host_waits_for_device(device);
    gloo_->shutdown();
  }

 private:
  using Tensors = std::vector<at::Tensor>;

  template <class Exchange>
  c10::intrusive_ptr<c10d::Work> collective(const char* name, const Tensors& inputs, const Tensors& outputs,
                                            bool is_async, Exchange exchange) {
    int device = outputs.at(0).device().index();
    std::vector<Blob> from, to;
    Work work{name, nullptr, {}, {}, Engine::kCollective};
    for (const at::Tensor& tensor : inputs) {
      from.push_back(blob_of(tensor));
      work.reads.push_back(from.back().extent());
    }
    for (const at::Tensor& tensor : outputs) {
      to.push_back(blob_of(tensor));
      work.writes.push_back(to.back().extent());
      work.bytes += double(tensor.nbytes());
    }
    work.run = [gloo = gloo_, from, to, exchange] {
      Tensors in, out;
      for (const Blob& blob : from) in.push_back(blob.for_kernel());
      for (const Blob& blob : to) out.push_back(blob.for_kernel());
      exchange(*gloo, in, out)->wait();
    };
    Lock lock(world);
    Lane& current = current_lane_locked(device);
    Lane& lane = is_async ? own_lane_locked(device) : current;
    if (is_async) wait_for_locked(lane, current.now_locked());
    if (last_) wait_for_locked(lane, *last_, false);
    Event done = submit_locked(lane, std::move(work));
    last_ = done;
    lock.unlock();
    Tensors kept;
    if (is_async) {
      kept = inputs;
      kept.insert(kept.end(), outputs.begin(), outputs.end());
    }
    return c10::make_intrusive<StreamWork>(done, device, std::move(kept));
  }

  // Asynchronous calls run on a stream of the group.
  Lane& own_lane_locked(int device) {
    auto& stream = streams_[device];
    if (!stream) stream = int(Guard().getNewStream({kType, c10::DeviceIndex(device)}, 0).id());
    return lane_locked(lane_id(device, *stream));
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::array<std::optional<int>, kDevices> streams_;
  std::optional<Event> last_;
};

}  // namespace lag

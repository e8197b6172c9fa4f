// The operators: torch's CPU kernels as late tasks on bare addresses, with results shaped by torch's meta kernels.
//
// A task has no reference to the device's tensors, as a kernel on a GPU has none: what is freed too early is reused
// under it. An operator whose result has a shape that depends on values, or that returns a value to the host, waits.
#pragma once

#include "backend.h"
#include "shapes.h"

namespace lag {

// A view of memory, for kernels: where it is, and its shape.
struct Blob {
  void* address;
  std::vector<int64_t> sizes, strides;
  c10::ScalarType dtype;

  size_t item_bytes() const { return c10::elementSize(dtype); }
  int64_t numel() const { return c10::multiply_integers(sizes); }
  Extent extent() const {
    if (numel() == 0) return {0, 0};
    uintptr_t last = 0;
    for (size_t i = 0; i < sizes.size(); i++) last += uintptr_t((sizes[i] - 1) * strides[i]);
    return {uintptr_t(address), uintptr_t(address) + (last + 1) * item_bytes()};
  }
  at::Tensor for_kernel() const {
    auto options = at::TensorOptions().dtype(dtype).device(at::kCPU);
    if (numel() == 0) return at::empty_strided(sizes, strides, options);
    return at::from_blob(kernel_address(address), sizes, strides, options);
  }
};

inline bool is_here(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kType; }

inline Blob blob_of(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.numel() == 0 || tensor.storage().data() != nullptr,
              "The tensor has a non-zero number of elements, but its data is not allocated yet");  // CUDA's words
  void* address = tensor.numel() > 0 ? tensor.data_ptr() : nullptr;
  return {address, tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type()};
}

inline Extent host_extent(const at::Tensor& tensor) {
  Blob blob = blob_of(tensor);
  return blob.extent();
}

inline Lane& lane_of(const at::Tensor& tensor) { return current_lane(tensor.device().index()); }

// Submits a task and waits for it; an exception is raised here and is no error of the stream.
inline void run_now(Lane& lane, Work work) {
  auto failed = std::make_shared<std::exception_ptr>();
  work.run = [run = std::move(work.run), failed] {
    try {
      run();
    } catch (...) {
      *failed = std::current_exception();
    }
  };
  host_waits(submit(lane, std::move(work)));
  if (*failed) std::rethrow_exception(*failed);
}

// ---- making tensors

inline c10::ScalarType known_dtype(std::optional<c10::ScalarType> dtype) {
  c10::ScalarType known = c10::dtype_or_default(dtype);
  TORCH_CHECK(!c10::isComplexType(known), "lag: this device has no complex numbers");
  return known;
}

inline at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<c10::ScalarType> dtype,
                                std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(sizes, strides, &device_allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), known_dtype(dtype));
}

inline at::Tensor empty(c10::IntArrayRef sizes, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                        std::optional<c10::Device> device, std::optional<bool>,
                        std::optional<c10::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(sizes, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   known_dtype(dtype), format);
}

inline at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides,
                             std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(self, sizes, strides, offset);
}

inline at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef sizes) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(sizes));
}

inline at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
}

inline void grow(const at::Tensor& self, size_t nbytes) {
  if (self.storage().nbytes() >= nbytes) return;
  at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), nbytes);
}

inline const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef symbolic,
                                std::optional<at::MemoryFormat> format) {
  c10::IntArrayRef sizes = C10_AS_INTARRAYREF_SLOW(symbolic);
  if (self.sizes() != sizes) {
    self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
    grow(self, at::detail::computeStorageNbytesContiguous(sizes, self.element_size(), self.storage_offset()));
  }
  if (format.has_value()) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

inline at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::native::set_tensor_(self, source);
}
inline at::Tensor& set_storage(at::Tensor& self, at::Storage source) { return at::native::set_(self, source); }
inline at::Tensor& set_view(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef sizes,
                            c10::IntArrayRef strides) {
  return at::cpu::set_(self, source, offset, sizes, strides);
}

inline void record_stream(at::Tensor& self, c10::Stream stream) {
  device_allocator.recordStream(self.storage().data_ptr(), stream);
}

// ---- copies

inline void copy_on_device(const at::Tensor& source, const at::Tensor& target) {
  Blob from = blob_of(source), to = blob_of(target);
  Work work{"copy on the device", [=] { to.for_kernel().copy_(from.for_kernel()); },
            {from.extent()}, {to.extent()}, Engine::kCompute, double(source.nbytes() + target.nbytes())};
  if (source.device() == target.device()) {
    submit(lane_of(source), std::move(work));
    return;
  }
  Lane &here = lane_of(source), &there = lane_of(target);  // between devices, both streams wait
  Lock lock(world);
  wait_for_locked(here, there.now_locked());
  wait_for_locked(there, submit_locked(here, std::move(work)));
}

// Raises what CUDA does about a copy whose bytes are in no registration as a whole, but partly.
inline bool is_registered(const at::Tensor& host) {
  Lock lock(world);
  Extent bytes = host_extent(host);
  HostMemory kind = registrations.kind_locked(bytes);
  TORCH_CHECK(kind != HostMemory::kBroken, "lag: invalid argument: the copy of the ", bytes.end - bytes.begin,
              " bytes at ", (void*)bytes.begin, " does not lie in one registration; cut it at the boundaries");
  return kind == HostMemory::kRegistered;
}

inline at::Tensor host_view(const at::Tensor& host) {
  return at::from_blob(host.data_ptr(), host.sizes(), host.strides(), host.options().pinned_memory(false));
}

inline void copy_from_host(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  Blob to = blob_of(target);
  Work work{"copy to the device", nullptr, {}, {to.extent()}, Engine::kHostToDevice, double(source.nbytes())};
  bool is_direct = is_registered(source) && source.is_non_overlapping_and_dense();
  if (is_direct) {
    work.reads.push_back(host_extent(source));
    work.run = [to, from = blob_of(source), options = source.options()] {
      to.for_kernel().copy_(at::from_blob(from.address, from.sizes, from.strides, options.pinned_memory(false)));
    };
  } else {
    work.run = [to, staged = host_view(source).clone()] { to.for_kernel().copy_(staged); };
  }
  Event done = submit(lane_of(target), std::move(work));
  if (!is_direct || !non_blocking) host_waits(done);
}

inline void copy_to_host(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  Blob from = blob_of(source);
  Work work{"copy to the host", nullptr, {from.extent()}, {}, Engine::kDeviceToHost, double(source.nbytes())};
  bool is_direct = is_registered(target) && target.is_non_overlapping_and_dense();
  if (is_direct) work.writes.push_back(host_extent(target));
  // Without a reference: a GPU writes into registered memory whether or not anybody has kept it.
  work.run = [from, to = blob_of(target), options = target.options()] {
    at::from_blob(to.address, to.sizes, to.strides, options.pinned_memory(false)).copy_(from.for_kernel());
  };
  Event done = submit(lane_of(source), std::move(work));
  if (!is_direct || !non_blocking) host_waits(done);
}

inline at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  if (target.numel() == 0) return target;
  if (is_here(source) && is_here(target))
    copy_on_device(source, target);
  else if (is_here(target))
    copy_from_host(source, target, non_blocking);
  else
    copy_to_host(source, target, non_blocking);
  return target;
}

inline at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (target.sizes() != source.sizes()) target.resize_(source.sizes());
  return copy_from(source, target, false);
}

inline at::Scalar local_scalar_dense(const at::Tensor& self) {
  Blob from = blob_of(self);
  at::Scalar value;
  run_now(lane_of(self), Work{"item", [&] { value = from.for_kernel().item(); }, {from.extent()}, {},
                              Engine::kDeviceToHost, double(from.item_bytes())});
  return value;
}

// torch's own, which is for CUDA and the CPU only, draws from the CPU's generator. This one draws from the device's.
inline std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  at::Tensor mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p < 1 ? 1 / (1 - p) : 0.0), mask};
}

// ---- all other operators

using Stack = torch::jit::Stack;

// The value with each tensor in it replaced.
template <class Replace>
c10::IValue replaced(const c10::IValue& value, Replace& replace) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(replace(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(tensor.defined() ? replace(tensor) : tensor);
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      list.push_back(tensor && tensor->defined() ? std::optional<at::Tensor>(replace(*tensor)) : tensor);
    return list;
  }
  return value;
}

inline const char* interned(const std::string& name) {
  static std::mutex mutex;
  static auto& names = *new std::set<std::string>;
  std::lock_guard<std::mutex> lock(mutex);
  return names.insert(name).first->c_str();
}

inline bool is_written(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

// One call of an operator.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack)
      : op_(op), schema_(op.schema()), name_(interned(schema_.operator_name().name)) {
    size_t count = schema_.arguments().size();
    inputs_.assign(stack->end() - count, stack->end());
    stack->erase(stack->end() - count, stack->end());
    device_ = device_of_inputs();
  }

  void run(Stack* stack) {
    c10::DeviceGuard guard(device_);
    bool is_shaped = shape_outputs();
    prepare_kernel_inputs();
    Lane& lane = current_lane(device_.index());
    if (is_shaped) {
      submit(lane, late_work());
    } else {
      run_and_wait(lane);
    }
    for (size_t i = 0; i < schema_.returns().size(); i++) stack->push_back(result(i));
  }

 private:
  // The device of the tensors, or the one that is asked for.
  c10::Device device_of_inputs() {
    std::optional<c10::Device> found;
    auto look = [&](const at::Tensor& tensor) {
      if (is_here(tensor)) {
        TORCH_CHECK(!found || *found == tensor.device(), name_, ": expected all tensors to be on the same device, but "
                    "found ", *found, " and ", tensor.device());
        found = tensor.device();
      }
      return tensor;
    };
    for (const c10::IValue& value : inputs_) replaced(value, look);
    for (const c10::IValue& value : inputs_)
      if (!found && value.isDevice() && value.toDevice().has_index()) found = value.toDevice();
    return found.value_or(c10::Device(kType, c10::DeviceIndex(current_device)));
  }

  // Makes the outputs in the shapes that the meta kernel gives; false if there is none for this call.
  bool shape_outputs() {
    bool makes_outputs = false, has_out = false;
    for (const c10::Argument& returned : schema_.returns()) {
      TORCH_CHECK(!returned.alias_info() || returned.alias_info()->isWrite(), "lag: no view kernel for ", name_);
      auto kind = returned.type()->kind();
      if (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType) return false;
      makes_outputs |= !returned.alias_info();
    }
    for (const c10::Argument& argument : schema_.arguments()) has_out |= argument.kwarg_only() && is_written(argument);
    outputs_.resize(schema_.returns().size());
    output_blobs_.resize(outputs_.size());
    if (!makes_outputs && !has_out) return true;
    KnownShapes shapes = known_shapes();
    if (!*shapes) return false;
    resize_out_arguments(**shapes);
    make_outputs(**shapes);
    return true;
  }

  KnownShapes known_shapes() const {
    CallName call(schema_.operator_name());
    for (const c10::IValue& value : inputs_) call.add(value);
    KnownShapes known = call.is_whole() ? shapes_of_calls.find(call.bytes()) : nullptr;
    if (known) return known;
    known = std::make_shared<const std::optional<Shapes>>(run_meta_kernel());
    if (call.is_whole()) shapes_of_calls.keep(call.bytes(), known);
    return known;
  }

  // Nothing if there is no meta kernel for this call, because its result depends on values.
  std::optional<Shapes> run_meta_kernel() const {
    auto to_meta = [](const at::Tensor& tensor) {
      if (!is_here(tensor) && tensor.dim() == 0) return tensor;  // numbers keep their rules of promotion
      return at::empty_strided(tensor.sizes(), tensor.strides(), at::TensorOptions(tensor.dtype()).device(at::kMeta));
    };
    std::vector<c10::IValue> metas;
    for (size_t i = 0; i < inputs_.size(); i++) {
      const c10::IValue& value = inputs_[i];
      if (is_out(i)) metas.push_back(empty_like_out(i, at::kMeta));
      else if (value.isDevice()) metas.push_back(c10::Device(at::kMeta));
      else metas.push_back(value.isGenerator() ? c10::IValue() : replaced(value, to_meta));
    }
    Stack made(metas.begin(), metas.end());
    try {
      op_.callBoxed(&made);
    } catch (const std::exception&) {
      return std::nullopt;
    }
    Shapes shapes{std::vector<Shapes::Result>(made.size()), {}};
    for (size_t i = 0; i < made.size(); i++)
      if (!is_written(schema_.returns()[i])) shapes.results[i] = result_of(made[i]);
    for (size_t i = 0; i < inputs_.size(); i++)
      if (is_out(i)) shapes.outs.emplace_back(i, *shape_of(metas[i].toTensor()));
    return shapes;
  }

  static std::optional<Shape> shape_of(const at::Tensor& meta) {
    if (!meta.defined()) return std::nullopt;
    return Shape{meta.sizes().vec(), meta.strides().vec(), meta.scalar_type()};
  }

  static Shapes::Result result_of(const c10::IValue& made) {
    if (made.isTensor()) return {false, {shape_of(made.toTensor())}};
    Shapes::Result result{true, {}};
    for (const at::Tensor& tensor : made.toTensorVector()) result.tensors.push_back(shape_of(tensor));
    return result;
  }

  bool is_out(size_t i) const {
    const c10::Argument& argument = schema_.arguments()[i];
    return argument.kwarg_only() && is_written(argument) && inputs_[i].isTensor();
  }

  // Some kernels give their output another shape on the way, so they get one that can be resized, and not ours.
  at::Tensor empty_like_out(size_t i, c10::Device device) const {
    return at::empty({0}, at::TensorOptions(inputs_[i].toTensor().dtype()).device(device));
  }

  // Variants with `out` make their outputs as large as they need them.
  void resize_out_arguments(const Shapes& shapes) {
    for (const auto& [i, wanted] : shapes.outs) {
      at::Tensor out = inputs_[i].toTensor();
      if (!is_here(out) || out.sizes() == c10::IntArrayRef(wanted.sizes)) continue;
      out.unsafeGetTensorImpl()->set_sizes_and_strides(wanted.sizes, wanted.strides);
      grow(out, (out.storage_offset() + out.numel()) * out.element_size());
    }
  }

  void make_outputs(const Shapes& shapes) {
    for (size_t i = 0; i < outputs_.size(); i++) {
      if (is_written(schema_.returns()[i])) continue;
      std::vector<at::Tensor> tensors;
      for (const std::optional<Shape>& shape : shapes.results[i].tensors)
        tensors.push_back(shape ? make_output(i, *shape) : at::Tensor());
      outputs_[i] = shapes.results[i].is_list ? c10::IValue(tensors) : c10::IValue(tensors[0]);
    }
  }

  at::Tensor make_output(size_t i, const Shape& shape) {
    at::Tensor made = empty_strided(shape.sizes, shape.strides, output_dtype(i, shape.dtype), {}, device_, {});
    output_blobs_[i].push_back(blob_of(made));
    return made;
  }

  // The statistics of a layer norm have another dtype in the CPU's kernel than in the meta kernel, which is CUDA's.
  c10::ScalarType output_dtype(size_t output, c10::ScalarType dtype) {
    if (output == 0 || std::strcmp(name_, "aten::native_layer_norm") != 0) return dtype;
    at::Tensor input = inputs_[0].toTensor();
    bool is_mixed = inputs_[2].isTensor() && inputs_[2].toTensor().scalar_type() != input.scalar_type();
    return is_mixed ? at::kFloat : input.scalar_type();
  }

  void prepare_kernel_inputs() {
    for (size_t i = 0; i < inputs_.size(); i++) {
      auto& extents = is_written(schema_.arguments()[i]) ? writes_ : reads_;
      auto to_kernel = [&](const at::Tensor& tensor) {
        if (!is_here(tensor)) return tensor.clone();  // a launch copies its arguments
        Blob blob = blob_of(tensor);
        extents.push_back(blob.extent());
        bytes_ += tensor.nbytes();
        return blob.for_kernel();
      };
      bool is_device = inputs_[i].isDevice();
      if (is_out(i) && is_here(inputs_[i].toTensor())) {
        out_blobs_.emplace_back(i, blob_of(inputs_[i].toTensor()));
        writes_.push_back(out_blobs_.back().second.extent());
        bytes_ += inputs_[i].toTensor().nbytes();
        kernel_inputs_.push_back(empty_like_out(i, at::kCPU));
        continue;
      }
      kernel_inputs_.push_back(is_device ? c10::IValue(c10::Device(at::kCPU)) : replaced(inputs_[i], to_kernel));
    }
    for (const auto& blobs : output_blobs_)
      for (const Blob& blob : blobs) {
        writes_.push_back(blob.extent());
        bytes_ += double(blob.numel() * blob.item_bytes());
      }
    draw_seed();
  }

  void draw_seed() {
    const auto& arguments = schema_.arguments();
    for (size_t i = 0; i < arguments.size(); i++) {
      if (arguments[i].name() != "generator" && !inputs_[i].isGenerator()) continue;
      bool is_given = inputs_[i].isGenerator();
      at::Generator generator = is_given ? inputs_[i].toGenerator() : default_generator(device_.index());
      auto* own = dynamic_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl());
      TORCH_CHECK(own != nullptr, name_, ": expected a generator of a '", device_, "' device but found ",
                  generator.device());
      kernel_inputs_[i] = at::detail::createCPUGenerator(own->next_seed());
      return;
    }
    TORCH_CHECK(!op_.hasTag(at::Tag::nondeterministic_seeded), "lag: ", name_, " draws from the CPU's generator");
  }

  double flops() const {
    auto sizes = [&](size_t i) { return inputs_[i].toTensor().sizes(); };
    std::string_view name(name_);
    if (name == "aten::mm") return 2.0 * sizes(0)[0] * sizes(0)[1] * sizes(1)[1];
    if (name == "aten::addmm") return 2.0 * sizes(1)[0] * sizes(1)[1] * sizes(2)[1];
    if (name == "aten::bmm") return 2.0 * sizes(0)[0] * sizes(0)[1] * sizes(0)[2] * sizes(1)[2];
    if (name == "aten::baddbmm") return 2.0 * sizes(1)[0] * sizes(1)[1] * sizes(1)[2] * sizes(2)[2];
    return 0;
  }

  Work work(std::function<void()> run) {
    return Work{name_, std::move(run), reads_, writes_, Engine::kCompute, bytes_, flops()};
  }

  Work late_work() {
    return work([op = op_, inputs = kernel_inputs_, blobs = output_blobs_, outs = out_blobs_, name = name_] {
      at::AutoDispatchBelowAutograd below;
      Stack stack(inputs.begin(), inputs.end());
      op.callBoxed(&stack);
      for (const auto& [i, blob] : outs) blob.for_kernel().copy_(inputs[i].toTensor());
      for (size_t i = 0; i < blobs.size(); i++) {
        if (blobs[i].empty()) continue;
        std::vector<at::Tensor> made;
        if (stack[i].isTensor()) made = {stack[i].toTensor()};
        else made = stack[i].toTensorVector();
        std::erase_if(made, [](const at::Tensor& tensor) { return !tensor.defined(); });
        TORCH_CHECK(made.size() == blobs[i].size(), name, ": other results than the meta kernel has");
        for (size_t k = 0; k < made.size(); k++) {
          TORCH_CHECK(made[k].sizes() == c10::IntArrayRef(blobs[i][k].sizes), name, ": sizes ", made[k].sizes(),
                      " where the meta kernel has ", blobs[i][k].sizes);
          blobs[i][k].for_kernel().copy_(made[k]);
        }
      }
    });
  }

  void run_and_wait(Lane& lane) {
    Stack made(kernel_inputs_.begin(), kernel_inputs_.end());
    run_now(lane, work([&] {
      at::AutoDispatchBelowAutograd below;
      op_.callBoxed(&made);
    }));
    auto to_device = [&](const at::Tensor& tensor) { return tensor.device().is_cpu() ? tensor.to(device_) : tensor; };
    for (const auto& [i, blob] : out_blobs_) {
      at::Tensor out = inputs_[i].toTensor(), value = kernel_inputs_[i].toTensor();
      out.resize_(value.sizes()).copy_(value);
    }
    outputs_.clear();
    for (const c10::IValue& value : made) outputs_.push_back(replaced(value, to_device));
  }

  // An output, or the argument that the operator returns because it has written it.
  c10::IValue result(size_t i) const {
    const c10::Argument& returned = schema_.returns()[i];
    if (!is_written(returned)) return outputs_[i];
    for (size_t k = 0; k < inputs_.size(); k++) {
      const c10::AliasInfo* alias = schema_.arguments()[k].alias_info();
      if (alias != nullptr && *alias == *returned.alias_info()) return inputs_[k];
    }
    TORCH_CHECK(false, "lag: no argument of ", name_, " is its result ", i);
  }

  c10::OperatorHandle op_;
  const c10::FunctionSchema& schema_;
  const char* name_;
  c10::Device device_{kType, 0};
  std::vector<c10::IValue> inputs_, kernel_inputs_, outputs_;
  std::vector<std::vector<Blob>> output_blobs_;
  std::vector<std::pair<size_t, Blob>> out_blobs_;  // by the index of the argument
  std::vector<Extent> reads_, writes_;
  double bytes_ = 0;
};

inline void run_operator(const c10::OperatorHandle& op, Stack* stack) { Call(op, stack).run(stack); }

// torch gives convolutions to devices under names of their own.
inline void run_convolution(const c10::OperatorHandle&, Stack* stack) {
  run_operator(c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", ""), stack);
}

inline void run_convolution_backward(const c10::OperatorHandle& op, Stack* stack) {
  auto arguments = stack->end() - int64_t(op.schema().arguments().size());
  at::Tensor weight = arguments[2].toTensor();
  bool is_transposed = arguments[6].toBool();
  int64_t channels = is_transposed ? weight.size(1) * arguments[8].toInt() : weight.size(0);
  stack->insert(arguments + 3, c10::IValue(std::vector<int64_t>{channels}));  // the sizes of the bias
  run_operator(c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", ""), stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_operator>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("unfold", at::native::unfold);
  library.impl("resize_", resize);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar_dense);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_.source_Storage", set_storage);
  library.impl("set_.source_Storage_storage_offset", set_view);
  library.impl("record_stream", record_stream);
  library.impl("native_dropout", native_dropout);
  library.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&run_convolution>());
  library.impl("convolution_backward_overrideable",
               torch::CppFunction::makeFromBoxedFunction<&run_convolution_backward>());
  // torch composes this one of others where a device has no kernel, and then its backward does not fit to it.
  library.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&run_operator>());
}

}  // namespace lag

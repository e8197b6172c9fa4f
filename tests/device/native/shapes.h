// The shapes of results, as torch's meta kernels give them, remembered by call.
//
// Many meta kernels are Python, and take longer than the kernels of small models. A program that trains makes the same
// calls in each step, so each call asks its meta kernel once.
#pragma once

#include <mutex>
#include <string>
#include <unordered_map>

#include "torch_headers.h"

namespace lag {

struct Shape {
  std::vector<int64_t> sizes, strides;
  c10::ScalarType dtype;
};

// What the meta kernel says about a call.
struct Shapes {
  struct Result {
    bool is_list = false;
    std::vector<std::optional<Shape>> tensors;  // without a value: an undefined tensor
  };
  std::vector<Result> results;  // of each return; nothing in those that are arguments
  std::vector<std::pair<size_t, Shape>> outs;  // of each argument `out`, by its index
};

// Without a value, the call has no meta kernel, because the shapes of its results depend on values.
using KnownShapes = std::shared_ptr<const std::optional<Shapes>>;

class ShapesOfCalls {
 public:
  // Null if this call was not asked about yet.
  KnownShapes find(const std::string& call) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = shapes_.find(call);
    return found == shapes_.end() ? nullptr : found->second;
  }

  void keep(const std::string& call, KnownShapes shapes) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (shapes_.size() >= kMost) shapes_.clear();  // a program whose arguments differ in each step fills it
    shapes_.emplace(call, std::move(shapes));
  }

 private:
  static constexpr size_t kMost = 20000;
  std::mutex mutex_;
  std::unordered_map<std::string, KnownShapes> shapes_;
};

inline ShapesOfCalls& shapes_of_calls = *new ShapesOfCalls;

// The name of a call: the operator, and all of its arguments that a meta kernel sees.
class CallName {
 public:
  explicit CallName(const c10::OperatorName& op) {
    put(op.name);
    put(op.overload_name);
    put(c10::get_default_dtype_as_scalartype());
  }

  // Whether all arguments could be named; otherwise the call has no name.
  bool is_whole() const { return is_whole_; }
  const std::string& bytes() const { return bytes_; }

  void add(const c10::IValue& value) {
    put(value.tagKind());
    if (value.isTensor()) add_tensor(value.toTensor());
    else if (value.isInt()) put(value.toInt());
    else if (value.isDouble()) put(value.toDouble());
    else if (value.isBool()) put(value.toBool());
    else if (value.isString()) put(value.toStringRef());
    else if (value.isIntList()) put_all(value.toIntVector());
    else if (value.isDoubleList()) put_all(value.toDoubleVector());
    else if (value.isBoolList()) put_all(value.toBoolList().vec());
    else if (value.isTensorList()) add_tensors(value.toTensorVector());
    else if (value.isOptionalTensorList()) add_tensors(value.toOptionalTensorVector());
    else is_whole_ &= value.isNone() || value.isDevice() || value.isGenerator();
  }

 private:
  void add_tensor(const at::Tensor& tensor) {
    put(tensor.defined());
    if (!tensor.defined()) return;
    put(tensor.scalar_type());
    put_all(tensor.sizes());
    put_all(tensor.strides());
    // A number is a tensor of the host without a dimension. It has rules of promotion of its own, and meta kernels may
    // look at its value.
    bool is_number = tensor.device().is_cpu() && tensor.dim() == 0;
    put(is_number);
    if (is_number) put(tensor.unsafeGetTensorImpl()->is_wrapped_number());
    if (is_number) bytes_.append(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes());
  }

  template <class Tensors>
  void add_tensors(const Tensors& tensors) {
    put(tensors.size());
    for (const std::optional<at::Tensor>& tensor : tensors) add_tensor(tensor.value_or(at::Tensor()));
  }

  void put(const std::string& text) {
    put(text.size());
    bytes_ += text;
  }

  template <class Value>
  void put(Value value) {
    static_assert(std::is_arithmetic_v<Value> || std::is_enum_v<Value>);
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }

  template <class Values>
  void put_all(const Values& values) {
    put(values.size());
    for (typename Values::value_type value : values) put(value);
  }

  std::string bytes_;
  bool is_whole_ = true;
};

}  // namespace lag

// Autocast with the lists of operators that torch has for CUDA.
#pragma once

#include "torch_headers.h"

namespace lag {

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

#define LAG_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define LAG_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define LAG_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {  // the macros of torch call the library m
  AT_FORALL_LOWER_PRECISION_FP(LAG_LOWER)
  AT_FORALL_FP32(LAG_FP32)
  AT_FORALL_PROMOTE(LAG_PROMOTE)
}

}  // namespace lag

"""Which of DeepSpeed's test files the yardstick counts.

They are about ZeRO 0 to 3, offload, precision, schedules, checkpoints, accumulation and the user's own backward.

This module owns the selection, with a reason for each file of these folders that is left out, and for each test that is
about DeepSpeed's own parts. Paths are those of DeepSpeed 0.19.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

FOLDERS = (
    "runtime",
    "runtime/zero",
    "runtime/half_precision",
    "checkpoint",
    "utils",
    "v1",
    "v1/accelerator",
    "v1/half_precision",
    "v1/zero",
)

LEFT_OUT: Mapping[str, str] = {
    "checkpoint/test_autotp_uc_checkpoint.py": "tensor parallelism",
    "checkpoint/test_convert_checkpoint.py": "downloads a model",
    "checkpoint/test_mics_optimizer.py": "MiCS",
    "checkpoint/test_moe_checkpoint.py": "expert parallelism",
    "checkpoint/test_pipeline.py": "pipelines",
    "checkpoint/test_reshape_checkpoint.py": "pipelines and tensor parallelism",
    "checkpoint/test_sparse.py": "sparse gradients",
    "runtime/half_precision/test_fp8.py": "fp8",
    "runtime/test_autocast.py": "DeepSpeed's own parts",
    "runtime/test_ds_config_model.py": "DeepSpeed's own parts",
    "runtime/test_data_efficiency.py": "curriculum learning",
    "runtime/test_engine_eigenvalue.py": "eigenvalues",
    "runtime/test_mup_optimizers.py": "muP",
    "runtime/test_pld.py": "progressive layer drop",
    "runtime/test_runtime_utils.py": "DeepSpeed's own parts",
    "runtime/test_tp_plan_extraction.py": "tensor parallelism",
    "runtime/zero/test_zero_offloadpp.py": "offload of a part of the optimizer",
    "runtime/zero/test_zero_tiled.py": "tiled layers",
    "runtime/zero/test_zeropp.py": "ZeRO++",
    "utils/test_byte_cast.py": "DeepSpeed's own parts",
    "utils/test_get_optim_files.py": "DeepSpeed's own parts",
    "utils/test_nvtx.py": "DeepSpeed's own parts",
    "utils/test_partition_balanced.py": "DeepSpeed's own parts",
    "utils/test_pin_memory_tracker.py": "DeepSpeed's own parts",
    "v1/zero/test_overlap_comm_record_stream.py": "DeepSpeed's own parts",
    "v1/zero/test_stage2_flatten_on_gpu.py": "DeepSpeed's own parts",
    "v1/zero/test_zero_coalesce_grad_reduction.py": "DeepSpeed's own parts",
}

# Single tests whose whole matter is a part of DeepSpeed that has no counterpart here, by the beginning of their names.
# They are run and counted like all others; the share of the tests without them is printed, too.
INTERNALS: Mapping[str, str] = {
    "checkpoint/test_zero_optimizer.py::TestZeRONonDistributed::": "the mode of a script that DeepSpeed copies",
    "runtime/half_precision/test_dynamic_loss_scale.py::TestFused::": "gradients that are set without a backward pass",
    "runtime/zero/test_zero_allreduce_fetch_params.py::": "a gather as a method of the parameter",
    "runtime/zero/test_zero_context.py::TestMiCS": "MiCS",
    "runtime/zero/test_zero_context.py::TestSerialContext::test_scatter_halftype": "a parameter's private partition",
    "runtime/zero/test_zero_context.py::TestSerialContext::test_throughput_calculation": "the engine's private timer",
    "runtime/zero/test_zero_context.py::test_multiple_all_gather_handles": "DeepSpeed's handles of gathers",
    "runtime/zero/test_zero_context_return.py::TestReturnParam::test_ext": "the private lists of external parameters",
    "runtime/zero/test_zero_hook_attribute_delegation.py::": "private counters of DeepSpeed's hooks",
    "runtime/zero/test_zero_late_module_attach.py::TestEnsureZeroOrderedDict::": "the dict that holds parameters",
    "runtime/zero/test_zero_late_module_attach.py::TestZero3LateModuleAttach::test_idem": "the same dict",
    "runtime/zero/test_zero_linear_direct_init.py::": "DeepSpeed's linear function",
    "runtime/zero/test_unwrap_model.py::TestUnwrapModel::": "the private list of DeepSpeed's hooks",
    "runtime/zero/test_zero_nesting_init.py::TestNestedParallelInit::": "a private wrapper of torch's constructors",
    "v1/accelerator/test_accelerator.py": "the files of DeepSpeed's accelerators",
    "v1/half_precision/test_gradient_clipping_default.py::TestGradientClippingConfig::": "a private function",
    "v1/half_precision/test_mixed_precision_dtype.py::TestCastModuleMixedPrecision::": "private methods of the engine",
    "v1/zero/test_offload_states.py::": "the devices of the private buffers of DeepSpeed's optimizers",
    "utils/test_groups.py::test_get_expert_parallel_ranks": "a private function of expert parallelism",
    "v1/zero/test_zero.py::TestIncorectAllgatherBucketSize::": "buckets",
    "v1/zero/test_zero.py::TestPartitionNcclAlignment::": "the alignment of flat buffers",
    "v1/zero/test_zero.py::TestZero3InitForParentWeightInitialization::": "a parameter's private partition",
    "v1/zero/test_zero.py::TestZero3ParamPartitioningBase": "a parameter's private partition, to which the test writes",
    "v1/zero/test_zero.py::TestZeroAdamOptimizerStepCount::": "the flat groups of DeepSpeed's optimizers",
    "v1/zero/test_zero2_offload_multi_backward.py::TestZeroOffloadMultiBackward::test_single_backward_a": "buffers",
    "v1/zero/test_zero_activation_checkpoint_lifecycle.py::": "DeepSpeed's sets of modules that use a parameter",
    "v1/zero/test_zero_cpu_offload_grad_accum.py::": "DeepSpeed's buffers of gradients on the CPU",
    "v1/zero/test_zero_functorch_linear.py::": "DeepSpeed's linear function",
    "v1/zero/test_zero_hook_count_regression.py::TestHookCountRegression::test_non": "calls of a private function",
}


def is_about_internals(test: str) -> bool:
    """Return whether a test, by pytest's name of it, is about a part of DeepSpeed that has no counterpart here."""
    return test.removeprefix("unit/").startswith(tuple(INTERNALS))


def chosen_files(unit: Path) -> list[str]:
    """Return the files that count, relative to DeepSpeed's folder tests/unit."""
    files = [f"{folder}/{path.name}" for folder in FOLDERS for path in sorted((unit / folder).glob("test_*.py"))]
    return [file for file in files if file not in LEFT_OUT]

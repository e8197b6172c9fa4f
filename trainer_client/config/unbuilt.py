"""The sections of DeepSpeed's config for features that this library does not have.

Each section knows the names of its keys, so that a section that is switched off can stay in a config, and a mistyped
`enabled` is found. The keys have no meaning here.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from pydantic import Field

from trainer_client.section import Section
from trainer_client.standing import Refused, WithoutEffect, is_absent, is_at_most_one

# A key of a feature that the library does not have.
Known: TypeAlias = Annotated[Any, Field(description="a key of a feature that is not built")]

_DATA_PARALLEL = "the library has data parallelism only (ZeRO)"


class Feature(Section):
    """A section whose feature is off unless `enabled` is true."""

    enabled: bool = Field(default=False, description="whether the feature is used")


class ProgressiveLayerDropSection(Feature):
    """Leave layers out at random, in training."""

    theta: Known = None
    gamma: Known = None


class CurriculumLearningSection(Feature):
    """Begin with easy samples, as DeepSpeed's older section has it."""

    curriculum_type: Known = None
    min_difficulty: Known = None
    max_difficulty: Known = None
    schedule_type: Known = None
    schedule_config: Known = None


class DataEfficiencySection(Feature):
    """Choose samples and tokens in training."""

    seed: Known = None
    data_sampling: Known = None
    data_routing: Known = None


class EigenvalueSection(Feature):
    """Compute eigenvalues of the Hessian."""

    verbose: Known = None
    max_iter: Known = None
    tol: Known = None
    stability: Known = None
    gas_boundary_resolution: Known = None
    layer_name: Known = None
    layer_num: Known = None
    model_name: Known = None


class CompressionSection(Section):
    """Quantize and prune in training. Each technique has an `enabled` of its own."""

    weight_quantization: Known = None
    activation_quantization: Known = None
    sparse_pruning: Known = None
    row_pruning: Known = None
    head_pruning: Known = None
    channel_pruning: Known = None
    layer_reduction: Known = None


class QuantizeTrainingSection(Feature):
    """Quantize in training, as DeepSpeed's older section has it."""

    quantize_verbose: Known = None
    quantizer_kernel: Known = None
    quantize_type: Known = None
    quantize_groups: Known = None
    quantize_bits: Known = None
    quantize_schedule: Known = None
    quantize_algo: Known = None
    fp16_mixed_quantize: Known = None
    eigenvalue: Known = None
    schedule: Known = None
    bits: Known = None
    groups: Known = None
    type: Known = None
    rounding: Known = None


class WeightQuantizationSection(Feature):
    """Quantize weights for inference."""

    enabled: bool = Field(default=True, description="whether the feature is used")
    num_bits: Known = None
    q_type: Known = None
    q_groups: Known = None
    quantized_initialization: Known = None
    post_init_quant: Known = None


class SparseAttentionSection(Section):
    """DeepSpeed's sparse attention, which a model has to call."""

    mode: Known = None
    block: Known = None
    different_layout_per_head: Known = None
    num_local_blocks: Known = None
    num_global_blocks: Known = None
    attention: Known = None
    horizontal_global_attention: Known = None
    num_different_global_patterns: Known = None
    num_random_blocks: Known = None
    local_window_blocks: Known = None
    global_block_indices: Known = None
    global_block_end_indices: Known = None
    num_sliding_window_blocks: Known = None


class ElasticitySection(Feature):
    """Choose batch sizes that suit many numbers of ranks."""

    max_train_batch_size: Known = None
    micro_batch_sizes: Known = None
    min_gpus: Known = None
    max_gpus: Known = None
    min_time: Known = None
    version: Known = None
    prefer_larger_batch: Known = None
    prefer_large_batch: Known = None
    ignore_non_elastic_batch_info: Known = None
    num_gpus_per_node: Known = None
    model_parallel_size: Known = None


class AutotuningSection(Feature):
    """Search for the fastest config, by runs of DeepSpeed's launcher."""

    fast: Known = None
    results_dir: Known = None
    exps_dir: Known = None
    overwrite: Known = None
    start_profile_step: Known = None
    end_profile_step: Known = None
    start_step: Known = None
    end_step: Known = None
    metric: Known = None
    metric_path: Known = None
    tuner_type: Known = None
    tuner_early_stopping: Known = None
    tuner_num_trials: Known = None
    arg_mappings: Known = None
    max_train_batch_size: Known = None
    min_train_batch_size: Known = None
    max_train_micro_batch_size_per_gpu: Known = None
    min_train_micro_batch_size_per_gpu: Known = None
    num_tuning_micro_batch_sizes: Known = None
    mp_size: Known = None
    model_info: Known = None
    model_info_path: Known = None


class HybridEngineSection(Feature):
    """Switch between training and DeepSpeed's inference kernels."""

    max_out_tokens: Known = None
    inference_tp_size: Known = None
    release_inference_cache: Known = None
    pin_parameters: Known = None
    tp_gather_partition_size: Known = None
    enable_cuda_graph: Known = None


class TensorParallelSection(Section):
    """Divide layers among ranks."""

    autotp_size: int = Field(default=0, description="ranks that share a layer")
    tp: Known = None
    tensor_parallel: Known = None
    dtype: Known = None
    tp_overlap_comm: Known = None
    injection_policy_tuple: Known = None
    partition_config: Known = None
    preset_model: Known = None
    keep_module_on_host: Known = None
    replace_with_kernel_inject: Known = None
    kernel_inject: Known = None


class ExpertParallelSection(Feature):
    """Divide experts among ranks."""

    autoep_size: Known = None
    expert_tensor_parallel_size: Known = None
    validate_folding_routing: Known = None
    preset_model: Known = None
    moe_layer_pattern: Known = None
    expert_pattern: Known = None
    router_pattern: Known = None
    use_grouped_mm: Known = None
    disable_triton_grouped_mm: Known = None
    route_norm: Known = None
    route_scale: Known = None
    score_apply: Known = None
    combine_impl: Known = None
    num_expert_groups: Known = None
    num_limited_groups: Known = None
    score_func: Known = None
    top_k: Known = None
    load_balance_coeff: Known = None
    routed_scaling_factor: Known = None
    expert_w1: Known = None
    expert_w2: Known = None
    expert_w3: Known = None
    num_experts_attr: Known = None
    top_k_attr: Known = None
    has_shared_experts: Known = None
    shared_experts_pattern: Known = None
    shared_experts_gate_pattern: Known = None


class PipelineSection(Section):
    """Divide a PipelineModule among ranks."""

    stages: int | None = Field(default=None, description="ranks that share a model, layer after layer")
    partition: Known = None
    seed_layers: Known = None
    activation_checkpoint_interval: Known = None
    pipe_partitioned: Known = None
    grad_partitioned: Known = None
    use_reentrant: Known = None


class UnbuiltKeys(Section):
    """The keys of the config for features that this library does not have."""

    tensor_parallel: Annotated[
        TensorParallelSection,
        Refused(
            why=_DATA_PARALLEL,
            instead="set autotp_size to 0, and use ZeRO stage 3",
            unless=lambda section: is_at_most_one(section.autotp_size),
        ),
        Field(description="divide layers among ranks"),
    ] = TensorParallelSection()
    pipeline: Annotated[
        PipelineSection,
        Refused(
            why=_DATA_PARALLEL,
            instead="set stages to 1, and use ZeRO stage 3",
            unless=lambda section: is_at_most_one(section.stages),
        ),
        Field(description="divide a model, layer after layer, among ranks"),
    ] = PipelineSection()
    sequence_parallel_size: Annotated[
        int,
        Refused(
            why=_DATA_PARALLEL,
            instead="set it to 1; recompute activations with torch.utils.checkpoint for long sequences",
            unless=is_at_most_one,
        ),
        Field(description="ranks that share a sequence"),
    ] = 1
    data_parallel_size: Annotated[
        int | None,
        WithoutEffect(why="every rank is one of data parallelism"),
        Field(description="ranks that have a copy of the model, beside sequence_parallel_size"),
    ] = None
    expert_parallel: Annotated[
        ExpertParallelSection,
        Refused(why=_DATA_PARALLEL, instead="set enabled to false, and use ZeRO stage 3, which divides experts too"),
        Field(description="divide experts among ranks"),
    ] = ExpertParallelSection()
    use_data_before_expert_parallelism: Annotated[
        bool,
        WithoutEffect(why="there is no expert parallelism"),
        Field(description="order of ranks in groups of experts"),
    ] = False
    elasticity: Annotated[
        ElasticitySection,
        Refused(
            why="batch sizes are those of the config",
            instead="write them; a job resumes on any number of ranks with the same train_batch_size",
        ),
        Field(description="choose batch sizes that suit many numbers of ranks"),
    ] = ElasticitySection()
    autotuning: Annotated[
        AutotuningSection,
        Refused(why="there is no tuner of configs", instead="set enabled to false, and see docs/performance.md"),
        Field(description="search for the fastest config"),
    ] = AutotuningSection()
    hybrid_engine: Annotated[
        HybridEngineSection,
        Refused(
            why="DeepSpeed's inference kernels are not used",
            instead="set enabled to false; the model's generate() works between steps",
        ),
        Field(description="generate with DeepSpeed's inference kernels"),
    ] = HybridEngineSection()
    progressive_layer_drop: Annotated[
        ProgressiveLayerDropSection,
        Refused(
            why="leaving out layers changes results",
            instead="set enabled to false, and leave layers out in the model's forward, which may differ between steps",
        ),
        Field(description="leave layers out at random"),
    ] = ProgressiveLayerDropSection()
    curriculum_learning: Annotated[
        CurriculumLearningSection,
        Refused(
            why="the order of samples is that of paramserver.data",
            instead="set enabled to false, and choose samples in your dataset or loader",
        ),
        Field(description="begin with easy samples (older section)"),
    ] = CurriculumLearningSection()
    data_efficiency: Annotated[
        DataEfficiencySection,
        Refused(
            why="the order of samples is that of paramserver.data, and all tokens are used",
            instead="set enabled to false, and choose samples in your dataset or loader",
        ),
        Field(description="choose samples and tokens"),
    ] = DataEfficiencySection()
    compression_training: Annotated[
        CompressionSection,
        Refused(
            why="quantizing or pruning in training changes results",
            instead="set each enabled to false, and change the model's modules instead",
        ),
        Field(description="quantize and prune in training"),
    ] = CompressionSection()
    quantize_training: Annotated[
        QuantizeTrainingSection,
        Refused(
            why="quantizing in training changes results",
            instead="set enabled to false, and change the model's modules instead",
        ),
        Field(description="quantize in training (older section)"),
    ] = QuantizeTrainingSection()
    weight_quantization: Annotated[
        WeightQuantizationSection | None,
        Refused(why="quantizing weights changes results", instead="remove it, and quantize the model yourself"),
        Field(description="quantize weights for inference"),
    ] = None
    eigenvalue: Annotated[
        EigenvalueSection,
        Refused(
            why="there are no second derivatives",
            instead="set enabled to false, and compute them with torch.func on the plain model",
        ),
        Field(description="compute eigenvalues of the Hessian"),
    ] = EigenvalueSection()
    sparse_attention: Annotated[
        SparseAttentionSection | None,
        Refused(
            why="DeepSpeed's attention kernels are not used",
            instead="remove it, and use torch's flex_attention in the model",
            unless=lambda value: is_absent(value) or value.mode == "dense",
        ),
        Field(description="DeepSpeed's sparse attention"),
    ] = None

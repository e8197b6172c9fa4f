"""DeepSpeed's builders of compiled operators. Scripts ask them what can be used, but here nothing is compiled.

This module owns the list of DeepSpeed's operators. It must never say that an operator can be used if this library does
not have the feature for which DeepSpeed needs the operator.
"""

from __future__ import annotations

from typing import ClassVar, NoReturn

from trainer_client.base.not_built import refuse

__all__ = [
    "AsyncIOBuilder",
    "CPUAdagradBuilder",
    "CPUAdamBuilder",
    "CPULionBuilder",
    "FusedAdamBuilder",
    "FusedLionBuilder",
    "OpBuilder",
]

_OPTIMIZER = "nothing is compiled here; make the optimizer itself, as deepspeed.ops.{}, and pass it to initialize()"


class OpBuilder:
    """The base of the builders, which scripts ask whether an operator of DeepSpeed can be used.

    Attributes:
        NAME: the operator's name, by which `deepspeed.ops.__compatible_ops__` says whether it can be used.
    """

    NAME: ClassVar[str]
    _remedy: ClassVar[str]

    @property
    def name(self) -> str:
        """The operator's name."""
        return self.NAME

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return True: the feature for which DeepSpeed needs the operator works here on every machine."""
        return True

    def load(self, verbose: bool = True) -> NoReturn:
        """Refuse to give the compiled operator. It raises NotBuiltError."""
        refuse(f"{type(self).__name__}.load", self._remedy)


class AsyncIOBuilder(OpBuilder):
    """The builder of DeepSpeed's asynchronous file I/O for NVMe. Here the store daemon reads and writes the files."""

    NAME = "async_io"
    _remedy = (
        "the store daemon reads and writes the files; set the device of zero_optimization.offload_param or "
        "offload_optimizer to nvme, or keep tensors in the store with trainer_client.StoreClient"
    )


class CPUAdamBuilder(OpBuilder):
    """The builder of DeepSpeed's Adam for host memory. Nothing is compiled, and the optimizer can be used here."""

    NAME = "cpu_adam"
    _remedy = _OPTIMIZER.format("adam.DeepSpeedCPUAdam")


class CPUAdagradBuilder(OpBuilder):
    """The builder of DeepSpeed's Adagrad for host memory. Nothing is compiled, and the optimizer can be used here."""

    NAME = "cpu_adagrad"
    _remedy = _OPTIMIZER.format("adagrad.DeepSpeedCPUAdagrad")


class CPULionBuilder(OpBuilder):
    """The builder of DeepSpeed's Lion for host memory. Nothing is compiled, and the optimizer can be used here."""

    NAME = "cpu_lion"
    _remedy = _OPTIMIZER.format("lion.DeepSpeedCPULion")


class FusedAdamBuilder(OpBuilder):
    """The builder of DeepSpeed's Adam for GPUs. Nothing is compiled, and the optimizer can be used here."""

    NAME = "fused_adam"
    _remedy = _OPTIMIZER.format("adam.FusedAdam")


class FusedLionBuilder(OpBuilder):
    """The builder of DeepSpeed's Lion for GPUs. Nothing is compiled, and the optimizer can be used here."""

    NAME = "fused_lion"
    _remedy = _OPTIMIZER.format("lion.FusedLion")


# The other operators of DeepSpeed 0.19.6, whose features this library does not have.
_NOT_BUILT = (
    "cutlass_ops",
    "dc",
    "evoformer_attn",
    "fp_quantizer",
    "fused_lamb",
    "gds",
    "inference_core_ops",
    "pin_memory",
    "quantizer",
    "ragged_device_ops",
    "ragged_ops",
    "random_ltd",
    "sparse_attn",
    "spatial_inference",
    "stochastic_transformer",
    "transformer",
    "transformer_inference",
    "utils",
)

# For the name of each operator of DeepSpeed, whether the feature for which DeepSpeed needs the operator can be used
# here.
__compatible_ops__ = dict.fromkeys(_NOT_BUILT, False) | {builder.NAME: True for builder in OpBuilder.__subclasses__()}

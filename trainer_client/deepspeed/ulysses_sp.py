"""DeepSpeed's parts of a sequence on several ranks (Ulysses), which are not built, and its computations in tiles."""

from __future__ import annotations

from typing import Any, NoReturn

from trainer_client.base.not_built import NotBuilt, refuse

__all__ = [
    "TiledFusedLogitsLoss",
    "TiledMLP",
    "UlyssesSPAttentionHF",
    "UlyssesSPDataLoaderAdapter",
    "sequence_tiled_compute",
]

_REMEDY = "sequence parallelism (Ulysses) is not built; leave sp_size at 1, and give each rank whole sequences"
_TILED_MLP = "wrap the block in deepspeed.checkpointing.checkpoint, and cut the sequence in the model's own code"
_TILED_LOSS = "call trainer_client.chunked_cross_entropy, which computes the loss without all logits"


class UlyssesSPAttentionHF(NotBuilt, remedy=_REMEDY):
    """DeepSpeed's attention over ranks for models of transformers."""

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str,
        sequence_parallel_size: int,
        max_length: int | None = None,
        micro_batch_size: int = 1,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        **_: Any,
    ) -> NoReturn:
        """Refuse to replace a model's attention. It raises NotBuiltError.

        Accelerate looks at the names of the arguments before it calls this.
        """
        refuse("UlyssesSPAttentionHF.register_with_transformers", _REMEDY)


class UlyssesSPDataLoaderAdapter(NotBuilt, remedy=_REMEDY):
    """DeepSpeed's data loader that gives each rank a part of each sequence."""


class TiledMLP(NotBuilt, remedy=_TILED_MLP):
    """DeepSpeed's MLP that is computed for parts of a sequence, one after the other."""

    @classmethod
    def apply(cls, *_: Any, **__: Any) -> NoReturn:
        """Refuse the computation. It raises NotBuiltError."""
        refuse("TiledMLP.apply", _TILED_MLP)


class TiledFusedLogitsLoss(NotBuilt, remedy=_TILED_LOSS):
    """DeepSpeed's loss that is computed for parts of a sequence, one after the other."""

    @classmethod
    def apply(cls, *_: Any, **__: Any) -> NoReturn:
        """Refuse the computation. It raises NotBuiltError."""
        refuse("TiledFusedLogitsLoss.apply", _TILED_LOSS)


def sequence_tiled_compute(*_: Any, **__: Any) -> NoReturn:
    """Refuse a computation in tiles of a sequence. It raises NotBuiltError."""
    refuse("sequence_tiled_compute", _TILED_MLP)

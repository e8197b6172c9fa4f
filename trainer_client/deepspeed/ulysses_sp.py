"""DeepSpeed's sequence parallelism (Ulysses) and its computations in tiles of a sequence, which are not built."""

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
    """DeepSpeed's sequence-parallel attention for models of transformers. It is not built, so its use is an error."""

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

        The arguments have their names because Accelerate inspects the signature before it calls this method.
        """
        refuse("UlyssesSPAttentionHF.register_with_transformers", _REMEDY)


class UlyssesSPDataLoaderAdapter(NotBuilt, remedy=_REMEDY):
    """DeepSpeed's data loader that gives each rank a part of each sequence. It is not built: its use is an error."""


class TiledMLP(NotBuilt, remedy=_TILED_MLP):
    """DeepSpeed's MLP that is computed for one part of a sequence after another. It is not built: `apply` raises."""

    @classmethod
    def apply(cls, *_: Any, **__: Any) -> NoReturn:
        """Refuse the computation. It raises NotBuiltError."""
        refuse("TiledMLP.apply", _TILED_MLP)


class TiledFusedLogitsLoss(NotBuilt, remedy=_TILED_LOSS):
    """DeepSpeed's loss, computed for one part of a sequence after another. It is not built: `apply` raises."""

    @classmethod
    def apply(cls, *_: Any, **__: Any) -> NoReturn:
        """Refuse the computation. It raises NotBuiltError."""
        refuse("TiledFusedLogitsLoss.apply", _TILED_LOSS)


def sequence_tiled_compute(*_: Any, **__: Any) -> NoReturn:
    """Refuse a computation in tiles of a sequence. It raises NotBuiltError."""
    refuse("sequence_tiled_compute", _TILED_MLP)

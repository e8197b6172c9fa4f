"""DeepSpeed's `deepspeed.ops`: its optimizers, with their arguments, as optimizers that the store runs.

An object of such a class is torch's optimizer, so it also works without the store. This package must never compute
another update than the class in torch that it stands for: docs/deepspeed.md says where DeepSpeed's own kernels round
differently.
"""

from __future__ import annotations

from trainer_client.ops import adagrad, adam, lamb, lion

__all__ = ["adagrad", "adam", "lamb", "lion"]

"""DeepSpeed's `deepspeed.ops`: its optimizers, with their arguments, as optimizers that the store runs.

An object of such a class is torch's optimizer, so it also works without the store. This package must never compute
another update than the class in torch that it stands for: docs/deepspeed.md says where DeepSpeed's own kernels round
differently.

`__compatible_ops__` says for each of DeepSpeed's compiled operators whether what it is for can be used here.
"""

from __future__ import annotations

from trainer_client.ops import adagrad, adam, aio, lamb, lion, op_builder

__all__ = ["__compatible_ops__", "adagrad", "adam", "aio", "lamb", "lion", "op_builder"]

__compatible_ops__ = op_builder.compatible_ops()

"""The words of the kinds that a job stores. `make proto` makes this file; do not edit it."""

from __future__ import annotations

from typing import Literal

# The names of the kinds that a job stores from step to step. Gradients are left out, because a step uses them up.
StoredKind = Literal[
    "param",
    "master",
    "exp_avg",
    "exp_avg_sq",
    "momentum_buffer",
    "sum",
]

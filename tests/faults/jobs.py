"""The jobs that the campaign trains, and the rule by which their bytes change, in numpy alone.

Nothing here imports the engine. Every new value depends on the old one and on a gradient drawn from the step's salt,
and every operation is exact in fp32 up to one rounding, so that torch must give the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float32]
# The values of a group by kind, named as in `storage.base.shard.Kind`.
State = dict[str, npt.NDArray[Any]]
# new = old * factor + gradient * gain. The factors and gains are powers of two, so that only the sum is rounded.
FACTORS = {"weight": (0.5, 1.0), "exp_avg": (0.25, 2.0), "exp_avg_sq": (0.5, 4.0)}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobShape:
    """The shape of a job.

    Attributes:
        groups: the number of elements of each group, by name.
        half: whether parameters are in bf16, with a master weight in fp32.
        moments_on_host: whether the moments are at home in host memory, and not on NVMe.
        every_steps: the number of steps between durable commits; 0: none is durable.
    """

    name: str
    groups: Mapping[str, int]
    half: bool
    moments_on_host: bool
    every_steps: int
    world_size: int = 1
    # Whether the worker deletes the job after some steps and creates it anew.
    short_lived: bool = False

    @property
    def weight_kind(self) -> str:
        """The kind that has the fp32 weights."""
        return "master" if self.half else "param"

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds that have slabs."""
        return ("param", *(("master",) if self.half else ()), "exp_avg", "exp_avg_sq")


# Tiles have 65536 elements under the campaign's host budget: one group has several, the others a fraction of one.
JOBS = (
    JobShape(
        name="steady",
        groups={"wide": 80_000, **{f"small.{i}": 16 for i in range(4)}},
        half=True,
        moments_on_host=False,
        every_steps=1,
        world_size=2,
    ),
    JobShape(
        name="snapshots",
        groups={"wide": 12_000, "small": 16},
        half=False,
        moments_on_host=True,
        every_steps=3,
    ),
    JobShape(name="volatile", groups={"wide": 9_008}, half=True, moments_on_host=False, every_steps=0),
    JobShape(
        name="short",
        groups={"wide": 6_000, "small": 48},
        half=False,
        moments_on_host=False,
        every_steps=1,
        world_size=2,
        short_lived=True,
    ),
)


def updates(shape: JobShape, salt: int) -> list[str]:
    """Return the groups that the step with this salt updates: the first one always, each other one in 3 of 4 steps."""
    return [name for i, name in enumerate(shape.groups) if i == 0 or (salt >> i) % 4]


def gradient(shape: JobShape, group: str, salt: int) -> Values:
    """Return a group's gradient [numel]: small integers, which bf16 represents exactly."""
    return _draw(shape, group, salt, 128)


def initial(shape: JobShape, group: str, salt: int) -> State:
    """Return the values of a group at step 0."""
    weight = _draw(shape, group, salt, 1 << 20) / np.float32(16)
    zeros = np.zeros_like(weight)
    return _with_param(shape, {shape.weight_kind: weight, "exp_avg": zeros, "exp_avg_sq": zeros})


def after_update(shape: JobShape, group: str, old: State, salt: int) -> State:
    """Return the values of a group after a step that updates it."""
    drawn = gradient(shape, group, salt)
    new: State = {}
    for name, (factor, gain) in FACTORS.items():
        kind = shape.weight_kind if name == "weight" else name
        new[kind] = old[kind] * np.float32(factor) + drawn * np.float32(gain)
    return _with_param(shape, new)


def to_bfloat16(values: Values) -> npt.NDArray[np.uint16]:
    """Round finite values to bf16 (to nearest, ties to even), and return their bits."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def _draw(shape: JobShape, group: str, salt: int, bound: int) -> Values:
    generator = np.random.default_rng([salt, list(shape.groups).index(group)])
    return generator.integers(-bound, bound, shape.groups[group]).astype(np.float32)


def _with_param(shape: JobShape, state: State) -> State:
    if shape.half:
        state["param"] = to_bfloat16(state["master"])
    return state

"""Whether each second boundary of activation checkpoints is computed again instead of waiting in the store.

This module owns the choice and the measured times from which it follows. It must never look at a boundary, and all
ranks choose alike.

[Note: the choice] With "auto" a run begins with boundaries that are kept on the device or moved to the store. If a rank
has waited for them in more than a twentieth of the time of its steps, or the store has refused some, each second
boundary is computed again in the steps that follow. What the computation costs and saves is measured, not computed from
bandwidths, because on an accelerator the host does not see how long a block computes, and because the store's device is
shared. The run goes on computing boundaries again if these steps took less time, or if the store has refused boundaries
before, because refused boundaries take memory of the device. If the model has no boundaries that can be computed again,
the run stops trying. The ranks exchange their figures twice in a run, and the slowest rank counts.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

import torch

from trainer_client.training.ranks.collectives import Collectives

log = logging.getLogger(__name__)

# Before each measurement, _LEFT_OUT_STEPS steps are not counted, because shapes, prefetching and memory settle in them.
# Then _MEASURED_STEPS steps are measured.
_LEFT_OUT_STEPS = 2
_MEASURED_STEPS = 4
# The largest part of a step that ranks may wait for boundaries from the store. If they wait longer, or if the store has
# no room for a boundary, the run tries to compute boundaries again.
_TOLERATED_SHARE = 0.05
# Computing boundaries again counts as faster if a step then takes less than this share of the time of a step that reads
# them from the store. The share is below 1, because medians of few steps differ by chance.
_WORTH_SHARE = 0.98


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWaits:
    """The measurements of one step on this rank, from which RecomputeChoice chooses.

    Attributes:
        seconds: the duration of the step.
        waited_seconds: how much of this time the rank waited for boundaries.
        again_bytes: the bytes of the boundaries that were freed because segments can compute them again.
        is_refused: whether the store has refused boundaries.
    """

    seconds: float
    waited_seconds: float
    again_bytes: int
    is_refused: bool


@dataclass(slots=True)
class _Measured:
    """The figures of several steps over all ranks: the largest time and share of any rank, and events on any rank."""

    seconds: float
    waited_share: float
    computes_again: bool
    is_refused: bool


@dataclass(slots=True)
class RecomputeChoice:
    """The choice of one run whether boundaries are computed again; `Activations` reads it before each forward.

    Attributes:
        mode: the user's choice: True for always, False for never, "auto" for the choice by measured times.
        collectives: exchange the ranks' figures.
        is_on: whether each second boundary is computed again in the next step.
    """

    mode: bool | Literal["auto"]
    collectives: Collectives
    is_on: bool = field(init=False)
    _is_settled: bool = field(init=False)
    _steps: list[StepWaits] = field(init=False, default_factory=list)
    _without: _Measured | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.is_on = self.mode is True
        self._is_settled = self.mode != "auto"

    def end_step(self, step: StepWaits) -> None:
        """Record a step's measurements, and choose if enough steps were measured. All ranks must call this."""
        if self._is_settled:
            return
        self._steps.append(step)
        if len(self._steps) < _LEFT_OUT_STEPS + _MEASURED_STEPS:
            return
        measured, self._steps = self._exchanged(), []
        if self._without is None:
            self._begin(measured)
        else:
            self._settle(self._without, measured)

    def _begin(self, measured: _Measured) -> None:
        if measured.waited_share <= _TOLERATED_SHARE and not measured.is_refused:
            self._is_settled = True
            return
        self._without = measured
        self.is_on = True

    def _settle(self, without: _Measured, measured: _Measured) -> None:
        self._is_settled = True
        if not measured.computes_again:
            self.is_on = False
            return
        self.is_on = without.is_refused or measured.seconds < _WORTH_SHARE * without.seconds
        if self.collectives.rank == 0:
            log.info(
                "each second boundary of activation checkpoints %s: steps took %.3f s when it was computed again and "
                "%.3f s before, of which %.0f %% were waits for boundaries%s (paramserver.activations.recompute)",
                "is computed again from now on" if self.is_on else "waits in the store like the others",
                *(measured.seconds, without.seconds, 100 * without.waited_share),
                ", and the store had no room for some" if without.is_refused else "",
            )

    def _exchanged(self) -> _Measured:
        steps = self._steps[_LEFT_OUT_STEPS:]
        seconds = median(step.seconds for step in steps)
        share = sum(step.waited_seconds for step in steps) / max(sum(step.seconds for step in steps), 1e-9)
        happened = [any(step.again_bytes for step in steps), any(step.is_refused for step in steps)]
        own = torch.tensor([seconds, share, *happened], dtype=torch.float64)
        most = self.collectives.gather_rows(own, "the choice of boundaries that are computed again").amax(0).tolist()
        return _Measured(seconds=most[0], waited_share=most[1], computes_again=bool(most[2]), is_refused=bool(most[3]))

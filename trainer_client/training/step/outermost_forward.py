"""The outermost forward under way, which can be undone if it fails.

This module owns the state in which that forward began: the phase, the trace, the holds and the uses of units.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import torch

from trainer_client.base.recorder import Recorder
from trainer_client.errors import StoreError
from trainer_client.training.step.open_forwards import OpenForwards
from trainer_client.training.step.phases import Phase, Phases, Verb
from trainer_client.training.step.residency import Residency, UnitHolder
from trainer_client.training.step.trace import Trace
from trainer_client.training.step.unit_holds import UnitHolds


@dataclass(frozen=True, slots=True, kw_only=True)
class _Before:
    """The state in which the outermost forward began, and to which `OutermostForward.fail` goes back.

    Attributes:
        mark: the place in the trace, for Trace.rewind.
        holds: the holders and the units that they held, for Residency.go_back_to.
        used: how many units were used since the last backward pass. Later ones are removed if the forward fails.
    """

    phase: Phase
    trace: Trace
    mark: tuple[int, int]
    holds: frozenset[tuple[UnitHolder, int]]
    used: int


class OutermostForward:
    """The outermost forward of the model that is under way, or the last one while it can still be undone.

    Args:
        training: the trace of forwards with gradients.
        inference: the trace of forwards without gradients.
    """

    def __init__(
        self,
        training: Trace,
        inference: Trace,
        phases: Phases,
        holds: UnitHolds,
        forwards: OpenForwards,
        residency: Residency,
        recorder: Recorder,
    ) -> None:
        self._training = training
        self._inference = inference
        self._phases = phases
        self._holds = holds
        self._forwards = forwards
        self._residency = residency
        self._recorder = recorder
        # None if the last outermost forward cannot be undone any more.
        self._before: _Before | None = None

    def begin(self) -> None:
        """Enter the phase of a forward with or without gradients, as torch has them enabled, and note what was before.

        Raises:
            PhaseError: no forward can begin in the present phase.
        """
        grad = torch.is_grad_enabled()
        before = self._phases.current
        self._phases.enter(Verb.BEGIN_FORWARD if grad else Verb.BEGIN_INFERENCE)
        trace = self._holds.trace = self._training if grad else self._inference
        self._before = _Before(
            phase=before,
            trace=trace,
            mark=trace.mark(),
            holds=self._residency.holds(),
            used=len(self._forwards.used),
        )

    def expect_none(self) -> None:
        """Take note that no forward is under way, and that the last one cannot be undone any more.

        If a forward is still noted as running, it has failed: torch calls no hook when a module that the user called
        directly is left by a KeyboardInterrupt.
        """
        if self._holds.running:
            self.fail()
        self._before = None

    def fail(self) -> None:
        """Undo the outermost forward, which has failed. Idempotent.

        The units that it held are released and its records are dropped, so that the next forward begins in the same
        state as this one.
        """
        self._holds.running.clear()
        self._forwards.undo(0)
        before, self._before = self._before, None
        if before is None or self._phases.current not in (Phase.INFERENCE, Phase.FORWARD):
            return
        before.trace.rewind(before.mark)
        self._forwards.forget_uses(before.used)
        self._recorder.compute(None)
        self._residency.pause()
        if before.phase is Phase.IDLE:
            self._phases.enter(Verb.FAIL_FORWARD)
        # The caller raises the error that has made the forward fail. Errors of the store at this place only follow from
        # that failure, so they are ignored.
        with suppress(StoreError):
            self._residency.go_back_to(before.holds)

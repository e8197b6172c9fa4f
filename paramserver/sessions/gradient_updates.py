"""The updates that use the gradients which sessions lease: their begin, their hand-over to the store, their withdrawal.

This module owns nothing: an update belongs to the pending step of its job, and a lease to its session. Updates come
here as the wire's messages, because the state of the session and its job decides which of their fields are used. This
module must never begin an update of a request before all updates of the request are checked.
"""

from __future__ import annotations

from paramserver.optimizer_kernel import OptimizerUpdate
from paramserver.rpc import convert
from paramserver.sessions.leases import Lease, LeaseMode
from paramserver.sessions.session import Session
from paramserver.v1 import parameter_store_pb2 as pb
from storage.base.errors import ConflictError, InvalidRequestError
from storage.engine import Engine


class GradientUpdates:
    """The object that begins and withdraws the updates of sessions, and ends the leases of handed-over gradients."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def apply_gradients(self, session: Session, request: pb.ApplyGradientsRequest) -> None:
        """Begin the updates of a step that use the session's leased gradients.

        All updates of the request are checked before the first one begins, so either all of them begin or none does.
        The update of a provisional request leaves the gradient's lease to the session, which may still withdraw it.

        Raises:
            InvalidRequestError: an update does not fit its group, or a group is updated twice.
            NotFoundError: the session does not hold one of the leases.
            ConflictError: a lease is not for the gradient of its group, or its update has begun already.
            StepAbortedError: a rank of the session's run is gone.
            StorageError: see PendingSteps.check_update.
        """
        job = await session.job()
        session.require_run().check_whole()
        step = convert.step(request.step, "step")
        hyper_parameters = [
            convert.hyper_parameters(h) for h in convert.batch(request.hyper_parameters, "hyper_parameters")
        ]
        checked: list[tuple[Lease, OptimizerUpdate, float]] = []
        for update in convert.batch(request.updates, "updates"):
            lease = session.lease(update.grad_lease_id)
            if lease.mode is not LeaseMode.GRADIENT or lease.group != update.group:
                raise ConflictError(f"lease {lease.lease_id} is not for the gradient of group {update.group!r}")
            if lease.update is not None:
                raise ConflictError(
                    f"the gradient of group {update.group!r} was handed over already; withdraw that update first"
                )
            if lease.gradient is not None and lease.gradient.is_freed:
                raise ConflictError(
                    f"the gradient of group {update.group!r} is freed, because a final update has used it"
                )
            kernel = convert.optimizer_update(job.group(update.group).spec, update, hyper_parameters)
            self._engine.pending_steps.check_update(job, step, update.group)
            checked.append((lease, kernel, convert.position(update.position, "updates.position")))
        if len({lease.group for lease, _, _ in checked}) != len(checked):
            raise InvalidRequestError("a group is updated twice in one request")
        for lease, kernel, position in checked:
            assert lease.gradient is not None, "a lease of this mode has one"
            lease.update = self._engine.pending_steps.update(
                job,
                step,
                lease.group,
                lease.gradient,
                kernel,
                position=position,
                keeps_gradient=True,
                # A client that registers the arena computes on its device, so the host has time to compute the early
                # update during the backward pass. Its result goes to a shadow, beside the committed bytes.
                aside=request.provisional and session.registers_arena,
            )
            if request.final:
                self._engine.gradients.free_when_used_up(lease.gradient)
            if not request.provisional:
                self._hand_over(session, lease)

    def hand_over_all(self, session: Session) -> None:
        """Make all updates that the session has begun final: it can withdraw none of them any more."""
        for lease in [lease for lease in session.leases.values() if lease.update is not None]:
            self._hand_over(session, lease)

    def _hand_over(self, session: Session, lease: Lease) -> None:
        """End the lease of a gradient whose update has begun. The range is freed when the update is done."""
        assert lease.update is not None and lease.gradient is not None
        lease.void = True
        session.remove_lease(lease)
        self._engine.gradients.free_after(lease.update, lease.gradient)
        if lease.asks_to_park and not lease.update.done():
            # After the client has handed the gradient over, its update may wait for a long time. So the gradient is
            # parked: the engine may spill it and free its host memory until the update needs it.
            self._engine.gradients.park(lease.gradient)

    async def withdraw(self, session: Session, step: int, group: str) -> None:
        """Undo a group's update in the pending step. The session keeps its lease on the gradient.

        Raises:
            ConflictError: the session has no provisional update of that group.
            StorageError: see PendingSteps.withdraw.
        """
        job = await session.job()
        held = session.exclusive.get(group)
        if held is None or held.update is None:
            raise ConflictError(f"group {group!r} has no update of this session that can be withdrawn")
        await self._engine.pending_steps.withdraw(job, step, group)
        held.update = None
        if held.gradient is not None:
            held.gradient.update = None

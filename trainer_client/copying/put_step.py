"""The putting of a step, read from a daemon or a backup, into another daemon as the same step of the same job.

The target has the whole step or nothing of it: one run, which has the ranks of the source, puts the step's bytes, and
readers see them only after the run's commit. Bytes that the target has already are not sent again. This module owns the
sessions of the run. It must never commit before the target has read the bytes back, and must never change a step that
the target has committed.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
import xxhash

from paramserver.contract.capabilities import CODECS, SETTLED_STEPS
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import store_admin_pb2 as admin_pb
from trainer_client.client.store_client.connection import Call, Connection, StoreSession
from trainer_client.client.store_client.staging import Content, codecs_of, commit_step, put_slabs, registrations
from trainer_client.client.transport.channel import (
    COMMIT_DEADLINE_SECONDS,
    CONTROL_DEADLINE_SECONDS,
    LEASE_DEADLINE_SECONDS,
)
from trainer_client.copying.daemon_step import DaemonStep, digest_batches
from trainer_client.copying.description import (
    PART_BYTES,
    CopyProgress,
    SlabKey,
    StepDescription,
    StepSource,
    StoredSlab,
)
from trainer_client.copying.pace import Pace
from trainer_client.errors import CopyError, JobConflictError, StoreError, StoreTimeoutError, StoreUnavailableError
from trainer_client.training.run import rolled_back
from trainer_client.training.run.rolled_back import RollBacks

log = logging.getLogger(__name__)

# The most slabs that a copy fills or publishes at the same time. Each of these slabs takes room in the target's host
# memory.
_SLABS_UNDER_WAY = 2
# The announcement of a copy (BeginCopy) is repeated for at most _HAND_OVER_SECONDS, because the target's daemon refuses
# it until it has noticed that the client of an interrupted copy is gone.
_HAND_OVER_SECONDS = 2.0
_HAND_OVER_LOOK_SECONDS = 0.5
# If the target's daemon ends during a copy, the copy waits RESTART_SECONDS for another daemon and begins anew, at most
# MOST_RESTARTS times.
RESTART_SECONDS = 60.0
MOST_RESTARTS = 5
# The name that the target gives to a layout that has no name in the source. Earlier versions made layouts without
# names.
_UNNAMED_LAYOUT = "copied"


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyResult:
    """The result of a copy.

    Attributes:
        job: the name of the job.
        step: the number of the step that the target has now.
        total_bytes: the bytes of the whole step.
        sent_bytes: the bytes that were sent.
        sent_slabs: the number of slabs (kinds of groups) that were sent.
        same_bytes: the bytes that were not sent, because the target's last committed step already had them.
        resumed_bytes: the bytes that were not sent, because an interrupted copy of the same step had sent them.
        durable: whether the step in the target survives kill -9 and power loss.
        seconds: the duration of the copy.
    """

    job: str
    step: int
    total_bytes: int
    sent_bytes: int
    sent_slabs: int
    same_bytes: int
    resumed_bytes: int
    durable: bool
    seconds: float


def put_step(
    source: StepSource,
    target: Connection,
    *,
    on_progress: Callable[[CopyProgress], None] = lambda _: None,
    restart_seconds: float = RESTART_SECONDS,
) -> CopyResult:
    """Make the step that `source` has the newest step of the same job in another daemon, bit for bit.

    If a copy is interrupted (the process is killed, a connection is lost), the target's daemon keeps the bytes that it
    has received for an hour, and the next copy of the same step sends only the missing bytes. After any other failure
    the daemon discards what it has received. If the target's daemon is restarted, it has freed what it has received,
    and this function begins the copy anew.

    Args:
        source: the step. This function does not close it.
        target: a connection to the other daemon, with an admin's token if the daemon has tokens.
        on_progress: called after each part.
        restart_seconds: how long to wait for the target's daemon if it is lost.

    Raises:
        CopyError: the target has a newer step of the job or another commit of the same step, or the bytes that it reads
            back differ from those that were sent.
        StoreError: a daemon refuses, has no room, or cannot be reached.
        BackupError: the source is a damaged backup.
    """
    for begun in itertools.count(1):
        run = PutRun(target)
        try:
            with run:
                return run.put(source, on_progress=on_progress)
        except StoreError:
            # A daemon that was restarted does not know the sessions of the copy. Which StoreError this causes depends
            # on the call that was under way, so any StoreError leads to the check for a restart.
            if begun > MOST_RESTARTS or not run.finds_another_daemon(restart_seconds):
                raise
            log.warning(
                "the store daemon at %s was restarted, which has freed what it was sent of step %d of job %r: the copy "
                "begins anew",
                *(target.address, source.description.step.step, source.description.step.job),
            )
    raise AssertionError("the loop ends by itself only")


class PutRun:
    """A run that puts steps of a job into a daemon, one after another.

    Between two steps the run keeps the job open, so no other run can open it. The end of the context leaves the job. If
    the context ends because the connection was lost or the process was interrupted, the target keeps the unfinished
    step.
    """

    def __init__(
        self,
        target: Connection,
        *,
        pace: Pace | None = None,
        gives_up_newer: bool = False,
        still_has: Callable[[str, int], bool] = lambda _layout, _step: False,
        rolled_back: Callable[[], RollBacks] = dict,
    ) -> None:
        """Prepare a run, which opens the job with the first step that it puts.

        Args:
            target: a connection to the daemon that gets the steps. The run does not close it.
            pace: the limit to the rate at which bytes are sent; None: no limit.
            gives_up_newer: whether the target is rolled back if it has a step that is as new as the source's, or newer,
                with other bytes. The target has such a step if the source's job was rolled back, or was laid out anew
                from an older step.
            still_has: returns whether the source's job has a step, given by its layout and number. It is called for a
                step of the target that is newer than the one to be put. If it returns true, the target keeps the newer
                step and the put fails: the source's daemon was restarted, and does not know yet that all nodes have the
                newer step.
            rolled_back: returns the roll-backs of the source's job by operators. If such a roll-back has given up a
                step that the target has, the target is rolled back even if `gives_up_newer` is false.
        """
        self.target = target
        self.pace = Pace() if pace is None else pace
        self.gives_up_newer = gives_up_newer
        self.still_has = still_has
        self.rolled_back = rolled_back
        # A session with the target for each rank of the source; an empty list while the job is not open.
        self.sessions: list[StoreSession] = []
        # The name that the job's layout has in the target, and the newest step that the target has of the job.
        self.layout = ""
        self.newest: int | None = None
        self.is_same_layout = False
        # The epoch of the target's daemon when the run was announced to it. A daemon that was restarted has another
        # epoch, so the run recognizes a restart by it.
        self.epoch: str | None = None
        # The step that this run has put last, with which `takes` compares the next step.
        self._last: StepDescription | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)

    def close(self, error: BaseException | None = None) -> None:
        """Leave the job; `error` is the reason, if there is one. The next call of `put` opens the job again."""
        is_lost = isinstance(error, StoreUnavailableError | StoreTimeoutError | KeyboardInterrupt | SystemExit)
        for session in self.sessions:
            # After `break_off` the target takes the connection for lost, and keeps the unfinished step for the next
            # copy. After `close` it discards the unfinished step.
            (session.break_off if is_lost else session.close)()
        self.sessions = []

    def takes(self, step: StepDescription) -> bool:
        """Return whether this run can put a step: this is its first step, or has the layout of the last one."""
        last = self._last
        return last is None or (last.step.layout == step.step.layout and step.has_groups_of(last))

    def put(self, source: StepSource, *, on_progress: Callable[[CopyProgress], None] = lambda _: None) -> CopyResult:
        """Put a step that is newer than the last one; see put_step for the arguments and errors.

        From the second step on, exactly the slabs that have another version than in the last step are sent, and no
        digests are compared. So all steps must come from one run of the source's job, because two runs may give one
        version number different bytes.
        """
        result = _Putting(source, self, on_progress).run(self._last if self.sessions else None)
        self._last = source.description
        return result

    def finds_another_daemon(self, seconds: float) -> bool:
        """Wait for a daemon at the target's address, and return whether it was restarted.

        The answer is True only if the run was announced to a daemon, and the present daemon is another one.
        """
        call = Call(seconds, seconds)
        try:
            epoch = self.target.resume(call, lambda _: self.target.epoch)
        except StoreError:
            return False
        return self.epoch not in (None, epoch)


class _Putting:
    def __init__(self, source: StepSource, run: PutRun, on_progress: Callable[[CopyProgress], None]) -> None:
        self._source = source
        self._step = source.description
        self._run = run
        self._target = run.target
        self._on_progress = on_progress
        # The step to which the target is rolled back before it gets the source's step; None if it is not rolled back.
        self._goes_back_to: int | None = None
        self._total_bytes = self._step.size_bytes
        self._done_bytes = 0
        self._sent_bytes = 0
        self._began = time.monotonic()

    def run(self, last: StepDescription | None) -> CopyResult:
        """Put the step; see PutRun.put. `last` is the step that the run put before; None if the job is not open."""
        if not self._step.client_states:
            raise CopyError(f"{self._step.origin} of {self._source.name} names no rank, so no run can put it")
        wanted = self._compare() if last is None else self._changed_since(last)
        same_bytes = self._total_bytes - sum(slab.size_bytes for slab in wanted if slab.version is not None)
        if last is None and self._run.newest == self._step.step.step and self._goes_back_to is None:
            if wanted:
                raise CopyError(
                    f"{self._target.address} has another step {self._run.newest} of job {self._step.step.job!r}: "
                    f"{len(wanted)} of {len(self._step.slabs)} slabs differ; roll it back (`paramserver-admin "
                    "rollback`) or delete it (`paramserver-admin delete-job`) first"
                )
            return self._result(wanted, same_bytes, resumed_bytes=0, durable=self._is_durable())
        self._report(same_bytes)
        resumed = self._begin(wanted) if last is None else set()
        if last is None and self._goes_back_to == self._step.step.step:
            return self._result(wanted, same_bytes, resumed_bytes=0, durable=self._is_durable())
        missing = [slab for slab in wanted if slab.key not in resumed]
        resumed_bytes = sum(slab.size_bytes for slab in wanted if slab.key in resumed)
        self._report(resumed_bytes)
        sessions = self._run.sessions
        self._verify(sessions[0], missing, self._send(sessions[0], missing))
        durable = self._commit(sessions)
        return self._result(missing, same_bytes, resumed_bytes=resumed_bytes, durable=durable)

    def _changed_since(self, last: StepDescription) -> list[StoredSlab]:
        """Return the slabs that have another version in the source's step than in `last`, the step put before."""
        return [slab for slab in self._step.slabs.values() if slab.version != last.slabs[slab.key].version]

    def _begin(self, wanted: Sequence[StoredSlab]) -> set[SlabKey]:
        """Open the job at the target, and return which of the slabs an interrupted copy has already put."""
        run_id = secrets.token_hex(16)
        resumes = self._announce(run_id)
        self._run.epoch = self._target.epoch
        for number in range(len(self._step.client_states)):
            # The copy opens a session for each rank of the source. The first session sends all bytes, so the other
            # sessions need not map the target's arena.
            self._run.sessions.append(self._target.new_session(maps_memory=number == 0))
        self._open(self._run.sessions, run_id)
        if self._goes_back_to is not None:
            request, call = pb.RollBackRequest(step=self._goes_back_to), Call(None, COMMIT_DEADLINE_SECONDS)
            self._run.sessions[0].call("RollBack", request, call)
            self._run.newest = self._goes_back_to
        self._lay_out(self._run.sessions)
        return self._already_put(self._run.sessions[0], wanted) if resumes else set()

    # --- the comparison with the steps that the target has

    def _compare(self) -> list[StoredSlab]:
        """Return the slabs that the target lacks or has with other bytes; note the target's newest step and layout.

        Raises:
            CopyError: the target has a newer step.
            StoreError: a daemon refuses, or cannot be reached.
        """
        wanted, job = self._step.step, self._step.step.job
        self._run.layout, self._run.newest, self._run.is_same_layout = wanted.layout, None, False
        call = Call(None, CONTROL_DEADLINE_SECONDS)
        listed = self._target.resume(call, lambda s: s.call("ListStoredJobs", pb.ListStoredJobsRequest(), call))
        stored = next((one for one in listed.jobs if one.name == job), None)
        if stored is None or not stored.layouts:
            if wanted.step and not self._run.layout:
                self._run.layout = _UNNAMED_LAYOUT
            return [slab for slab in self._step.slabs.values() if slab.version is not None]
        present = stored.layouts[-1]
        self._run.newest = max(present.steps)
        self._run.is_same_layout = present.layout in (self._run.layout, self._run.layout or _UNNAMED_LAYOUT)
        if self._run.newest > wanted.step and self._run.still_has(present.layout, self._run.newest):
            raise CopyError(
                f"{self._target.address} has step {self._run.newest} of job {job!r}, and {self._source.name} has it, "
                f"too, but does not know yet that all nodes have it: nothing is copied until then"
            )
        if self._run.newest >= wanted.step and (self._run.gives_up_newer or self._is_given_up(present)):
            self._goes_back_to = self._find_way_back(present.steps)
        newest = self._run.newest if self._goes_back_to is None else self._goes_back_to
        if newest > wanted.step:
            raise CopyError(
                f"{self._target.address} has step {self._run.newest} of job {job!r}, and step {wanted.step} is older: "
                "roll it back (`paramserver-admin rollback`) or delete it (`paramserver-admin delete-job`) first"
            )
        if self._run.is_same_layout:
            self._run.layout = present.layout
            with DaemonStep(self._target, job, newest) as theirs:
                return self._differing(theirs)
        if newest == wanted.step or any(one.layout == self._run.layout for one in stored.layouts):
            raise CopyError(
                f"{self._target.address} has job {job!r} in another layout, {present.layout!r}, at step "
                f"{self._run.newest}; delete it there (`paramserver-admin delete-job`), or copy a later step"
            )
        self._run.layout = self._run.layout or _UNNAMED_LAYOUT
        return [slab for slab in self._step.slabs.values() if slab.version is not None]

    def _is_given_up(self, present: pb.StoredLayout) -> bool:
        """Return whether a roll-back of the source's job by an operator has given up the target's newest step."""
        known = self._run.rolled_back()
        if not known:
            return False
        with DaemonStep(self._target, self._step.step.job, max(present.steps)) as theirs:
            made_after = {*rolled_back.of_states(theirs.description.client_states)}
        made_after |= {mark.name for mark in present.rolled_back}
        return rolled_back.went_back_to(known, max(present.steps), made_after) is not None

    def _find_way_back(self, steps: Sequence[int]) -> int | None:
        """Return the step to which the target is rolled back: the source's step, or else the newest older one.

        The target may have the source's step, bit for bit, below newer steps. Return None if the source's step is
        already the target's newest one, or if the target has neither the source's step nor an older one.
        """
        wanted = self._step.step.step
        if wanted in steps and self._is_there():
            return None if wanted == self._run.newest else wanted
        return max((number for number in steps if number < wanted), default=None)

    def _is_there(self) -> bool:
        """Return whether the target's step of the same number is the source's step, bit for bit."""
        ours = self._step
        if not self._run.is_same_layout:
            return False
        with DaemonStep(self._target, ours.step.job, ours.step.step) as theirs:
            former = theirs.description
            is_alike = ours.has_groups_of(former) and dict(ours.client_states) == dict(former.client_states)
            return is_alike and not self._differing(theirs)

    def _differing(self, theirs: DaemonStep) -> list[StoredSlab]:
        """Return the slabs whose bytes in the step `theirs` of the target are not those of the source."""
        ours, former = self._step, theirs.description
        if not ours.has_groups_of(former):
            raise CopyError(
                f"{self._target.address} has job {ours.step.job!r} cut into other shards under the same name of a "
                "layout; delete it there (`paramserver-admin delete-job`) first"
            )
        if ours.step.step == former.step.step and dict(ours.client_states) != dict(former.client_states):
            raise CopyError(
                f"{self._target.address} has another step {ours.step.step} of job {ours.step.job!r}, with other client "
                "states; roll it back (`paramserver-admin rollback`) or delete it (`paramserver-admin delete-job`)"
            )
        # Slabs that the source has written after the target's step are sent in any case. The bytes of any other slab
        # may be the same in source and target, even if its version numbers differ, so their digests are compared.
        last = former.step.step
        older = [slab for slab in ours.slabs.values() if slab.version is None or slab.version <= last]
        known = [former.slabs[slab.key] for slab in older]
        pairs = zip(older, self._source.digests(older), theirs.digests(known), strict=True)
        same = {slab.key for slab, mine, other in pairs if mine == other}
        return [slab for slab in ours.slabs.values() if slab.key not in same]

    def _is_durable(self) -> bool:
        call = Call(None, CONTROL_DEADLINE_SECONDS)
        listed = self._target.resume(call, lambda s: s.call("ListStoredJobs", pb.ListStoredJobsRequest(), call))
        return any(job.durable for job in listed.jobs if job.name == self._step.step.job)

    # --- the announcement, the layout, the bytes and the commit of the copy

    def _announce(self, run_id: str) -> bool:
        """Announce the run to the target, and return whether the target has kept the bytes of an interrupted copy."""
        call = Call(None, CONTROL_DEADLINE_SECONDS)
        request = admin_pb.BeginCopyRequest(
            job=self._step.step.job, run_id=run_id, origin=self._step.origin, source=self._source.name
        )
        give_up_at = time.monotonic() + _HAND_OVER_SECONDS
        while True:
            try:
                return bool(self._target.admin_call("BeginCopy", request, call).resumes)
            except JobConflictError:
                if time.monotonic() > give_up_at:
                    raise
            call.pause(_HAND_OVER_LOOK_SECONDS)

    def _open(self, sessions: Sequence[StoreSession], run_id: str) -> None:
        """Open the job with one session for each of its ranks, in the layout that the target is to have."""
        step, call = self._step.step, Call(None, COMMIT_DEADLINE_SECONDS)
        for session, rank in zip(sessions, sorted(self._step.client_states), strict=True):
            request = pb.OpenJobRequest(
                job=step.job,
                run_id=run_id,
                rank=rank,
                world_size=step.world_size,
                attached_ranks=len(sessions),
                parameters=self._step.parameters,
                durability=step.durability,
                resume=pb.RESUME_POLICY_AUTO,
                layout=self._run.layout,
            )
            opened = session.call("OpenJob", request, call)
            newest = max((commit.step for commit in opened.committed), default=None)
            if newest != self._run.newest:
                raise CopyError(
                    f"job {step.job!r} was at step {self._run.newest} in {self._target.address} and is now at "
                    f"{newest}: another program uses it; copy again when that has ended"
                )

    def _lay_out(self, sessions: Sequence[StoreSession]) -> None:
        """Begin the step's layout in the target, unless the target already has it, and register all groups."""
        step, call = self._step.step, Call(None, COMMIT_DEADLINE_SECONDS)
        if not self._run.is_same_layout and step.step:
            for session in sessions:
                session.call("BeginLayout", pb.BeginLayoutRequest(first_step=step.step), call)
        for registration in registrations(self._step.groups()):
            if CODECS not in sessions[0].capabilities and (codecs := codecs_of(registration.groups)):
                raise CopyError(
                    f"job {step.job!r} has codec {min(codecs)}, and {self._target.address} is of an earlier release "
                    f"without {CODECS}; upgrade that daemon first"
                )
            sessions[0].call("RegisterShards", registration, call)

    def _already_put(self, session: StoreSession, wanted: Sequence[StoredSlab]) -> set[tuple[str, int]]:
        """Return the slabs that an interrupted copy has put with the source's bytes, so they are not sent again."""
        put = [(slab, one.digest) for slab, one in self._put_digests(session, wanted)]
        expected = [
            digest or _digest_of(_zeros_of(slab))
            for (slab, _), digest in zip(put, self._source.digests([slab for slab, _ in put]), strict=True)
        ]
        return {slab.key for (slab, digest), mine in zip(put, expected, strict=True) if digest == mine}

    def _put_digests(
        self, session: StoreSession, slabs: Sequence[StoredSlab]
    ) -> Iterator[tuple[StoredSlab, pb.DigestSlabsResponse.SlabDigest]]:
        """Yield the slabs that the target has received for the step, each with the digest of the bytes it reads back.

        Slabs that the target keeps in host memory only are not among them, because their new bytes become a version of
        the slab only at the commit.
        """
        for some in digest_batches(slabs):
            request = pb.DigestSlabsRequest(slabs=[slab.to_name() for slab in some])
            answer = session.call("DigestSlabs", request, Call(None, COMMIT_DEADLINE_SECONDS))
            for slab, one in zip(some, answer.slabs, strict=True):
                if one.HasField("version") and one.version == self._step.step.step:
                    yield slab, one

    def _send(self, session: StoreSession, slabs: Sequence[StoredSlab]) -> dict[tuple[str, int], bytes]:
        """Send slabs to the target, and return the digest of the bytes that were sent, for each slab."""
        digests: dict[tuple[str, int], bytes] = {}
        written = [slab for slab in slabs if slab.version is not None]
        never = [slab for slab in slabs if slab.version is None]

        def contents() -> Generator[Content, None, None]:
            # A slab that was never written in the source counts as zeros. So if the target has other bytes of it, zeros
            # are sent.
            zeros = ((slab, _zeros_of(slab)) for slab in never)
            for slab, parts in itertools.chain(self._source.read(written), zeros):
                digest = xxhash.xxh3_128()
                yield slab.expand(self._counted(parts, digest))
                digests[slab.key] = digest.digest()

        # After a failure, `closing` ends the generator `contents` at once, so that the source releases its leases.
        # Otherwise the generator would keep the leases for as long as the traceback of the error exists.
        with contextlib.closing(contents()) as sent:
            put_slabs(
                session,
                self._step.step.step,
                [slab.to_name() for slab in (*written, *never)],
                sent,
                lambda: Call(None, LEASE_DEADLINE_SECONDS),
                most=_SLABS_UNDER_WAY,
            )
        return digests

    def _counted(self, parts: Iterator[torch.Tensor], digest: Any) -> Iterator[torch.Tensor]:
        for part in parts:
            digest.update(part.numpy().data)
            self._run.pace.wait(part.numel())
            yield part
            self._sent_bytes += part.numel()
            self._report(part.numel())

    def _verify(self, session: StoreSession, slabs: Sequence[StoredSlab], sent: dict[tuple[str, int], bytes]) -> None:
        """Compare the bytes that the target reads back from its devices with the bytes that were sent.

        It can raise CopyError.
        """
        for slab, one in self._put_digests(session, slabs):
            if one.digest != sent[slab.key]:
                raise CopyError(
                    f"{self._target.address} reads back other bytes of {slab.group.name!r} than it was sent: its "
                    "device or its memory is damaged; nothing was committed"
                )

    def _commit(self, sessions: Sequence[StoreSession]) -> bool:
        """Commit the step on behalf of all ranks, and return whether it is durable."""
        step = self._step.step.step
        # A job of several nodes can return only to a step that all its nodes have. The copy of this step to another
        # node's holder may fail. So the target keeps its former step until the next copy.
        states = [state for _, state in sorted(self._step.client_states.items())]
        votes = zip(sessions, states, strict=True)
        durable = commit_step(step, votes, self._run.newest or 0, Call(None, COMMIT_DEADLINE_SECONDS))
        self._run.newest, self._run.is_same_layout = step, True
        self._settle(sessions[0])
        return durable

    def _settle(self, session: StoreSession) -> None:
        """Make the step a settled step of the target, so that readers see it without waiting for other nodes."""
        # A daemon of an earlier release lacks the capability SETTLED_STEPS. It shows readers each step that it commits,
        # so it needs no SettleStep.
        if SETTLED_STEPS in session.capabilities:
            call = Call(None, CONTROL_DEADLINE_SECONDS)
            session.call("SettleStep", pb.SettleStepRequest(step=self._step.step.step), call)

    # --- what the caller of put_step learns: its progress, and the result

    def _report(self, more_bytes: int) -> None:
        self._done_bytes += more_bytes
        self._on_progress(CopyProgress(done_bytes=self._done_bytes, total_bytes=self._total_bytes))

    def _result(self, sent: Sequence[StoredSlab], same_bytes: int, *, resumed_bytes: int, durable: bool) -> CopyResult:
        return CopyResult(
            job=self._step.step.job,
            step=self._step.step.step,
            total_bytes=self._total_bytes,
            sent_bytes=self._sent_bytes,
            sent_slabs=len(sent),
            same_bytes=same_bytes,
            resumed_bytes=resumed_bytes,
            durable=durable,
            seconds=time.monotonic() - self._began,
        )


def _zeros_of(slab: StoredSlab) -> Iterator[torch.Tensor]:
    for start in range(0, slab.size_bytes, PART_BYTES):
        yield torch.zeros(min(PART_BYTES, slab.size_bytes - start), dtype=torch.uint8)


def _digest_of(parts: Iterator[torch.Tensor]) -> bytes:
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part.numpy().data)
    return digest.digest()


def copy_step(
    origin: Connection,
    target: Connection,
    job: str,
    *,
    step: int | None = None,
    kept: str | None = None,
    on_progress: Callable[[CopyProgress], None] = lambda _: None,
    restart_seconds: float = RESTART_SECONDS,
) -> CopyResult:
    """Copy a committed step of a job from one daemon to another; see put_step.

    Args:
        origin: the daemon that has the step. It holds the step until the copy has ended.
        target: the daemon that gets the step. The connection needs an admin's token if the daemon has tokens.
        job: the name of the job.
        step: the step's number; without it, and without `kept`, the newest committed step.
        kept: the name of a kept step, instead of `step`.
        on_progress: called after each part.
        restart_seconds: how long to wait for the target's daemon if it is lost.

    Raises:
        CopyError, StoreError: see put_step.
    """
    with DaemonStep(origin, job, step, kept) as source:
        return put_step(source, target, on_progress=on_progress, restart_seconds=restart_seconds)

"""A small program that uses every method of DeviceLanes as a training step does, and the ways to break it.

`MUTANTS` is the table of the waits, events and references that make lanes right. Each mutant leaves one of them out.
tests/device/test_lanes.py runs some of them, `make mutants` all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tests.device import lag
from trainer_client.base.lanes import device_lanes
from trainer_client.base.lanes.device_lanes import CopyOut, DeviceLanes, StagingSlot

# The device "lag": until `lag.load()`, torch has this name for it.
DEVICE = torch.device("privateuseone", 0)
NUMEL = 1 << 12
UNITS = 5


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing; in place of a method that a mutant lacks."""


def _act_at_once(_: DeviceLanes, act: Callable[[], None]) -> None:
    act()


def _pay_without_waiting(lanes: DeviceLanes) -> None:
    lanes._after_in.popleft().act()


def _keep_nothing(
    copy: CopyOut, lanes: DeviceLanes, event: torch.Event, used: tuple[torch.Tensor, ...], act: Any
) -> None:
    _INIT(copy, lanes, event, (), act)


def _end_without_waiting(copy: CopyOut) -> None:
    copy._lanes.remove(copy)
    act, copy._act = copy._act, None
    if act is not None:
        act()


_INIT = CopyOut.__init__


@dataclass(frozen=True, slots=True)
class Mutant:
    """One method of lanes, and what takes its place."""

    owner: type
    name: str
    replacement: Any


MUTANTS = {
    "the in-lane does not wait until a slot is read": Mutant(StagingSlot, "wait_until_drained", _nothing),
    "nobody notes when a slot is read": Mutant(StagingSlot, "note_drained", _nothing),
    "nobody waits until a slot is filled": Mutant(DeviceLanes, "_wait_until_filled", _nothing),
    "compute does not wait for a gather": Mutant(DeviceLanes, "_wait_until_gathered", _nothing),
    "comm does not wait for compute": Mutant(DeviceLanes, "_wait_until_given", _nothing),
    "compute does not wait for a reduction": Mutant(DeviceLanes, "rejoin", _nothing),
    "comm's tensors are not kept": Mutant(DeviceLanes, "_keep_until", _nothing),
    "the out-lane does not wait for the values": Mutant(DeviceLanes, "_wait_until_ready", _nothing),
    "values are not kept until they are copied": Mutant(CopyOut, "__init__", _keep_nothing),
    "nobody waits for a copy out": Mutant(CopyOut, "end", _end_without_waiting),
    "leases are released at once": Mutant(DeviceLanes, "after_copies_in", _act_at_once),
    "leases are released without waiting": Mutant(DeviceLanes, "_pay", _pay_without_waiting),
}


@contextmanager
def mutated(name: str) -> Iterator[None]:
    """Leave something out of lanes within the context."""
    mutant = MUTANTS[name]
    former = vars(mutant.owner)[mutant.name]
    setattr(mutant.owner, mutant.name, mutant.replacement)
    try:
        yield
    finally:
        setattr(mutant.owner, mutant.name, former)


def run() -> list[float]:
    """Do what a step of two ranks does, with numbers that tell which bytes were read; return the results.

    The context of `gathering` has arithmetic in place of a collective. A source is overwritten as soon as the lanes say
    that it may be, and a tensor of the device is freed as soon as the program does not need it.
    """
    lanes = device_lanes.DeviceLanes(DEVICE)
    sources = [torch.full((NUMEL,), float(unit + 1)).pin_memory() for unit in range(2 * UNITS)]
    homes = [lanes.host_buffer(NUMEL, torch.float32) for _ in range(UNITS)]
    partition = torch.full((NUMEL,), 0.25, device=DEVICE)
    results: list[float] = []
    for unit in range(UNITS):
        flat = torch.empty(NUMEL, device=DEVICE)
        lanes.copy_in(flat, sources[2 * unit].view(torch.uint8))
        whole = torch.empty(2 * NUMEL, device=DEVICE)
        with lanes.gathering(whole, NUMEL, 2 * NUMEL, sources[2 * unit + 1].view(torch.uint8)) as (gathered, own):
            gathered[:NUMEL] = own * 2
        kept = torch.empty(2 * NUMEL, device=DEVICE)
        partition = partition * 2
        with lanes.gathering(kept, 0, NUMEL, partition) as (gathered, own):
            gathered[:NUMEL], gathered[NUMEL:] = own, own * 2

        def overwrite(unit: int = unit) -> None:
            for source in sources[2 * unit : 2 * unit + 2]:
                lag.host_access(source, "the next owner of the lease", writes=True)
                source.fill_(torch.nan)

        lanes.after_copies_in(overwrite)
        lanes.poll()
        own_gradient = flat * 3
        own_home = lanes.host_buffer(NUMEL, torch.float32)
        lanes.copy_out([(own_home, own_gradient)], partial(_note_mean, results, own_home))
        del own_gradient
        gradient = flat + whole[:NUMEL] + whole[NUMEL:] + kept[:NUMEL] + kept[NUMEL:]
        reduced = torch.empty(NUMEL, device=DEVICE)
        with lanes.communicating(gradient, reduced):
            reduced.copy_(gradient * 0.5)
            del gradient
            lanes.copy_out([(homes[unit], reduced)], partial(_note_mean, results, homes[unit]))
        if unit == UNITS - 1:
            lanes.rejoin()
            results.append(float(reduced.mean()))
        del flat, whole, kept, reduced
        # Freed blocks are given to these, if they are free.
        overwritten = [torch.full((NUMEL,), -1.0, device=DEVICE) for _ in range(3)]
        del overwritten
    lanes.finish()
    lanes.close()
    return sorted(results)


def run_ends() -> None:
    """Use lanes where something ends: a gather that fails, what is done after all copies, and `close`.

    The program then declares that the next owner writes to what the copies used, so the device sees what was not waited
    for.
    """
    lanes = device_lanes.DeviceLanes(DEVICE)
    source, last = (torch.ones(NUMEL).pin_memory() for _ in range(2))
    home = lanes.host_buffer(NUMEL, torch.float32)
    other_home, last_home = (lanes.host_buffer(NUMEL, torch.float32) for _ in range(2))
    whole, flat, other = (torch.empty(size, device=DEVICE) for size in (2 * NUMEL, NUMEL, NUMEL))

    def begin_copies() -> None:
        with lanes.gathering(whole, NUMEL, 2 * NUMEL, source.view(torch.uint8)) as (gathered, own):
            gathered[:NUMEL] = own * 2
        lanes.copy_in(flat, source.view(torch.uint8))
        lanes.copy_out([(home, flat)])

    def copy_beside(check: Callable[[], None]) -> None:
        with lanes.beside().copying(check):
            other_home.copy_(flat, non_blocking=True)

    def give_up() -> None:
        raise ArithmeticError("the session was closed")

    def fail_between_pieces() -> Iterator[slice]:
        yield slice(NUMEL)
        raise ArithmeticError("the next piece cannot be copied")

    def take_over() -> None:
        for memory in (source, last, home, other_home):
            lag.host_access(memory, "the next owner of the lease", writes=True)

    def fail_in_gather() -> None:
        gathering = lanes.gathering(whole, NUMEL, 2 * NUMEL, source.view(torch.uint8))
        with suppress(ArithmeticError), gathering as (gathered, _):
            gathered.mul_(2)
            raise ArithmeticError("a collective has failed")

    fail_in_gather()
    begin_copies()
    copy_beside(lambda: None)
    # The copy out that the host waits for was given before this one was, so nothing else orders what comes after all
    # copies behind it.
    lanes.copy_in(other, last.view(torch.uint8))
    lanes.after_copies(take_over)
    lanes.copy_out([(last_home, flat)]).wait()
    owed = [True]
    lanes.after_copies_in(owed.clear)
    lanes.finish()
    assert not owed, "a call that is owed after copies into the device was not made"
    begin_copies()
    with suppress(ArithmeticError):
        copy_beside(give_up)
    # No other event than the one of its own lane follows what comm, in and out do at last. The memory of `given` is
    # free as soon as the lanes do not keep it any more.
    fail_in_gather()
    given = torch.ones(NUMEL, device=DEVICE)
    with lanes.communicating(given):
        given.mul_(2)
    del given
    lanes.copy_in(other, last.view(torch.uint8))
    with suppress(ArithmeticError):
        lanes.copy_in(flat, source.view(torch.uint8), fail_between_pieces())
    lanes.close()
    take_over()


def measure_beside() -> float:
    """Return the part of a collective's time under which the compute stream can do other work, in virtual time."""
    lanes = device_lanes.DeviceLanes(DEVICE)
    values, others = torch.empty(NUMEL, device=DEVICE), torch.ones(NUMEL, device=DEVICE)
    sent = torch.ones(NUMEL).pin_memory()
    lag.synchronize()
    with lag.recorded() as spans:
        # A copy takes the time here, because the engine of collectives needs a second rank.
        lag.set_speed(lag.Engine.TO_DEVICE, latency_seconds=1.0)
        lag.set_speed(lag.Engine.COMPUTE, latency_seconds=1.0)
        with lanes.communicating(values):
            values.copy_(sent, non_blocking=True)
        others.mul_(2)
        lag.synchronize()
    lag.set_speed(lag.Engine.TO_DEVICE)
    lag.set_speed(lag.Engine.COMPUTE)
    lanes.close()
    return lag.hidden_share(spans, {lag.Engine.TO_DEVICE})


def measure_early() -> int:
    """Return how many measurements of late work are reported before the device is done; it should be none."""
    lanes, reports = device_lanes.DeviceLanes(DEVICE), list[float]()
    lanes.stopwatch().stop(lambda *_: None)
    lag.synchronize()
    lanes.poll()
    lag.set_lag(lag.ENDLESS)
    stopwatch = lanes.stopwatch()
    torch.ones(4, device=DEVICE).mul_(2)
    stopwatch.stop(lambda begin, end: reports.append(end - begin))
    lanes.poll()
    early = len(reports)
    lag.synchronize()
    lanes.poll()
    return early if reports and min(reports) >= 0 else 1


def _note_mean(results: list[float], home: torch.Tensor) -> None:
    lag.host_access(home, "the store", writes=False)
    results.append(float(home.mean()))


def expected() -> list[float]:
    """Return the results of `run` by the same arithmetic on the CPU."""
    results: list[float] = []
    kept = 0.25
    for unit in range(UNITS):
        kept *= 2
        results.append(3.0 * (2 * unit + 1))
        results.append(((2 * unit + 1) + 3 * (2 * unit + 2) + 3 * kept) * 0.5)
    # The last reduced gradient is also read on the device.
    return sorted([*results, results[-1]])

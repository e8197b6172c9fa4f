"""Judges the two launches: did the loss fall, was the resume exact? No processes, no printing."""

from __future__ import annotations

from dataclasses import dataclass

from demo_support.journal import Journal

# A single step's loss is noisy: its batch has about a thousand bytes.
AVERAGED_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Attributes:
    problems: reasons to fail, in words; empty: all is well.
    losses: mean over the ranks by step; of steps that both launches computed, the second's.
    compared_steps: whose losses both launches computed.
    """

    problems: tuple[str, ...]
    losses: dict[int, float]
    killed_at: int
    resumed_from: int
    compared_steps: tuple[int, ...]
    resume_exact: bool
    first_loss: float
    last_loss: float
    loss_limit: float


def judge(first: Journal, second: Journal, *, committed_at_kill: int) -> Verdict:
    """The resume is exact if it started from the step that the store had committed last, with the bits of the weights
    that the first launch had at that step, and every loss that both launches computed is the same to the last bit, on
    each rank. The loss has fallen as it should if its mean over the last steps is below that of the steps before the
    kill, and below what a model would have that knows how frequent each byte is and nothing about its neighbours: for
    less, attention and blocks must have learnt, too.
    """
    resumed_from = second.starts[0].resumed_step
    compared = tuple(sorted(first.losses.keys() & second.losses.keys()))
    inexact = [*_inexact_start(first, second, committed_at_kill), *_inexact_losses(first, second, compared)]
    losses = {step: first.mean_loss(step) for step in first.losses if step <= resumed_from}
    losses |= {step: second.mean_loss(step) for step in second.losses}
    last_loss = _mean_up_to(losses, second.newest_step)
    before_kill = _mean_up_to(losses, resumed_from)
    limit = min(before_kill, second.starts[0].byte_entropy)
    not_fallen = [] if last_loss < limit else [f"the loss fell to {last_loss:.3f} only, not below {limit:.3f}"]
    return Verdict(
        problems=(*inexact, *not_fallen),
        losses=dict(sorted(losses.items())),
        killed_at=first.newest_step,
        resumed_from=resumed_from,
        compared_steps=compared,
        resume_exact=not inexact,
        first_loss=losses[1],
        last_loss=last_loss,
        loss_limit=limit,
    )


def _inexact_start(first: Journal, second: Journal, committed: int) -> list[str]:
    problems = []
    for rank, start in second.starts.items():
        if start.resumed_step != committed:
            problems.append(f"rank {rank} resumed from step {start.resumed_step}, the store had committed {committed}")
    if first.digests.get(committed) is None or first.digests[committed] != second.digests.get(committed):
        problems.append(
            f"the weights of step {committed} have digest {second.digests.get(committed)} after the resume, "
            f"{first.digests.get(committed)} before"
        )
    return problems


def _inexact_losses(first: Journal, second: Journal, compared: tuple[int, ...]) -> list[str]:
    problems = [] if compared else ["no step's loss was computed by both launches, so nothing shows an exact resume"]
    for step in compared:
        for rank, before in first.losses[step].items():
            after = second.losses[step].get(rank)
            if after is None or after.exact != before.exact:
                problems.append(
                    f"rank {rank}, step {step}: loss {before.exact} before the kill, {after and after.exact} after"
                )
    return problems


def _mean_up_to(losses: dict[int, float], step: int) -> float:
    window = [losses[s] for s in range(max(1, step - AVERAGED_STEPS + 1), step + 1)]
    return sum(window) / len(window)

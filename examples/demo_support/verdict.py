"""The verdict on the two launches: whether the loss fell, and whether the resume was exact. Prints nothing."""

from __future__ import annotations

from dataclasses import dataclass

from demo_support.journal import Journal

# Losses are averaged over this many steps, because the loss of one step, a batch of some thousand bytes, is noisy.
AVERAGED_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outcome of the demo.

    Attributes:
        problems: the reasons for a failure, in words; empty: there are none.
        losses: the mean loss of the ranks by step; for steps that both launches computed, the second launch's.
        killed_at: the newest step whose loss every rank of the first launch had computed.
        resumed_from: the step from which the second launch started.
        compared_steps: the steps whose losses both launches computed.
        resume_exact: whether the resume was exact; see `judge`.
        first_loss: the mean loss of step 1.
        last_loss: the mean loss of the last steps.
        loss_limit: the loss below which `last_loss` must be; see `judge`.
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
    """Judge the resume and the loss.

    The resume is exact if

    - every rank started from `committed_at_kill`, the step that the store had committed last;
    - the weights at that step have the same bits as in the first launch;
    - every loss that both launches computed is the same on each rank, bit for bit.

    The loss has fallen enough if its mean over the last steps is below two limits:

    - the mean over the last steps before the resumed one;
    - the entropy of the byte frequencies. This is the loss of a model that knows how frequent each byte is and nothing
      about its neighbours; for a lower loss, attention and blocks must have learnt, too.
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

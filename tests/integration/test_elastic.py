"""A job goes on with another number of ranks, on other stores or in another precision, and computes the same
numbers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from paramserver.v1 import parameter_store_pb2 as pb
from tests.integration.support.daemon import Stores, serving
from tests.integration.support.elastic_run import (
    BATCH,
    KILLED,
    RUN,
    SAMPLES,
    Part,
    PartResult,
    Tokens,
    job_bytes,
    job_sessions,
    launch,
    read_job,
    train_part,
)
from tests.integration.support.equality import assert_equal
from tests.integration.support.training import build_model, make_optimizer
from tests.integration.support.waiting import wait_until
from trainer_client import JobConflictError, StoreClientSync, StoredJob
from trainer_client.client.transport.journal import SlabName
from trainer_client.client.transport.rank_store import RankStore
from trainer_client.config.batch_sizes import BatchSizes
from trainer_client.training.run.data_loader import GlobalOrder

# Each part of a run has a number of ranks, and the global step to which they train. An epoch has five steps.
PARTS = ((2, 3), (1, 4), (3, 7), (2, 9))
STEPS = PARTS[-1][1]
CONFIG = {"host_budget": "48MiB", "nvme_budget": "128MiB"}


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stores]:
    with serving(tmp_path_factory.mktemp("stores"), ("first", "second"), CONFIG) as daemons:
        yield Stores(*daemons)


@pytest.fixture(scope="module")
def results(stores: Stores, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[PartResult]]:
    """The results of every job's parts. A part with several ranks is one launch that trains all jobs."""
    both = stores.first.address, stores.second.address
    jobs = {
        "fp32": Part(job="fp32", until=0, addresses=both[:1]),
        # With two or three ranks each store has half of this job. With one rank the first store has all of it.
        "nodes": Part(job="nodes", until=0, addresses=both, peers=both[1:]),
        "bf16": Part(job="bf16", until=0, addresses=both[:1]),
    }
    found: dict[str, list[PartResult]] = {name: [] for name in jobs}
    directory = tmp_path_factory.mktemp("launches")
    for number, (ranks, until) in enumerate(PARTS):
        # In every second part the job "bf16" also has another stage and placement.
        placed = {"paramserver": {"placement": dict.fromkeys(("parameters", "optimizer"), "device")}}
        elsewhere = {"zero_optimization": {"stage": 2}} | placed if number % 2 else {}
        jobs["bf16"] = replace(jobs["bf16"], config=elsewhere | {"bf16": {"enabled": True}})
        parts = [replace(part, until=until) for part in jobs.values()]
        made = launch(parts, ranks, directory) if ranks > 1 else [train_part(part) for part in parts]
        for name, result in zip(jobs, made, strict=True):
            found[name].append(result)
    return found


def plain_losses() -> list[float]:
    """Train one rank of plain PyTorch without interruption on the same global batches, and return the losses."""
    torch.set_num_threads(1)
    model, tokens = build_model(RUN), Tokens()
    optimizer, scheduler = make_optimizer(model, RUN)
    order = GlobalOrder(
        SAMPLES, BatchSizes(train=BATCH, micro=BATCH, accumulation=1), rank=0, world_size=1, seed=5, shuffle=True
    )
    losses: list[float] = []
    while len(losses) < STEPS:
        for indices in order:
            batch = torch.stack([tokens[index] for index in indices])
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), RUN.clipping)
            optimizer.step()
            optimizer.zero_grad()
            assert scheduler is not None
            scheduler.step()
            losses.append(loss.item())
            order.advance(1)
    return losses[:STEPS]


@pytest.mark.parametrize("name", ["fp32", "nodes", "bf16"])
def test_two_ranks_then_one_then_three_then_two_make_the_run_that_was_not_interrupted(
    results: dict[str, list[PartResult]], name: str
) -> None:
    parts = results[name]
    assert [part.resumed_step for part in parts] == [0, *(until for _, until in PARTS[:-1])]
    # Some of these parts end in the middle of an epoch.
    assert [epoch for part in parts for epoch in part.epochs] == [0] * 5 + [1] * 4
    for before, after in itertools.pairwise(parts):
        assert_equal(after.before, before.after)
        assert not any(tensor.isnan().any() for tensor in after.before.values())
    losses = [loss for part in parts for loss in part.losses]
    tolerance = 2e-2 if name == "bf16" else 1e-4
    torch.testing.assert_close(losses, plain_losses(), rtol=tolerance, atol=1e-5)


def test_what_a_run_leaves_on_a_store_is_only_what_the_job_needs(
    results: dict[str, list[PartResult]], stores: Stores
) -> None:
    """After the fourth part no bytes of the former layouts are left on either store, nor in the sums of the admin
    tool."""
    for store, held in ((stores.first, {"fp32", "bf16", "nodes"}), (stores.second, {"nodes"})):
        with StoreClientSync.connect(store.address) as client:
            jobs = {job.name: job for job in client.list_jobs() if job.name in results}
        assert jobs.keys() == held
        for name, job in jobs.items():
            assert (job.world_size, len(job.layouts)) == (PARTS[-1][0], 1)
            (layout,) = job.layouts
            needed = sum(
                tensor.numel() * tensor.itemsize / (2 if name == "nodes" else 1)
                for tensor in results[name][-1].after.values()
            )
            # Each retained step holds the whole job, in whole pages and with padding.
            assert needed < job_bytes(store.address, name) / len(layout.steps) < 1.4 * needed


def test_a_store_whose_ranks_use_a_socket_is_asked_at_its_address_among_the_peers(
    results: dict[str, list[PartResult]], stores: Stores, tmp_path: Path
) -> None:
    """The ranks of two nodes use one path, which leads to another store on each node. The part of the second store is
    on no other one."""
    own = tuple(str(store.state_dir) for store in (stores.first, stores.second))
    addresses = ("unix:/proc/self/cwd/paramserver.sock",)
    part = Part(job="nodes", until=STEPS, addresses=addresses, directories=own)

    (found,) = launch([replace(part, peers=(stores.first.address, stores.second.address))], 2, tmp_path)

    assert found.resumed_step == STEPS


def test_without_a_store_that_has_a_part_nothing_is_begun(results: dict[str, list[PartResult]], stores: Stores) -> None:
    before = read_job("nodes", [stores.first.address, stores.second.address])
    part = Part(job="nodes", until=99, addresses=(stores.second.address,))

    with pytest.raises(JobConflictError, match=r"no step that is whole on the stores .*lacks elements of 'transformer"):
        train_part(part)
    # A trainer that names an unreachable store does not start a new job.
    lost = replace(part, job="lost", peers=("unix:/nowhere/paramserver.sock",))
    with pytest.raises(JobConflictError, match=r"unix:/nowhere/paramserver\.sock"):
        train_part(lost)

    assert_equal(read_job("nodes", [stores.first.address, stores.second.address]), before)


def test_a_kill_in_the_middle_of_it_loses_nothing_and_the_precision_may_change(tmp_path: Path, stores: Stores) -> None:
    """The run changes from fp32 to bf16, which is another layout: the former parameter becomes the master weight."""
    address = stores.first.address
    fp32 = Part(job="killed", until=2, addresses=(address,))
    bf16 = replace(fp32, until=3, config={"bf16": {"enabled": True}})
    first = train_part(fp32)

    launch([replace(bf16, die=True)], 1, tmp_path, exit_code=KILLED)

    # After the grace time for a broken connection the store ends the session and discards the step that the session had
    # begun.
    wait_until(lambda: job_sessions(address, "killed") == 0)
    left = read_job("killed", [address])
    if "lm_head.weight/master" not in left and "transformer.wte.weight/master" not in left:
        assert_equal(left, first.after)
    went_on = train_part(bf16)
    assert went_on.resumed_step == 2 and len(went_on.losses) == 1
    for name, tensor in first.after.items():
        fqn, _, kind = name.rpartition("/")
        if kind == "param":
            assert torch.equal(went_on.before[f"{fqn}/master"], tensor)
            assert torch.equal(went_on.before[name], tensor.bfloat16())
        else:
            assert torch.equal(went_on.before[name], tensor)
    back = train_part(replace(fp32, until=4))
    assert torch.equal(back.before["transformer.wte.weight/param"], went_on.after["transformer.wte.weight/master"])


def test_an_interrupted_epoch_goes_on_with_its_next_sample_bit_for_bit(stores: Stores) -> None:
    """A resumed run with dropout has the same bits at the same number of ranks, because the loader uses none of the
    loop's random numbers."""
    run = replace(RUN, dropout=0.1)
    whole = Part(job="whole", until=7, addresses=(stores.first.address,))
    torch.manual_seed(3)
    expected = train_part(whole, run)
    torch.manual_seed(3)

    parts = [train_part(replace(whole, job="parts", until=until), run) for until in (2, 3, 6, 7)]

    assert [loss for part in parts for loss in part.losses] == expected.losses
    assert_equal(parts[-1].after, expected.after)


def test_a_frozen_parameter_may_be_thawed_and_its_states_begin_at_zero(stores: Stores) -> None:
    part = Part(job="thawed", until=2, addresses=(stores.first.address,))
    frozen = train_part(part, frozen="transformer.wpe.weight")
    assert "transformer.wpe.weight/exp_avg" not in frozen.after

    thawed = train_part(replace(part, until=3))

    assert {
        name: tensor for name, tensor in thawed.before.items() if name in frozen.after
    }.keys() == frozen.after.keys()
    assert_equal({name: thawed.before[name] for name in frozen.after}, frozen.after)
    assert not thawed.before["transformer.wpe.weight/exp_avg"].any()
    assert thawed.after["transformer.wpe.weight/exp_avg"].any()


def commit_half(address: str, job: str, parameters: Iterable[pb.Parameter], step: int) -> None:
    """Commit a layout of two ranks at `step` on one store only, as if the rank of the other store had not committed."""
    store = RankStore(address, "half of a run")
    try:
        store.job.open(
            pb.OpenJobRequest(
                job=job,
                run_id="half",
                world_size=2,
                attached_ranks=1,
                parameters=parameters,
                durability=pb.Durability(step=pb.Durability.Step()),
                resume=pb.RESUME_POLICY_AUTO,
                layout="half",
            )
        )
        store.job.begin_layout(step)
        kind = pb.KindSpec(kind=pb.KIND_PARAM, dtype=pb.DTYPE_FLOAT32, placement=pb.TIER_NVME)
        shard = pb.Shard(fqn="transformer.ln_f.bias", numel=16)
        store.job.register_shards([pb.ShardGroup(name="half", numel=16, shards=[shard], kinds=[kind])])
        store.leases.publish(store.leases.acquire_write([SlabName(group="half", kind=pb.KIND_PARAM)], step).wait())
        store.steps.commit(step, b"", step - 1, wait_for_copies=lambda: None).wait()
    finally:
        store.close()
    wait_until(lambda: job_sessions(address, job) == 0)


def stored(address: str, job: str) -> tuple[StoredJob, dict[str, pb.Parameter]]:
    with StoreClientSync.connect(address) as client:
        (found,) = (other for other in client.list_jobs() if other.name == job)
        return found, {
            tensor.fqn: pb.Parameter(fqn=tensor.fqn, shape=tensor.shape, dtype=pb.DTYPE_FLOAT32)
            for tensor in client.list_tensors(job)
        }


def test_a_layout_that_only_some_stores_have_committed_is_not_gone_on_with(
    results: dict[str, list[PartResult]], stores: Stores
) -> None:
    """After a crash between the first commits of two stores, the run goes on from the former layout, which is still
    whole on both."""
    first, second = stores.first.address, stores.second.address
    expected = read_job("nodes", [first, second])
    job, parameters = stored(first, "nodes")
    step = max(job.layouts[0].steps)
    commit_half(first, "nodes", (stored(second, "nodes")[1] | parameters).values(), step + 1)
    assert [layout.steps[-1] for layout in stored(first, "nodes")[0].layouts] == [step, step + 1]

    went_on = train_part(Part(job="nodes", until=STEPS + 1, addresses=(first,), peers=(second,)))

    assert went_on.resumed_step == STEPS
    assert_equal(went_on.before, expected)
    job, _ = stored(first, "nodes")
    assert (job.world_size, len(job.layouts)) == (1, 1)


def test_a_job_moves_between_stores_and_what_it_left_behind_is_obsolete(stores: Stores) -> None:
    first, second = stores.first.address, stores.second.address
    here = Part(job="moved", until=0, addresses=(first,), peers=(second,))
    there = replace(here, addresses=(second,), peers=(first,))
    parts = [train_part(replace(part, until=until)) for part, until in ((here, 2), (there, 3), (here, 5), (here, 6))]

    assert [part.resumed_step for part in parts] == [0, 2, 3, 5]
    for before, after in itertools.pairwise(parts):
        assert_equal(after.before, before.after)


def test_ranks_go_on_at_the_stores_of_other_ranks(stores: Stores, tmp_path: Path) -> None:
    """The layout would fit, but each rank's store has the other rank's part. Then both ranks use one store."""
    first, second = stores.first.address, stores.second.address
    here = Part(job="swapped", until=0, addresses=(first, second))
    swapped, together = replace(here, addresses=(second, first)), replace(here, addresses=(first,), peers=(second,))
    made = [launch([replace(p, until=n)], 2, tmp_path)[0] for n, p in enumerate((here, swapped, together), start=1)]

    assert [part.resumed_step for part in made] == [0, 1, 2]
    for before, after in itertools.pairwise(made):
        assert_equal(after.before, before.after)


def test_a_step_that_the_job_has_left_behind_is_not_gone_back_to(stores: Stores) -> None:
    first, second = stores.first.address, stores.second.address
    train_part(Part(job="obsolete", until=1, addresses=(second,)))
    commit_half(first, "obsolete", stored(second, "obsolete")[1].values(), 60)

    with pytest.raises(JobConflictError, match=r"step 1 is whole, but older than what unix:.* has"):
        train_part(Part(job="obsolete", until=2, addresses=(first,), peers=(second,)))

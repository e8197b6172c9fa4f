"""The figures of the step report equal those computed by hand: stalls, bytes per parameter and the roofline."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.base.recorder import Cause, Link, StallKey, StepSums
from trainer_client.training.report.step_report import RankPlace, Roofline, StepReport, StoreWork, make_report
from trainer_client.training.step.gather_counters import UnitGathers

MB = 1_000_000
PLACE = RankPlace(parameters=100 * MB, world_size=2, sharers=2, data_plane="arena", is_on_device=False)
GATHERS = UnitGathers(gathers=8, hits=6, predicted=7, copied_bytes=200 * MB)
WORK = StoreWork(
    nvme_read=1_400 * MB,
    nvme_written=1_400 * MB,
    nvme_read_seconds=1.4,
    nvme_write_seconds=0.7,
    fetch_seconds=0.5,
    device_bytes_per_second=0.5e9,
)


def sums() -> StepSums:
    made = StepSums(began=10.0, ended=13.0)
    made.phases.update({"idle": 0.1, "forward": 1.0, "backward": 1.5, "step": 0.4})
    made.stalls.update(
        {
            StallKey("forward", Cause.FETCH, "blocks.0"): 0.05,
            StallKey("backward", Cause.UPDATE, "blocks.0"): 0.25,
            StallKey("backward", Cause.FETCH, "blocks.1"): 0.1,
            StallKey("step", Cause.COMMIT, "step 7"): 0.2,
        }
    )
    made.link_bytes.update({Link.FROM_STORE: 200 * MB, Link.TO_STORE: 100 * MB, Link.COLLECTIVES: 400 * MB})
    made.link_seconds.update({Link.FROM_STORE: 0.0, Link.TO_STORE: 0.1, Link.COLLECTIVES: 0.2})
    made.gather_seconds.update({"forward": 0.1, "backward": 0.1})
    return made


def report(roofline: Roofline | None = None, work: StoreWork = WORK) -> StepReport:
    return make_report(8, sums(), GATHERS, work, PLACE, roofline or Roofline())


def test_an_accelerator_measures_its_computation_and_copies_itself() -> None:
    """The host measures how long it launches them."""
    measured = sums()
    measured.compute_seconds.update({"forward": 0.75, "backward": 1.5, "inference": 4.0})
    measured.to_device_bytes, measured.to_device_seconds = 300 * MB, 0.01
    made = make_report(8, measured, GATHERS, WORK, replace(PLACE, is_on_device=True), Roofline())
    assert made.resources["compute"] == 2.25
    assert made.bandwidths["copied"] == pytest.approx(30e9)
    assert made.resources["copied"] == pytest.approx(200 * MB / 30e9)


def test_stalls_are_listed_by_length_and_added_up_by_cause_and_by_unit() -> None:
    made = report()

    assert [stall.seconds for stall in made.stalls] == [0.25, 0.2, 0.1, 0.05]
    assert made.stall_seconds == pytest.approx({"update": 0.25, "commit": 0.2, "fetch": 0.15})
    assert made.stall_fraction == pytest.approx(0.6 / 3)
    assert made.stalls_of_units() == {
        "blocks.0": {"update": 0.25, "fetch": 0.05},
        "step 7": {"commit": 0.2},
        "blocks.1": {"fetch": 0.1},
    }
    assert made.hidden_fetch_fraction == pytest.approx(1 - 0.15 / 0.5)
    assert made.prefetch_hit_rate == 6 / 8


def test_bytes_per_parameter_are_of_the_ranks_part_and_on_nvme_of_the_nodes() -> None:
    assert report().bytes_per_parameter == {
        "store_to_trainer": 4.0,
        "trainer_to_store": 2.0,
        "collectives": 8.0,
        "copied": 4.0,
        "nvme_read": 14.0,
        "nvme_written": 14.0,
    }


def test_the_roofline_is_the_longest_that_a_resource_needs_at_its_best_rate() -> None:
    made = report()

    # Forward and backward took 2.5 s, of which the rank waited 0.4 s and copied for 0.2 s.
    assert made.resources["compute"] == pytest.approx(1.9)
    assert made.resources["nvme_read"] == pytest.approx(1.4)
    assert made.resources["nvme_written"] == pytest.approx(0.7)
    assert made.resources["collectives"] == pytest.approx(0.2)
    assert "store_to_trainer" not in made.resources, "its rate was not seen: it took no time"
    assert made.binding == "compute"
    assert made.roofline_seconds == pytest.approx(1.9)
    assert made.roofline_fraction == pytest.approx(1.9 / 3)


def test_a_rate_that_was_seen_once_counts_for_all_steps_to_come() -> None:
    roofline = Roofline()
    report(roofline)
    slow = replace(WORK, nvme_read_seconds=2.9, nvme_write_seconds=2.8)

    assert report(roofline, slow).resources["nvme_read"] == pytest.approx(1.4)
    bound = report(Roofline(), slow)
    assert bound.binding == "nvme_read"
    assert bound.roofline_seconds == pytest.approx(2.8), "by the 0.5 GB/s that the daemon has measured"


def test_a_step_without_the_stores_answer_is_bound_by_what_is_known() -> None:
    made = report(work=StoreWork())

    assert (made.binding, made.fetch_seconds, made.hidden_fetch_fraction) == ("compute", 0.0, None)
    assert made.bytes["nvme_read"] == 0
    assert "nvme_read" not in made.resources


def test_small_transfers_say_nothing_about_a_link() -> None:
    roofline = Roofline()
    roofline.see("nvme_read", 4096, 1.0)

    assert roofline.seconds({"nvme_read": 4096}) == {}


def test_two_readings_of_the_store_make_its_work() -> None:
    def reading(scale: int) -> pb.ReadCountersResponse:
        nvme = pb.ReadCountersResponse.TierCounters(
            tier=pb.TIER_NVME,
            bytes_read=10 * scale,
            bytes_written=5 * scale,
            read_seconds=2.0 * scale,
            write_seconds=1.0 * scale,
            bytes_per_second=1e9,
        )
        host = pb.ReadCountersResponse.TierCounters(tier=pb.TIER_HOST, fetch_seconds=0.5 * scale)
        return pb.ReadCountersResponse(tiers=[host, nvme])

    assert StoreWork.between(reading(1), reading(3)) == StoreWork(
        nvme_read=20,
        nvme_written=10,
        nvme_read_seconds=4.0,
        nvme_write_seconds=2.0,
        fetch_seconds=1.0,
        device_bytes_per_second=1e9,
    )
    assert StoreWork.between(reading(3), reading(1)) == StoreWork(device_bytes_per_second=1e9)


def test_the_counters_of_two_daemons_are_not_subtracted_from_each_other() -> None:
    """The next daemon may have read more than the former one had, in less time, which would be the best rate."""

    def reading(nbytes: int, seconds: float) -> pb.ReadCountersResponse:
        nvme = pb.ReadCountersResponse.TierCounters(tier=pb.TIER_NVME, bytes_read=nbytes, read_seconds=seconds)
        host = pb.ReadCountersResponse.TierCounters(tier=pb.TIER_HOST)
        return pb.ReadCountersResponse(tiers=[host, nvme])

    former = reading(100 * MB, 1.0)
    assert StoreWork.between(former, reading(500 * MB, 0.5)) == StoreWork()
    assert StoreWork.between(former, reading(500 * MB, 1.01), restarts=1) == StoreWork()
    assert StoreWork.between(former, reading(500 * MB, 5.0)).nvme_read == 400 * MB


def test_the_report_is_json_and_a_line() -> None:
    made = report()
    content = json.loads(json.dumps(made.to_dict()))

    assert content["stalls"][0] == {"phase": "backward", "cause": "update", "where": "blocks.0", "seconds": 0.25}
    assert content["roofline_fraction"] == made.roofline_fraction
    assert str(made) == "seconds=3.000 stalled=20.0% prefetch_hits=75% roofline=0.63 bound_by=compute"

"""What a model larger than memory needs changes no bit of the matrix; tiles change what they round.

A deep, checkpointed model trains with each choice of large_cells.py. One launch for each choice and world size makes
its runs on the daemon that it needs. The suite makes a few of the runs; with --whole-matrix (`make matrix`) it makes
all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from paramserver.v1 import parameter_store_pb2 as pb
from tests.integration.support.borrowing import tier_of
from tests.integration.support.closeness import assert_close, assert_close_in_16_bits
from tests.integration.support.daemon import Daemon
from tests.integration.support.large_cells import CHOICES, Store, large_run
from tests.integration.support.parking import assert_nothing_left
from tests.integration.support.training import Result, assert_bit_equal, launch

# The choices and trainings by world size.
Cells = Mapping[int, tuple[list[str], list[str]]]

WHOLE_TRAININGS = [
    *("fp32", "fp32, each micro-batch", "fp32, boundary", "fp32, no_sync", "fp32, by value", "fp32, poisoned"),
    *("bf16", "bf16, fp32 sums", "fp16"),
]
WHOLE: Cells = {world_size: (list(CHOICES), WHOLE_TRAININGS) for world_size in (1, 2, 3)}
# Other tests try the choices one by one: test_matrix.py, test_gradients.py, test_activations.py, test_tiling.py and
# test_remote_memory.py.
PART: Cells = {1: (["all but tiles", "all"], ["fp32, each micro-batch"])}

# The key is (training, place).
Results = dict[tuple[str, str | None], Result]

# In bf16 the weights of these trainings end 3.3 % away from those in fp32, and in fp16 1.1 %. Tiles round other sums,
# and so may move the weights as far (2.3 % and 0.8 % were measured).
TILES_IN_16_BITS = 0.033

# This limit is for all runs of one choice on a busy machine.
LAUNCH_SECONDS = 1200


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Generate one case for each world size and choice."""
    if "choice" in metafunc.fixturenames:
        cells = WHOLE if metafunc.config.getoption("--whole-matrix") else PART
        chosen = [(world_size, choice) for world_size, (choices, _) in cells.items() for choice in choices]
        metafunc.parametrize(("world_size", "choice"), chosen)


class Runs:
    """Makes the runs of the cells, and keeps the results that those of other choices are compared with.

    Those of all choices took 6.6 GB when two thirds of the cells were made.
    """

    def __init__(self, directory: Path, cells: Cells) -> None:
        self.cells = cells
        self._directory = directory
        self._stack = ExitStack()
        self._stores: dict[str, Store] = {}
        self._plain: dict[int, Results] = {}
        # The bytes that the store has written to NVMe for the runs of a world size and choice.
        self.written: dict[tuple[int, str], int] = {}

    def daemon_of(self, choice: str) -> Daemon:
        """Return the daemon that a choice needs."""
        name = CHOICES[choice].store
        if name not in self._stores:
            self._stores[name] = self._stack.enter_context(Store(name, self._directory))
        return self._stores[name].daemon

    def plain(self, world_size: int) -> Results:
        """Return the results of the choice "none", which are made once."""
        if world_size not in self._plain:
            self._plain[world_size] = self._make(world_size, "none")
        return self._plain[world_size]

    def of(self, world_size: int, choice: str) -> Results:
        """Return the results of a choice, by training and place; None stands for the hand-written loop."""
        return self.plain(world_size) if choice == "none" else self._make(world_size, choice)

    def _make(self, world_size: int, choice: str) -> Results:
        daemon = self.daemon_of(choice)
        places: tuple[str | None, ...] = CHOICES[choice].places
        if choice == "none":
            # One rank is compared with the hand-written loop, several with the engine's own first place.
            places = (None, *places) if choice in self.cells[world_size][0] else (None,)
        chosen = [(training, place) for training in self.cells[world_size][1] for place in places]
        runs = [
            large_run(training, place, choice, world_size, daemon.address, f"{world_size} {choice} {number}")
            for number, (training, place) in enumerate(chosen)
        ]
        directory = self._directory / f"{world_size} {choice}"
        directory.mkdir()
        before = tier_of(daemon, pb.TIER_NVME).bytes_written
        results = launch(runs, world_size, directory, timeout_seconds=LAUNCH_SECONDS)
        self.written[world_size, choice] = tier_of(daemon, pb.TIER_NVME).bytes_written - before
        return dict(zip(chosen, results, strict=True))

    def close(self) -> None:
        """End the daemons."""
        self._stack.close()


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    made = Runs(tmp_path_factory.mktemp("large"), WHOLE if request.config.getoption("--whole-matrix") else PART)
    request.addfinalizer(made.close)
    return made


@pytest.mark.timeout(2 * LAUNCH_SECONDS + 60)
def test_a_choice_has_the_numbers_of_plenty_of_memory(runs: Runs, world_size: int, choice: str) -> None:
    expected = runs.plain(world_size)
    found = runs.of(world_size, choice)
    place = CHOICES["none"].places[0]

    for (training, where), result in found.items():
        if where is None:
            continue
        in_16_bits = not training.startswith("fp32")
        exact = expected[training, None] if world_size == 1 else expected[training, place]
        if CHOICES[choice].tiles:
            # The optimizer's states are those of tiles.
            pair = replace(result, moments={}), replace(exact, moments={})
            if in_16_bits:
                assert_close_in_16_bits(*pair, weights=TILES_IN_16_BITS)
            else:
                assert_close(*pair)
        else:
            assert_bit_equal(result, exact)
    assert_that_it_was_used(runs, world_size, choice, found)
    assert_nothing_left(runs.daemon_of(choice))


def assert_that_it_was_used(runs: Runs, world_size: int, choice: str, found: Results) -> None:
    """Assert that the runs did what the choice says."""
    chosen = CHOICES[choice]
    results = [result for (_, place), result in found.items() if place is not None]
    leave = chosen.store != "plenty" or chosen.gradients is not None
    if leave and chosen.places == CHOICES["none"].places:
        # The same runs have written the same versions, and besides them only this choice has written gradients.
        assert runs.written[world_size, choice] > runs.written[world_size, "none"]
    if chosen.gradients is not None:
        assert all(result.placement["gradients"]["nvme"] for result in results)
    assert all((result.tiles > 0) is chosen.tiles for result in results)
    assert all((result.boundaries["moved"] > 0) is chosen.offloads for result in results)
    # With tiles, so little of host memory is in use that all boundaries have room.
    if chosen.offloads and chosen.store != "plenty" and not chosen.tiles:
        assert any(result.boundaries["spilled"] for result in results)
    if chosen.store == "borrower":
        assert sum(lender.hits for lender in tier_of(runs.daemon_of(choice), pb.TIER_REMOTE).lenders) > 0

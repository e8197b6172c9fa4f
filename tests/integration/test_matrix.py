"""Every stage and placement computes the same bits, and plain PyTorch computes the same numbers.

One launch for each world size makes all runs on one daemon: the reference, which is a hand-written loop (under DDP at
several ranks), and the same training at each stage and placement. The suite makes a part of the runs; with
--whole-matrix (`make matrix`) it makes all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.integration.support.closeness import assert_close, assert_close_in_16_bits
from tests.integration.support.daemon import Daemon
from tests.integration.support.matrix_cells import PLACES, TRAININGS, run_of
from tests.integration.support.training import Result, assert_bit_equal, launch

SOME = ["ddp", "zero-2", "zero-3", "zero-3 + everything nvme", "zero-3 + fractions"]
FEW = ["ddp", "zero-3 + everything nvme", "zero-3 + fractions"]

# The places to run, by world size and training.
Cells = dict[int, dict[str, list[str]]]

WHOLE: Cells = {world_size: {training: list(PLACES) for training in TRAININGS} for world_size in (1, 2, 3)}
# The suite runs this part of the matrix.
PART: Cells = {
    1: {
        "fp32": list(PLACES),
        "fp32, each micro-batch": FEW,
        "fp32, by value": FEW,
        "fp32, poisoned": FEW,
        "bf16": SOME,
        "bf16, fp32 sums": FEW,
        "fp16": FEW,
        "mixed": SOME,
    },
    2: {
        "fp32": FEW,
        "fp32, each micro-batch": SOME,
        "fp32, boundary": FEW,
        "fp32, no_sync": FEW,
        "fp32, poisoned": [*FEW, "zero-3 + parameters nvme"],
        "bf16": FEW,
        "bf16, fp32 sums": FEW,
        "fp16": FEW,
        "mixed": SOME,
    },
    # Three ranks on two cores are slow. test_elastic.py trains on three ranks, and the whole matrix does.
    3: {},
}

# This limit is for all runs of one world size on a busy machine. The whole matrix of three ranks takes minutes.
LAUNCH_SECONDS = 900

# The key is (training, place). The place is None for the reference.
Matrix = dict[tuple[str, str | None], Result]


def cells_of(config: pytest.Config) -> Cells:
    return WHOLE if config.getoption("--whole-matrix") else PART


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Generate one case for each training at each world size that the test is about."""
    world_sizes = (1,) if metafunc.function is test_one_rank_equals_pytorch_bit_for_bit else (2, 3)
    chosen = cells_of(metafunc.config)
    metafunc.parametrize(("world_size", "training"), [(w, t) for w in world_sizes for t in chosen[w]])


@pytest.fixture(scope="module")
def cells(request: pytest.FixtureRequest) -> Cells:
    return cells_of(request.config)


@pytest.fixture(scope="module")
def matrix_of(cells: Cells, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Matrix]]:
    """A function that returns the results of a world size. It makes the runs on its first call for that size."""
    made: dict[int, Matrix] = {}
    root = tmp_path_factory.mktemp("matrix")
    with Daemon(root / "state", {"host_budget": "64MiB", "nvme_budget": "8GiB"}) as daemon:

        def of(world_size: int) -> Matrix:
            if world_size not in made:
                chosen = [(t, p) for t, places in cells[world_size].items() for p in (None, *places)]
                runs = [
                    run_of(training, place, world_size, daemon.address, f"{world_size} {training} {place}")
                    for training, place in chosen
                ]
                directory = root / str(world_size)
                directory.mkdir()
                results = launch(runs, world_size, directory, timeout_seconds=LAUNCH_SECONDS)
                made[world_size] = dict(zip(chosen, results, strict=True))
            return made[world_size]

        yield of


@pytest.mark.timeout(LAUNCH_SECONDS + 60)
def test_one_rank_equals_pytorch_bit_for_bit(
    matrix_of: Callable[[int], Matrix], cells: Cells, world_size: int, training: str
) -> None:
    matrix = matrix_of(world_size)
    for place in cells[world_size][training]:
        assert_bit_equal(matrix[training, place], matrix[training, None])


@pytest.mark.timeout(LAUNCH_SECONDS + 60)
def test_more_ranks_equal_ddp_to_rounding_and_each_other_bit_for_bit(
    matrix_of: Callable[[int], Matrix], cells: Cells, world_size: int, training: str
) -> None:
    matrix = matrix_of(world_size)
    first, *others = (matrix[training, place] for place in cells[world_size][training])
    for other in others:
        assert_bit_equal(other, first)
    expected = matrix[training, None]
    if world_size == 2 and not training.startswith("fp32"):
        # These trainings do not clip, and a sum of two numbers does not depend on their order.
        assert_bit_equal(first, expected)
    elif training in ("bf16", "bf16, fp32 sums", "fp16", "mixed"):
        assert_close_in_16_bits(first, expected)
    else:
        assert_close(first, expected)

"""The cells of the matrix for what a model larger than memory needs.

These are gradients on NVMe, states in lent memory, boundaries of checkpoints in the store, and layers in tiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.integration.support.daemon import Daemon
from tests.integration.support.matrix_cells import run_of
from tests.integration.support.training import Run

LAYERS = 20
# Too little memory for all gradients of the model, or for all of its boundaries.
SMALL = "3584KiB"
# The largest matrices of the model have 64 KiB, its boundaries 16 KiB.
_TILING = {"largest_tile": "32KiB", "loss_tokens": 24}
_ACTIVATIONS = {"smallest": 1024, "recompute": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One way to train a model that is larger than memory.

    Attributes:
        store: the store at which its runs train, one of STORES.
        places: the places of the matrix at which it is tried.
        gradients: their home, if it is not that of the place.
        offloads: whether boundaries of checkpoints go to the store.
        tiles: whether layers are in tiles, so that sums over features are rounded otherwise.
    """

    store: str
    places: tuple[str, ...]
    gradients: Any = None
    offloads: bool = False
    tiles: bool = False


_ON_NVME = "zero-3 + everything nvme"
_PLACES = (_ON_NVME, "zero-2 + fractions", "zero-1 + optimizer nvme")

# The choice "none" has the numbers that those of all others are compared with.
CHOICES: Mapping[str, Choice] = {
    "none": Choice(store="plenty", places=_PLACES),
    "gradients on nvme": Choice(store="plenty", places=_PLACES, gradients="nvme"),
    "half of the gradients on nvme": Choice(store="plenty", places=_PLACES, gradients={"host": 0.5, "nvme": 0.5}),
    "gradients spilled": Choice(store="small", places=_PLACES),
    "states in lent memory": Choice(store="borrower", places=(_ON_NVME, "zero-1 + optimizer nvme")),
    "boundaries in host memory": Choice(store="plenty", places=(*_PLACES, "ddp"), offloads=True),
    "boundaries on nvme": Choice(store="small", places=_PLACES, offloads=True),
    "tiles": Choice(store="plenty", places=(_ON_NVME, "zero-3 + fractions"), tiles=True),
    "all but tiles": Choice(store="borrower", places=(_ON_NVME,), gradients="nvme", offloads=True),
    "all": Choice(store="borrower", places=(_ON_NVME,), gradients="nvme", offloads=True, tiles=True),
}


STORES = ("plenty", "small", "borrower")
"""The stores that choices need: one with plenty of memory, and two with little, of which one has lenders."""


class Store:
    """A daemon for some of the choices, with its lenders. As a context manager, it kills them at the end."""

    def __init__(self, name: str, directory: Path) -> None:
        """Start the daemons.

        Args:
            name: one of STORES.
            directory: an existing directory for the state directories.
        """
        self._lenders: list[Daemon] = []
        self._state_dir = directory / name
        self._config: dict[str, Any] = {"host_budget": "64MiB" if name == "plenty" else SMALL, "nvme_budget": "8GiB"}
        if name == "borrower":
            self._lenders = [
                Daemon(directory / lender, {"host_budget": "48MiB", "lend_budget": "32MiB"})
                for lender in ("lender-1", "lender-2")
            ]
            addresses = [lender.address for lender in self._lenders]
            self._config["remote"] = {
                "lenders": addresses,
                "budget": "48MiB",
                "use": "always",
                "retry_seconds": 0.1,
            }
        self.daemon = self._start()

    def _start(self) -> Daemon:
        return Daemon(self._state_dir, self._config)

    def restart(self) -> None:
        """Kill the daemon, without its lenders, and start it again."""
        self.daemon.kill()
        self.daemon = self._start()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for daemon in (self.daemon, *self._lenders):
            daemon.kill()


def large_run(training: str, place: str | None, choice: str, world_size: int, address: str, job: str) -> Run:
    """Return the run of a training of a deep, checkpointed model at a place, with a choice.

    Args:
        place: None for the reference, which needs no store.
    """
    run = replace(run_of(training, place, world_size, address, job), layers=LAYERS, checkpointing="non-reentrant")
    if place is None:
        return run
    chosen, section = CHOICES[choice], dict(run.config["paramserver"])
    if chosen.gradients is not None:
        section["placement"] = {**section["placement"], "gradients": chosen.gradients}
    if chosen.tiles:
        section["tiling"] = _TILING
    config = run.config | {"paramserver": section | ({"activations": _ACTIVATIONS} if chosen.offloads else {})}
    return replace(run, config=config | {"activation_checkpointing": {"cpu_checkpointing": chosen.offloads}})

"""The homes that the config can give to a kind of state: the trainer's own memory, and the tiers of the store."""

from __future__ import annotations

import enum


class Home(enum.StrEnum):
    """The place where a kind of state is kept between its uses.

    The values are the words of the config. All values but the device's are the words of the store's tiers
    (contract/tiers.py).
    """

    DEVICE = "device"
    """The trainer's own memory, on the engine's device."""

    GPU = "gpu"
    """The store's gpu tier, which has copies only, so it is refused as a home."""

    HOST = "host"
    """The store's shared memory."""

    NVME = "nvme"
    """The store's files, and its shared memory while the state is in use."""

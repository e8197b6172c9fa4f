"""The homes that the config can give to a kind of state: the trainer's own memory, and the tiers of the store."""

from __future__ import annotations

import enum


class Home(enum.StrEnum):
    """Where a kind of state lives. The values are the words of the config, and but for the device those of the store's
    tiers (contract/tiers.py)."""

    DEVICE = "device"
    """In the trainer's own memory, on the engine's device."""

    GPU = "gpu"
    """In the store's GPU tier."""

    HOST = "host"
    """In the store's shared memory."""

    NVME = "nvme"
    """In the store's files; in its shared memory while it is used."""

"""The rates of a plan: given as options, published for a node, or measured by the probe on this machine.

This module chooses where each rate is from, and has the words that say so in the output. It must never plan.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from pydantic import TypeAdapter, ValidationError

from paramserver.contract.optimizer_threads import MOST_BY_DEFAULT, by_default
from paramserver.contract.sizes import Size
from trainer_client.errors import ConfigError
from trainer_client.plan.layout import World
from trainer_client.plan.machine import KnownRates, Rates, shared_rate
from trainer_client.plan.nodes import Node
from trainer_client.plan.probe import probe
from trainer_client.plan.rehearsal import Rehearsal

# Assumed rates, which a plan uses without a probe: the bytes that a rank on the CPU copies in a second, and the
# elements that a thread of the store updates in a second. Both suit two server processors of 2020 and later.
_COPY, _UPDATE = 10e9, 300e6
# A placeholder where no rate is known yet: each rate is 1.
_UNKNOWN = Rates(
    copy=1.0,
    device_link=1.0,
    nvme_read=1.0,
    nvme_write=1.0,
    nvme_both=1.0,
    update=1.0,
    device_update=None,
    collective=None,
)
# The rates of a first plan, which is made before anything is measured, and whose step time is not used.
NO_RATES = KnownRates(of=lambda _: _UNKNOWN, compute_seconds=lambda _: 0.0, rates_from="", compute_from="")


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenRates:
    """The rates that the user has given by options, so that the plan neither measures nor looks them up.

    Attributes:
        rates: the given rates per second, by the name of a field of Rates.
        flops: the floating-point operations that a rank makes in a second; None: the option is not given.
        optimizer_threads: the value of the daemon's key of this name; None: the daemon's default.
        with_probe: whether rates that are not given may be measured.
    """

    rates: Mapping[str, float]
    flops: float | None
    optimizer_threads: int | None
    with_probe: bool

    @classmethod
    def of(
        cls, texts: Mapping[str, str | None], flops: float | None, optimizer_threads: int | None, *, with_probe: bool
    ) -> GivenRates:
        """Return the rates that the options of the verb give, as the user has written them.

        Args:
            texts: the text of each option, by the name of a field of Rates; None if the option is not given.
            flops, optimizer_threads, with_probe: see the attributes.

        Raises:
            ConfigError: a text is no size, or a rate is not above 0.
        """
        if flops is not None and not (flops > 0 and math.isfinite(flops)):
            raise ConfigError(f"--flops {flops:g} is not a rate: write a number above 0, for example 4e14")
        rates = {name: float(size_of(_option(name), text)) for name, text in texts.items() if text is not None}
        if "nvme_both" not in rates and {"nvme_read", "nvme_write"} <= rates.keys():
            rates["nvme_both"] = shared_rate(rates["nvme_read"], rates["nvme_write"])
        return cls(rates=rates, flops=flops, optimizer_threads=optimizer_threads, with_probe=with_probe)


def size_of(option: str, text: str) -> int:
    """Return the bytes that the text of an option stands for, as "5GB". It can raise ConfigError."""
    with suppress(ValidationError, OverflowError):
        if (nbytes := int(TypeAdapter(Size).validate_python(text))) > 0:
            return nbytes
    raise ConfigError(f"{option} {text!r} is not a size above 0: write for example 80GiB, or 5GB for a second")


def published_rates(node: Node, given: GivenRates) -> KnownRates:
    """Return all rates of a plan for a node: those that options give, and else those that are published for it."""
    threads = given.optimizer_threads or MOST_BY_DEFAULT
    flops = given.flops or node.flops
    return KnownRates(
        of=lambda world: replace(node.rates(world, threads), **given.rates),
        compute_seconds=lambda rehearsal: rehearsal.flops / flops,
        rates_from="those of the node as published or measured on such nodes, where they are not given",
        compute_from=f"that of {flops:.3g} FLOPs a second",
    )


def rates_here(
    given: GivenRates, rehearsal: Rehearsal, world: World, *, dtype: torch.dtype | None, device: str, directory: Path
) -> KnownRates:
    """Return all rates of a plan: those that options give, and else those that the probe measures on this machine.

    Args:
        given: the rates that options give.
        rehearsal: the rehearsal of a micro-batch, whose operations are timed.
        world: the ranks of the job.
        dtype: the dtype of gradients and parameters if it is not fp32.
        device: "cpu" or "cuda".
        directory: the directory whose NVMe is probed.

    Raises:
        ConfigError: a rate is not given, and it cannot or must not be measured.
    """
    processors = len(os.sched_getaffinity(0))
    threads = given.optimizer_threads or by_default(processors)
    on_device = _UPDATE if device == "cpu" else None
    measured = replace(_UNKNOWN, copy=_COPY, update=threads * _UPDATE, device_update=on_device)
    seconds, rates_from = 0.0, f"given; a thread is assumed to update {_UPDATE:.3g} elements a second"
    if missing := _missing_rates(given, world, device):
        _check_measurable(missing, world, device, with_probe=given.with_probe)
        measured, seconds = probe(
            {} if given.flops is not None else rehearsal.operations,
            dtype=dtype,
            ranks=world.ranks,
            # In the probe each rank has as many threads as `paramserver launch` gives it in training.
            threads=max(1, processors // world.ranks),
            directory=None if {"nvme_read", "nvme_write"} <= given.rates.keys() else directory,
            device=device,
            optimizer_threads=threads,
        )
        rates_from = "measured here, with all ranks of a node at once, where they are not given"

    def compute_seconds(other: Rehearsal) -> float:
        if given.flops is not None:
            return other.flops / given.flops
        # A micro-batch of another size or precision than the measured one is assumed to run at the same floating-point
        # operations per second.
        return seconds * (other.flops / rehearsal.flops if rehearsal.flops else 1.0)

    rates = replace(measured, **given.rates)
    return KnownRates(
        of=lambda _: rates,
        compute_seconds=compute_seconds,
        rates_from=rates_from,
        compute_from="the sum of its operations, each timed here"
        if given.flops is None
        else f"that of {given.flops:.3g} FLOPs a second",
    )


def _missing_rates(given: GivenRates, world: World, device: str) -> list[str]:
    """Return the names of the rates that a plan needs and that no option gives, for example "nvme_read" or "flops"."""
    needed = {"nvme_read", "nvme_write"}
    needed |= {"device_link"} if device == "cuda" else set()
    needed |= {"collective"} if world.size > 1 else set()
    return [*sorted(needed - given.rates.keys()), *([] if given.flops is not None else ["flops"])]


def _check_measurable(missing: list[str], world: World, device: str, *, with_probe: bool) -> None:
    """Raise ConfigError if the missing rates of a job cannot be measured here."""
    if not with_probe or (device == "cuda" and not torch.accelerator.is_available()):
        why = "this machine has no GPU to measure" if with_probe else "--no-probe measures nothing"
        raise ConfigError(f"{why}: give {', '.join(map(_option, missing))}, too")
    if world.nodes > 1 and "collective" in missing:
        raise ConfigError(
            f"--nnodes {world.nodes}: this machine cannot measure the network between nodes: give --collective, too"
        )


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")

"""The placement of each flat group's state: which of the homes device, host and NVMe each kind of state has.

The functions are pure functions of the config and of sizes, so every rank computes the same placement. This module must
never move a byte.

[Note: three kinds of state] *Parameters* are the values with which forward and backward compute. *Gradients* are this
rank's part of the reduced gradients between two micro-batches. *Optimizer* means the optimizer's states and the fp32
master weight. An fp32 parameter is its own master weight, and its home is that of the parameters. With any placement,
the store has the whole job: state that lives on the device is put into the store when a step is committed.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer_client.config.home import Home
from trainer_client.config.training_config import TrainingConfig
from trainer_client.errors import ConfigError


class Residence(enum.Enum):
    """The part of a flat group's parameters and states that each rank keeps all the time; the ZeRO stage says which."""

    SHARDED = enum.auto()
    """Stage 3: a rank has the whole parameters on its device only while their unit is in use."""

    RESIDENT = enum.auto()
    """Stages 1 and 2: a rank always has the whole parameters on its device, and the states of its partition."""

    REPLICATED = enum.auto()
    """Stage 0: a rank always has the whole parameters and all states on its device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlacement:
    """The homes of the three kinds of state of one flat group; see [Note: three kinds of state]."""

    residence: Residence
    parameters: Home
    gradients: Home
    optimizer: Home


# The homes of one kind of state, with the fraction of the state's bytes that each home gets. The fractions sum to 1.
Shares = Mapping[Home, float]

_ALL_ON_DEVICE: Shares = {Home.DEVICE: 1.0}
_DEEPSPEED_HOMES = {"none": Home.DEVICE, "cpu": Home.HOST, "nvme": Home.NVME}
_RESIDENCES = (Residence.REPLICATED, Residence.RESIDENT, Residence.RESIDENT, Residence.SHARDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPolicy:
    """The placement that the config asks for, which `assign` turns into a placement of each flat group.

    Attributes:
        residence: the part of a group that a rank keeps, by ZeRO stage.
        parameters: the fractions of the parameters' bytes, by home.
        gradients: the fractions of the gradients' bytes, by home. None: gradients of a group are on the device if its
            optimizer states are, else in host memory.
        optimizer: the fractions of the optimizer states' bytes, by home.
    """

    residence: Residence
    parameters: Shares
    gradients: Shares | None
    optimizer: Shares

    @classmethod
    def of(cls, config: TrainingConfig) -> PlacementPolicy:
        """Return the policy of a config.

        Raises:
            ConfigError: the config gives a placement twice, its fractions do not sum to 1, or the ZeRO stage does not
                support it.
        """
        zero, section = config.zero_optimization, config.paramserver.placement
        parameters, optimizer = _ALL_ON_DEVICE, _ALL_ON_DEVICE
        # An offload section of the config that the ZeRO stage does not support is ignored, as in DeepSpeed.
        # config/log_lines.py makes a line for the log about each section that is ignored.
        if zero.offload_param is not None and zero.stage == 3:
            parameters = {_DEEPSPEED_HOMES[zero.offload_param.device]: 1.0}
        if (offload := zero.offload_optimizer) is not None and zero.stage >= 1:
            ratio = 0.0 if offload.device == "none" else offload.ratio
            optimizer = _without_zeros({_DEEPSPEED_HOMES[offload.device]: ratio, Home.DEVICE: 1.0 - ratio})
        if section.parameters is not None:
            _refuse_both("parameters", "offload_param", zero.offload_param)
            parameters = _shares("parameters", section.parameters)
        if section.optimizer is not None:
            _refuse_both("optimizer", "offload_optimizer", zero.offload_optimizer)
            optimizer = _shares("optimizer", section.optimizer)
        gradients = None if section.gradients is None else _shares("gradients", section.gradients)
        if zero.stage < 3 and parameters != _ALL_ON_DEVICE:
            raise ConfigError(
                f"zero_optimization.stage is {zero.stage}: every rank keeps the whole parameters on its device; "
                "paramserver.placement.parameters needs stage 3"
            )
        if zero.stage < 1 and optimizer != _ALL_ON_DEVICE:
            raise ConfigError(
                "zero_optimization.stage is 0: every rank keeps the optimizer's states on its device; "
                "paramserver.placement.optimizer needs stage 1, 2 or 3"
            )
        return cls(residence=_RESIDENCES[zero.stage], parameters=parameters, gradients=gradients, optimizer=optimizer)

    def assign(self, sizes: Sequence[int]) -> list[GroupPlacement]:
        """Return the placement of each flat group, given the sizes of one rank's partitions in forward order."""
        parameters, optimizer = spread(self.parameters, sizes), spread(self.optimizer, sizes)
        if self.gradients is None:
            gradients = [Home.DEVICE if home is Home.DEVICE else Home.HOST for home in optimizer]
        else:
            gradients = spread(self.gradients, sizes)
        return [
            GroupPlacement(residence=self.residence, parameters=p, gradients=g, optimizer=o)
            for p, g, o in zip(parameters, gradients, optimizer, strict=True)
        ]


def spread(shares: Shares, sizes: Sequence[int]) -> list[Home]:
    """Return a home for each item, given the items' sizes.

    Each item goes to the home that lacks the most bytes of its share so far. So after every item, the bytes of each
    home are as near to its share as whole items allow.
    """
    homes = []
    total = 0
    given: Counter[Home] = Counter()
    for size in sizes:
        total += size
        lacking = {home: share * total - given[home] for home, share in shares.items()}
        home = max(lacking, key=lambda home: lacking[home])
        given[home] += size
        homes.append(home)
    return homes


def _shares(kind: str, given: Shares) -> Shares:
    key = f"paramserver.placement.{kind}"
    total = sum(given.values())
    if not math.isclose(total, 1.0, abs_tol=1e-6):
        fractions = {home.value: share for home, share in given.items()}
        raise ConfigError(f"the fractions of {key} = {fractions} sum to {total:g}: they must sum to 1")
    shares = _without_zeros(given)
    if Home.GPU in shares:
        raise ConfigError(
            f'{key} is "gpu": the store keeps no state on the gpu tier only; write "device" for a home in the GPU\'s '
            'memory, or "host" or "nvme" and paramserver.gpu_budget for copies in it'
        )
    return shares


def _without_zeros(shares: Shares) -> Shares:
    return {home: share for home, share in shares.items() if share > 0}


def _refuse_both(kind: str, key: str, section: object | None) -> None:
    if section is not None:
        raise ConfigError(f"zero_optimization.{key} and paramserver.placement.{kind} are both given: remove one")

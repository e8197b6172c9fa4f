"""The move of a rank's states from its device into host memory and back, to leave the device to another program.

This module owns the copies in host memory. It must never look at values, and never begin a move on its own: the engine
asks between two passes, and refuses all other calls until the states are back.

[Note: freed storage] When a state moves, its tensor stays in all objects that hold it, and only the tensor's storage is
freed. So the tensor and its views are right again when the storage is filled. Until then no code may read them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch

from paramserver.contract.kinds import MASTER
from trainer_client.config.home import Home
from trainer_client.training.model.placement import Residence
from trainer_client.training.model.states import PlacedStates
from trainer_client.training.step.gradients import Gradients

_HOST = torch.device("cpu")


class DeviceState(StrEnum):
    """The kinds of state that can be moved to host memory. The values are DeepSpeed's names for them."""

    optim_states = "optim_states"
    """The optimizer's states."""

    hp_params = "hp_params"
    """The fp32 master weights. A parameter that is fp32 itself has none."""

    lp_params = "lp_params"
    """The parameters that forward computes with."""

    lp_grads = "lp_grads"
    """The gradients between backward and step."""

    contiguous_grad_buffer = "contiguous_grad_buffer"
    """DeepSpeed's buffer for reductions. This engine has no such buffer between two passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _HeldState:
    """A tensor on the device whose memory can be freed and allocated again.

    Attributes:
        tensor: the tensor that views the memory.
        free: frees the memory; `tensor` must not be read until it is allocated and filled again.
        allocate: allocates the memory again, with undefined values.
    """

    tensor: torch.Tensor
    free: Callable[[], None]
    allocate: Callable[[], None]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _HeldState:
        """Return the memory of a tensor that has a storage of its own."""
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        return cls(tensor=tensor, free=lambda: _resize(storage, 0), allocate=lambda: _resize(storage, nbytes))


class StateOffload:
    """Moves states of one engine from the device into host memory, and back when the user asks for them."""

    def __init__(self, states: Sequence[PlacedStates], gradients: Gradients) -> None:
        """Move nothing yet: all states are on their devices."""
        self._states = states
        self._gradients = gradients
        self._moved: dict[DeviceState, list[tuple[_HeldState, torch.Tensor]]] = {}

    @torch.no_grad()
    def offload(self, which: Container[DeviceState], *, pinned: bool, non_blocking: bool) -> None:
        """Copy these kinds of state into host memory, and free their memory on the device.

        States in the store are not moved, and states that were moved before are not moved again. After a failure all
        moved states are moved back.

        Args:
            pinned: whether the copies are in page-locked memory, if there is an accelerator to copy from.
            non_blocking: whether the call may return before page-locked copies are complete.
        """
        pinned = pinned and torch.accelerator.is_available()
        try:
            for kind in DeviceState:
                if kind not in which or kind in self._moved:
                    continue
                moved = self._moved[kind] = []
                for held in self._on_device(kind):
                    copy = torch.empty_like(held.tensor, device=_HOST, pin_memory=pinned)
                    copy.copy_(held.tensor, non_blocking=non_blocking)
                    held.free()
                    moved.append((held, copy))
        except BaseException:
            self.reload(non_blocking=False)
            raise

    @torch.no_grad()
    def reload(self, *, non_blocking: bool) -> None:
        """Move all moved states back to the device.

        If the device has too little memory, torch's error is raised, and states that were not moved yet stay in host
        memory, so that a later call can move them.
        """
        for kind in list(self._moved):
            moved = self._moved[kind]
            while moved:
                held, copy = moved[-1]
                held.allocate()
                held.tensor.copy_(copy, non_blocking=non_blocking)
                moved.pop()
            del self._moved[kind]

    def devices_of(self, kind: DeviceState) -> set[torch.device]:
        """Return the devices on which a kind of state is now.

        For states in the memory or the files of the store, this is the CPU.
        """
        found = {held.tensor.device for held in self._on_device(kind) if kind not in self._moved}
        if self._moved.get(kind) or any(self._is_in_store(state, kind) for state in self._states):
            found.add(_HOST)
        return found

    def _on_device(self, kind: DeviceState) -> Iterator[_HeldState]:
        """Yield each tensor of a kind of state that is on the device, as memory that can be freed."""
        if kind is DeviceState.lp_grads:
            yield from map(_HeldState.of, self._gradients.on_device())
        for state in self._states:
            match kind:
                case DeviceState.lp_params if state.placement.parameters is Home.DEVICE:
                    yield _parameters_of(state)
                case DeviceState.hp_params if MASTER in state.held:
                    yield _HeldState.of(state.held[MASTER])
                case DeviceState.optim_states:
                    yield from (
                        _HeldState.of(state.held[each]) for each in state.group.state_kinds if each in state.held
                    )

    def _is_in_store(self, state: PlacedStates, kind: DeviceState) -> bool:
        match kind:
            case DeviceState.lp_params:
                return state.placement.parameters is not Home.DEVICE
            case DeviceState.hp_params:
                return state.group.has_master and state.placement.optimizer is not Home.DEVICE
            case DeviceState.optim_states:
                return state.group.trainable and state.placement.optimizer is not Home.DEVICE
            case DeviceState.lp_grads:
                return state.group.trainable and self._gradients.is_in_store(state.group)
        return False


def _parameters_of(state: PlacedStates) -> _HeldState:
    """Return the memory of a group's parameters: a partition, or the whole flat buffer."""
    group = state.group
    if state.placement.residence is Residence.SHARDED:
        assert group.partition is not None, "parameters on the device have a partition there"
        return _HeldState.of(group.partition)
    return _HeldState(tensor=group.flat, free=group.free, allocate=group.allocate)


def _resize(storage: torch.UntypedStorage, nbytes: int) -> None:
    storage.resize_(nbytes)

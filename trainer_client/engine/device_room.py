"""The engine's methods that free memory of its rank's device between two steps, for other programs or longer inputs.

This module owns the order in which states and copies of parameters leave the device and come back. It must never change
a value.
"""

from __future__ import annotations

from collections.abc import Container

import torch

from trainer_client.engine.training_loop import TrainingLoop
from trainer_client.errors import ConfigError
from trainer_client.training.run.state_offload import DeviceState
from trainer_client.training.step.phases import Phase


class DeviceRoom:
    """The memory that an engine has on its rank's device between two steps."""

    def __init__(self, loop: TrainingLoop) -> None:
        """Serve the calls of one engine."""
        self._loop = loop
        self._commits = loop.parts.commits
        self._hooks = loop.parts.hooks
        self._micro_batches = loop.parts.micro_batches
        self._whole_parameters = loop.parts.whole_parameters
        self._offload = loop.parts.offload
        self._device_copies = loop.parts.device_copies

    def empty_partition_cache(self) -> None:
        """Release the memory of gathered parameters between two steps. The next forward gathers them again.

        Within a step the call has no effect, because the backward pass needs the units that are still gathered.
        """
        self._loop.require_open()
        if self._micro_batches.backwards == 0 and self._hooks.phase is Phase.IDLE:
            self._hooks.release_units()

    def offload_states(
        self,
        include: Container[DeviceState] | None = None,
        device: str = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move states from this rank's device into host memory, to leave the device to another program for a while.

        If the parameters (`lp_params`) are among the states, the memory of `paramserver.gpu_budget` is freed for that
        time, too. Until `reload_states`, every other call but `close` raises PhaseError, and so does the model's
        forward. States that live in the store do not move. If the rank's device is the CPU, the call copies the states
        all the same. If the call fails, all states are moved back.

        Args:
            include: the kinds of state, as `OffloadStateTypeEnum`; None: all.
            device: only "cpu" is possible.
            pin_memory: whether to page-lock the copies.
            non_blocking: whether to return before the copies are complete. Only page-locked copies can do so.

        Raises:
            ConfigError: another device was given.
            PhaseError: a forward waits for its backward, or a pass or a step is under way.
            RuntimeError: the engine is closed, or parameters are held by `gathered`.
        """
        if str(device) != "cpu":
            raise ConfigError(f"offload_states(device={str(device)!r}): states can be moved to 'cpu' only")
        if self._hooks.phase is not Phase.OFFLOADED:
            self._loop.require_open()
        if self._whole_parameters.is_holding:
            raise RuntimeError("offload_states() within gathered(): leave it first")
        # A commit under way may still read states from the device, so the engine waits for its end before it moves the
        # states.
        self._commits.wait()
        self._hooks.begin_offload()
        which: Container[DeviceState] = list(DeviceState) if include is None else include
        try:
            if DeviceState.lp_params in which:
                self._device_copies.withdraw()
            self._offload.offload(which, pinned=pin_memory, non_blocking=non_blocking)
        except BaseException:
            # If moving a state fails, all states come back to the device, and so does the memory for device copies.
            # This includes the states that an earlier call has moved.
            self.reload_states()
            raise

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move all states that `offload_states` has moved back to the device. If it has moved none, do nothing."""
        if self._hooks.phase is Phase.OFFLOADED:
            self._offload.reload(non_blocking=non_blocking)
            self._device_copies.restore()
            self._hooks.end_offload()

    def state_devices(self, state: DeviceState) -> set[torch.device]:
        """Return the devices on which this rank's state of one kind is. State in the store counts as on the CPU."""
        return self._offload.devices_of(state)

    def set_gpu_budget(self, nbytes: int) -> None:
        """Change `paramserver.gpu_budget` of this rank, between two steps.

        If the budget becomes smaller, copies of parameters leave the device, and their memory is given back to torch.
        Use this, for example, before a phase with longer sequences. If the rank's device is the CPU, the call has no
        effect.

        Raises:
            ConfigError: the number is negative.
            PhaseError: a forward waits for its backward, or a pass or a step is under way.
            RuntimeError: the engine is closed, or parameters are held by `gathered`.
            StoreError: the store refused or failed the call.
            torch.OutOfMemoryError: the device has too little memory for a larger budget.
        """
        if nbytes < 0:
            raise ConfigError(f"set_gpu_budget({nbytes}): write a number of bytes, 0 for no copies on the device")
        self._loop.require_open()
        if self._whole_parameters.is_holding:
            raise RuntimeError("set_gpu_budget() within gathered(): leave it first")
        # A commit under way may still hold leases of device copies, so the engine waits for its end before it changes
        # the memory for device copies.
        self._commits.wait()
        self._hooks.begin_offload()
        try:
            self._device_copies.offer(nbytes)
        finally:
            self._hooks.end_offload()

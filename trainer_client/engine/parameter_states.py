"""The engine's methods that read and change the states of single parameters, and make parameters whole.

This module owns which of these calls are possible when. `training/access.py` reads and changes the states, and
`training/whole_parameters.py` makes parameters whole within a context. This module must never change a weight or an
optimizer state outside of a change that changes.py commits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from trainer_client.engine.changes import StateChanges
from trainer_client.engine.training_loop import TrainingLoop
from trainer_client.training.access import ParameterKey, StateShard


class ParameterStates:
    """The states of single parameters: weights, gradients and optimizer states, by parameter and kind."""

    def __init__(self, loop: TrainingLoop, changes: StateChanges) -> None:
        """Serve the calls of one engine."""
        self._loop, self._changes = loop, changes
        self._refusals = loop.refusals
        self._collectives = loop.rank.collectives
        self._access = loop.parts.access
        self._commits = loop.parts.commits
        self._step = loop.parts.step
        self._hooks = loop.parts.hooks
        self._whole_parameters = loop.parts.whole_parameters

    def is_trained(self, parameter: ParameterKey) -> bool:
        """Return whether a parameter is trained, or was trained before it was frozen. It can raise ConfigError.

        A frozen parameter in a parameter group has states, too, because it may be trained later; they are zero.
        """
        found = self._access.parameter(parameter)
        counts = self._step.update_counts
        return self._loop.optimizer.has_states(found) and (found.tensor.requires_grad or counts[found.index] > 0)

    def get_full(self, parameter: ParameterKey, kind: str) -> torch.Tensor | None:
        """Return the whole values of one kind of a parameter, on the CPU, wherever they live. All ranks must call this.

        Args:
            parameter: the parameter, or its FQN.
            kind: "param" (the values that forward computes with, in their dtype), "master" (the fp32 weight), "grad"
                (between backward and step: the mean, or the sum, over ranks of the gradients so far, without the loss
                scale), or a state of the optimizer by torch's name, as "exp_avg". All but "param" are fp32. A gradient
                that the ranks have not reduced yet (within `no_sync`, or before the last backward of a step in which
                only the last one reduces) is reduced for this call alone.

        Returns:
            The values in the parameter's shape. None for "grad" if no rank has a gradient in this step.

        Raises:
            ConfigError: there is no such parameter or kind.
        """
        self._loop.require_open()
        return self._access.full(parameter, kind)

    def get_local(self, parameter: ParameterKey, kind: str) -> torch.Tensor | None:
        """Return this rank's part of one kind of a parameter: [n] of the flattened parameter; n may be 0.

        The values are as those of `get_full`, but the other ranks do not have to call this. For a gradient that no rank
        has, None or zeros are returned.

        Raises:
            ConfigError: there is no such parameter or kind.
            RuntimeError: gradients are not reduced over the ranks yet (within `no_sync`, or before the last backward of
                a step in which only that one reduces).
        """
        self._loop.require_open()
        return self._access.local(parameter, kind)

    def set_full(self, parameter: ParameterKey, kind: str, value: torch.Tensor) -> None:
        """Change one kind of a parameter, on all ranks. All ranks must call this with the same value.

        "param" and "master" are one weight and change together. A gradient can be changed between backward and step. A
        parameter that the backward pass has not reached can be given a gradient, if the pass has reached another
        parameter of its flat group. All other kinds can be changed wherever no forward waits for its backward. Each
        change is a commit of its own, so a resume has the whole change or nothing of it. A change keeps the gradients
        of the step under way, so `step()` then updates the new values. `set_many` makes several changes in one commit.

        Args:
            value: the new values in the parameter's shape, of any dtype and on any device.

        Raises:
            ConfigError: there is no such parameter or kind, or the shape does not fit.
            RuntimeError: the kind cannot be changed at this point of the training loop.
        """
        self._set({(parameter, kind): value}, local=False)

    def set_local(self, parameter: ParameterKey, kind: str, value: torch.Tensor) -> None:
        """Change one kind of a parameter as `set_full` does, but each rank gives only its own part.

        All ranks must call this, each with its own part [n], as `get_local` returns it.
        """
        self._set({(parameter, kind): value}, local=True)

    def set_many(self, values: Mapping[tuple[ParameterKey, str], torch.Tensor]) -> None:
        """Make several changes as `set_full`, by (parameter, kind), in one commit. All ranks must call this."""
        self._set(values, local=False)

    def sharded_state_dict(self, kind: str = "master") -> dict[str, StateShard]:
        """Return this rank's part of one kind of all parameters that have it, by FQN, tied names included.

        The other ranks do not have to call this. Each part says which elements of which parameter it has, so that the
        dicts of all ranks together are the whole state, for any number of ranks. (`full_state_dict` returns the whole
        state on each rank.)
        """
        self._loop.require_open()
        return self._access.shards(kind)

    @contextmanager
    def gathered(
        self, parameters: nn.Module | Iterable[torch.Tensor], modifier_rank: int | None = None
    ) -> Iterator[None]:
        """Make parameters whole within the context, in the dtype of the forward, for reading. All ranks must call this.

        Their units stay gathered in the context, so forwards within it do not gather them again.

        Args:
            parameters: the parameters, or a module, for all of its parameters.
            modifier_rank: the rank that may change the parameters (in place, under torch.no_grad). At the end of the
                context all ranks get the values of this rank, in a commit of their own. An element that this rank does
                not change keeps its fp32 value. This rank may call `load_state_dict` of a module, if that loads these
                parameters only. None: no rank may change them. (At stages 0 to 2, all ranks may make the same change.)

        Raises:
            InPlaceChangeError: parameters were changed without `modifier_rank`, at stage 3.
            RuntimeError: `modifier_rank` was given between a forward and its backward.
        """
        self._loop.require_open()
        chosen = list(parameters.parameters() if isinstance(parameters, nn.Module) else parameters)
        if modifier_rank is None:
            with self._whole_parameters.gathered(chosen):
                yield
                self._whole_parameters.require_unchanged(chosen)
            return
        self._loop.require_between_passes("gathered(modifier_rank=...)")
        before = self._whole_parameters.parameters_before(chosen)
        with self._whole_parameters.gathered(chosen):
            with self._refusals.allow_load(chosen if self._collectives.rank == modifier_rank else ()):
                yield
            self._loop.require_between_passes("the end of gathered(modifier_rank=...)")
            with self._changes.changing():
                self._whole_parameters.hand_over_changed(chosen, before, modifier_rank, self._commits.next)
        with self._changes.changing():
            self._changes.commit()

    def register_external_parameter(self, module: nn.Module, parameter: nn.Parameter) -> None:
        """Gather `parameter`, which belongs to another module, together with `module` from now on.

        The call is never necessary, because the engine gathers an external parameter when a forward uses it. But with
        the call, torch.compile does not cut the graph of `module` there. DeepSpeed has the same function in
        `deepspeed.zero`.

        Raises:
            ConfigError: the module or the parameter is not part of this engine's model.
        """
        self._hooks.register_external_parameter(module, parameter)

    def _set(self, values: Mapping[tuple[ParameterKey, str], torch.Tensor], *, local: bool) -> None:
        """Change gradients at once, and all other kinds in a commit of their own. All ranks must call this."""
        self._loop.require_open()
        gradients = {parameter: value for (parameter, kind), value in values.items() if kind == "grad"}
        for parameter, value in gradients.items():
            self._access.set_gradient(parameter, value, local=local)
        states = {key: value for key, value in values.items() if key[1] != "grad"}
        if states:
            self._loop.require_between_passes("a change of parameters or optimizer states")
            changes = self._access.changes(states, local=local)
            with self._changes.changing():
                self._access.hand_over(changes, self._commits.next)
                self._changes.commit()

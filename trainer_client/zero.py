"""DeepSpeed's `deepspeed.zero`: building a model without its memory, and using parameters that are not gathered.

This module owns the arguments of DeepSpeed's names: each is honoured, has no effect, which a line in the log says, or
is refused with the reason. The work is done in training/initial/deferred_init.py, training/initial/early_values.py and
training/whole_parameters.py.
"""

from __future__ import annotations

import functools
import logging
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from trainer_client import comm
from trainer_client.base.not_built import NotBuilt
from trainer_client.config.loading import load_config
from trainer_client.engine.engine import Engine
from trainer_client.errors import ConfigError, InPlaceChangeError
from trainer_client.training.data_parallel import check_group, check_mpu
from trainer_client.training.initial.deferred_init import RecipeRecorder, recipe_of, replay_buffers
from trainer_client.training.initial.early_values import early_values
from trainer_client.training.model.availability import ZeroParamStatus, part_of, show_part, show_status, stay_on_moves
from trainer_client.training.model.owners import owner_of
from trainer_client.training.model.registered import external_parameters, registered_for
from trainer_client.training.step.precision import PrecisionPolicy

__all__ = [
    "GatheredParameters",
    "Init",
    "MiCS_Init",
    "TiledLinear",
    "ZeroParamStatus",
    "external_parameters",
    "register_external_parameter",
    "unregister_external_parameter",
    "unwrap_model_for_generation",
]

log = logging.getLogger(__name__)

# The name of the attribute that marks a parameter that was built under `Init` while the config had
# `enable_sanity_checks`.
_CHECKED = "_paramserver_checked"

# The arguments of `Init` that have no effect, with the reason for the log.
_WITHOUT_EFFECT = {
    "remote_device": "tensors have no memory until initialize(), and the config says where they live afterwards",
    "pin_memory": "tensors have no memory until initialize(), and the store's memory is shared with the daemon",
    "zero_param_parallel_group": "it changes from where parameters are gathered, and not their values; ranks of a node "
    "can read them from the node's store (paramserver.gather)",
    "tensor_overrides": "all tensors that constructors make are recorded",
}
# The arguments of `Init` that are refused, because they would change the numbers or because only DeepSpeed can do what
# they ask for. For each: the reason and what to do instead.
_REFUSED = {
    "zero_quantized_weights": "it rounds weights where they are gathered, and they are gathered as they are here",
    "zero_quantized_nontrainable_weights": "it rounds frozen weights, and the store keeps all weights as they are",
    "param_swapper": "the store moves parameters to files: set zero_optimization.offload_param.device to nvme",
}


class Init:
    """A context in which models are built without memory.

    Parameters and buffers are made on the meta device, and the operations that compute their initial values are
    recorded. `trainer_client.initialize` replays them later, one parameter at a time, and each rank only for its own
    partitions. Buffers have their values from the end of the context on, on the CPU.

        with trainer_client.zero.Init():
            model = GPT2LMHeadModel(config)
        engine, *_ = trainer_client.initialize(model=model, config=...)

    The initial values depend only on the seed and the order of construction, so they are the same for every number of
    ranks. All ranks have to build the model alike. If the model's dtype is changed, that has to happen within the
    context. A constructor that needs a tensor's values gets them, because its recipe is then replayed at once.

    As with DeepSpeed, the ranks that a launcher has started join their process group here, if they have not before, and
    a process alone makes one, because transformers asks for its rank while it loads a model. The group stays until the
    process ends.

    A context within another one only sets the dtype. If `initialize` is called within a context, the model
    gets its values there.

    Args:
        module: a model that has values. It stays as it is, because `initialize` takes its memory group by group.
        data_parallel_group, sequence_data_parallel_group: accepted if the group has all ranks of the run.
        mem_efficient_linear: has no effect: torch's linear is always used, and keeps no second copy of a weight.
        config_dict_or_path, config: a training config, under either name. It is checked at once, so that a mistake
            shows before the model is built. Where it enables bf16 or fp16, parameters get that dtype when a module gets
            them, so that the fp32 master weights begin with rounded values. Buffers keep theirs.
        enabled: False: the context does nothing.
        dtype: the default dtype within the context. If it is given, parameters keep the dtype with which they are made,
            also in a config with bf16 or fp16: with torch.float32, the master weights begin with the exact values.
        mpu: DeepSpeed's object that describes model parallelism; it is accepted if it splits nothing but the data.
        remote_device, pin_memory, zero_param_parallel_group, tensor_overrides: have no effect; a line in the log says
            why.
        zero_quantized_weights, zero_quantized_nontrainable_weights, param_swapper: refused.
        seed: the seed of all initial values, in [0, 2**63); None: rank 0 draws it from torch's generator.

    Raises:
        ConfigError: an argument is not honoured.
        DeferredInitError: an operation within the context cannot be deferred.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Mapping[str, Any] | str | Path | None = None,
        config: Mapping[str, Any] | str | Path | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
        tensor_overrides: Any = None,
        *,
        seed: int | None = None,
    ) -> None:
        self._check(
            {
                "remote_device": remote_device,
                "pin_memory": pin_memory,
                "zero_param_parallel_group": zero_param_parallel_group,
                "tensor_overrides": tensor_overrides,
                "zero_quantized_weights": zero_quantized_weights,
                "zero_quantized_nontrainable_weights": zero_quantized_nontrainable_weights,
                "param_swapper": param_swapper,
            }
        )
        check_group("zero.Init(data_parallel_group=...)", data_parallel_group)
        check_group("zero.Init(sequence_data_parallel_group=...)", sequence_data_parallel_group)
        check_mpu("zero.Init(mpu=...)", mpu)
        if config is not None and config_dict_or_path is not None and config != config_dict_or_path:
            raise ConfigError("zero.Init(config=..., config_dict_or_path=...) are two names of one argument: pass one")
        if dtype is not None and not dtype.is_floating_point:
            raise ConfigError(f"zero.Init(dtype={dtype}): write a floating-point dtype")
        if seed is not None and not 0 <= seed < 2**63:
            raise ConfigError(f"zero.Init(seed={seed}): write a number in [0, 2**63)")
        source = config if config is not None else config_dict_or_path
        settings = None if source is None else load_config(source, os.environ)
        if enabled:
            comm.join_if_possible()
            comm.require_launched_group()
        self._checks = settings is not None and settings.zero_optimization.enable_sanity_checks
        self._enabled = enabled
        self._dtype = dtype
        # The dtype to which `Init` converts a parameter when a module gets it. None if parameters keep their dtypes.
        self._of_parameters = (
            PrecisionPolicy.of(settings).compute_dtype if dtype is None and settings is not None else None
        )
        self._seed = seed
        self._with_buffers = weakref.WeakSet[nn.Module]()
        self._context = ExitStack()

    @staticmethod
    def _check(arguments: Mapping[str, Any]) -> None:
        """Raise ConfigError for the first argument that is refused, and log those that have no effect."""
        given = [name for name, value in arguments.items() if value]
        for name in given:
            if name in _REFUSED:
                raise ConfigError(f"zero.Init({name}=...) is not honoured: {_REFUSED[name]}")
        for name in given:
            _log_without_effect(name)

    def __enter__(self) -> Self:
        if not self._enabled:
            return self
        if self._dtype is not None:
            self._context.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self._dtype)
        if self._of_parameters is not None:
            self._context.callback(register_module_parameter_registration_hook(self._round).remove)
        if RecipeRecorder.active is None:
            # The context's callbacks run in reverse order, so `_give_buffers` runs after the RecipeRecorder was closed.
            self._context.push(self._give_buffers)
            self._context.callback(register_module_buffer_registration_hook(self._note_buffer).remove)
            self._context.enter_context(self._drawing_seed() if self._seed is None else RecipeRecorder(self._seed))
            self._context.callback(register_module_parameter_registration_hook(self._show_unavailable).remove)
        elif self._seed is not None:
            self._context.close()
            raise ConfigError(f"zero.Init(seed={self._seed}) within zero.Init(): pass the seed to the outer one")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.__exit__(kind, error, trace)

    @contextmanager
    def _drawing_seed(self) -> Iterator[None]:
        """Record the operations in the context, with a seed for initial values that torch's generator draws.

        If no operation in the context draws random numbers, the generator gets its former state back. So a script
        whose model gets all its values from files shuffles its data in the order of plain PyTorch.
        """
        before = torch.get_rng_state()
        seed = int(torch.empty((), dtype=torch.int64).random_())
        after = torch.get_rng_state()
        with RecipeRecorder(seed) as recorder:
            yield
        if not recorder.has_random and torch.equal(torch.get_rng_state(), after):
            torch.set_rng_state(before)

    def _note_buffer(self, module: nn.Module, _: str, __: torch.Tensor | None) -> None:
        self._with_buffers.add(module)

    def _give_buffers(self, kind: type[BaseException] | None, *_: object) -> None:
        """Compute the values of the buffers of all modules that were built in the context, unless it has failed."""
        if kind is None:
            replay_buffers(self._with_buffers)
        self._with_buffers.clear()

    def _round(self, _: nn.Module, __: str, parameter: torch.Tensor | None) -> None:
        """Convert a new parameter in place to the dtype of the config, because other modules may share the object."""
        if isinstance(parameter, nn.Parameter) and recipe_of(parameter) and parameter.is_floating_point():
            parameter.data = parameter.data.to(self._of_parameters)

    def _show_unavailable(self, _: nn.Module, __: str, parameter: torch.Tensor | None) -> None:
        """Set DeepSpeed's attributes on a new parameter that has no values yet, such as its status NOT_AVAILABLE."""
        if isinstance(parameter, nn.Parameter) and recipe_of(parameter):
            show_status(parameter, ZeroParamStatus.NOT_AVAILABLE)
            show_part(parameter, part_of(-(-parameter.numel() // comm.get_world_size()), parameter.dtype))
            stay_on_moves(parameter)
            if self._checks:
                vars(parameter)[_CHECKED] = True


@functools.cache
def _log_without_effect(argument: str) -> None:
    if comm.get_rank() == 0:
        log.warning("zero.Init(%s=...) has no effect: %s", argument, _WITHOUT_EFFECT[argument])


class GatheredParameters:
    """A context in which parameters are whole, for reading, or for one rank to change. All ranks must call this.

    It enters `engine.gathered` of each engine that has some of the parameters. Parameters of a model that was built
    under `zero.Init` and has no engine yet get their initial values in host memory; changed values stay until
    `initialize`. All other parameters are left alone.

    A change in place without `modifier_rank` is lost at stage 3 and before `initialize`, because no rank's change
    counts. A warning says so at the end, or a RuntimeError if `zero_optimization.enable_sanity_checks` is true in the
    config of the engine or of `Init`. (At stages 0 to 2 changes in place count, if all ranks make them.)

    Args:
        params: a parameter, several parameters, or a module. Of several, None is left out, so that the parameters of a
            layer can be named whether it has a bias or not.
        modifier_rank: the rank whose changes count; see `engine.gathered`.
        fwd_module: a module whose forward uses the parameters; see `register_external_parameter`.
        enabled: False: the context does nothing.

    Raises:
        ConfigError: `params` has an object that is neither a tensor nor None. (DeepSpeed leaves such objects out.)
    """

    def __init__(
        self,
        params: nn.Module | torch.Tensor | Iterable[torch.Tensor | None] | None,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        self._of_engine: dict[Engine, list[torch.Tensor]] = {}
        unowned: list[torch.Tensor] = []
        for tensor in _tensors_of(params) if enabled else ():
            if isinstance(engine := owner_of(tensor), Engine):
                self._of_engine.setdefault(engine, []).append(tensor)
            else:
                unowned.append(tensor)
            if fwd_module is not None and isinstance(tensor, nn.Parameter):
                register_external_parameter(fwd_module, tensor)
        self._unowned = unowned
        self._modifier_rank = modifier_rank
        self._context = ExitStack()
        # The parameters outside of all engines that no rank may change in the context, each with torch's counter of
        # changes (`_version`) at the beginning.
        self._versions: list[tuple[torch.Tensor, int]] = []

    def __enter__(self) -> None:
        watched = list(filter(recipe_of, self._unowned)) if self._modifier_rank is None else []
        with ExitStack() as entered:
            entered.enter_context(early_values(self._unowned, self._modifier_rank))
            for engine, tensors in self._of_engine.items():
                entered.enter_context(engine.gathered(tensors, self._modifier_rank))
            self._versions = [(tensor, tensor._version) for tensor in watched]
            self._context = entered.pop_all()

    def __exit__(self, *error: Any) -> bool | None:
        changed = [tensor for tensor, version in self._versions if tensor._version != version]
        try:
            suppressed = self._context.__exit__(*error)
        except InPlaceChangeError as lost:
            if any(engine.zero_enable_sanity_checks() for engine in self._of_engine):
                raise
            log.warning("GatheredParameters(modifier_rank=None): %s", lost)
            return None
        if changed and error[0] is None:
            self._report_lost(changed)
        return suppressed

    def _report_lost(self, changed: list[torch.Tensor]) -> None:
        """Warn that changes of parameters before `initialize` are lost.

        Raise RuntimeError instead of the warning if `enable_sanity_checks` is true in the config of `Init`.
        """
        shapes = ", ".join(str(list(tensor.shape)) for tensor in changed)
        message = (
            f"in-place modification of parameters of shape {shapes} within GatheredParameters(modifier_rank=None): no "
            "rank's change counts; pass modifier_rank, the rank whose change all ranks are to have"
        )
        if any(_CHECKED in vars(tensor) for tensor in changed):
            raise RuntimeError(message)
        log.warning("%s", message)


def _tensors_of(params: nn.Module | torch.Tensor | Iterable[torch.Tensor | None] | None) -> list[torch.Tensor]:
    """Return the tensors that `GatheredParameters` is to make whole, each once. It can raise ConfigError."""
    if isinstance(params, nn.Module):
        return list(params.parameters())
    given = params if isinstance(params, Iterable) and not isinstance(params, torch.Tensor) else (params,)
    chosen: dict[int, torch.Tensor] = {}
    for item in given:
        if isinstance(item, torch.Tensor):
            chosen[id(item)] = item
        elif item is not None:
            raise ConfigError(
                f"zero.GatheredParameters(): a {type(item).__name__} is neither a parameter nor None: pass parameters, "
                "or one module for all of its parameters"
            )
    return list(chosen.values())


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Say that the forward of `module` uses `parameter`, which belongs to another module.

    This is never necessary, because the engine notices the use; see `Engine.register_external_parameter`. It may be
    called before `initialize`, as in a constructor.

    Raises:
        ConfigError: `parameter` is no parameter, or the two do not belong to one engine's model.
    """
    _require_parameter("register_external_parameter", parameter)
    if isinstance(engine := owner_of(parameter), Engine):
        engine.register_external_parameter(module, parameter)
    elif not any(known is parameter for known in registered_for(module)):
        registered_for(module).append(parameter)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Take back `register_external_parameter`, before `initialize`.

    After `initialize` this has no effect: the parameter is still gathered early, which costs only memory.

    Raises:
        ConfigError: `parameter` is no parameter, or was not registered.
    """
    _require_parameter("unregister_external_parameter", parameter)
    if isinstance(owner_of(parameter), Engine):
        log.info("unregister_external_parameter() after initialize() has no effect: it goes on being gathered early")
        return
    kept = [known for known in registered_for(module) if known is not parameter]
    if len(kept) == len(registered_for(module)):
        raise ConfigError(
            f"unregister_external_parameter(): a parameter of shape {list(parameter.shape)} was not registered for "
            f"this {type(module).__name__}"
        )
    registered_for(module)[:] = kept


@contextmanager
def unwrap_model_for_generation(model: Engine) -> Iterator[Engine]:
    """Gather all parameters of an engine's model once for several forwards within the context.

    All ranks must call this.

    Yields:
        The engine. `engine.module.generate` gathers nothing more meanwhile.
    """
    with model.gathered(model.module):
        yield model


def _require_parameter(function: str, parameter: Any) -> None:
    if not isinstance(parameter, nn.Parameter):
        raise ConfigError(f"zero.{function}(): a {type(parameter).__name__} is no torch.nn.Parameter")


class TiledLinear(
    NotBuilt,
    remedy="set paramserver.tiling.largest_tile, which gathers a torch.nn.Linear in tiles, without another model",
):
    """The stand-in for DeepSpeed's linear layer in tiles, which this library does not have.

    Its use raises NotBuiltError, which says what to write instead.
    """


class MiCS_Init(  # noqa: N801
    NotBuilt,
    remedy="parameters are divided among all ranks of a run; use zero.Init, and paramserver.gather for reads within a "
    "node",
):
    """The stand-in for DeepSpeed's context that divides parameters among a part of the ranks.

    Its use raises NotBuiltError, which says what to write instead.
    """

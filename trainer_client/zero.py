"""DeepSpeed's `zero.Init` (build a model without its memory) and `zero.GatheredParameters` (use whole parameters).

Owns their arguments: each is honoured, or refused by name. The work is done in deferred_init.py and access.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch

from trainer_client.access import owner_of
from trainer_client.config.training_config import load_config
from trainer_client.engine import Engine
from trainer_client.errors import ConfigError
from trainer_client.initial.deferred_init import Recorder

__all__ = ["GatheredParameters", "Init"]


class Init:
    """A context in which models are built without memory.

    Parameters and buffers are made on the meta device, and the operations that compute their initial values are
    recorded. `trainer_client.initialize` replays them later, one parameter at a time, and each rank only for its own
    chunks.

        with trainer_client.zero.Init():
            model = GPT2LMHeadModel(config)
        engine, *_ = trainer_client.initialize(model=model, config=...)

    The initial values depend only on the seed and the order of construction, so they are the same for every number of
    ranks. All ranks have to build the model alike. If the model's dtype is changed, that has to happen within the
    context. A constructor that needs a tensor's values gets them, because its recipe is then replayed at once.

    Args:
        config_dict_or_path, config: a training config, under either name. It is checked at once, so that a mistake
            shows before the model is built.
        enabled: False: the context does nothing.
        dtype: the default dtype within the context.
        mem_efficient_linear: only True is accepted; it has no effect, because torch's linear is always used.
        seed: the seed of all initial values, in [0, 2**63); None: rank 0 draws it from torch's generator.
        module, data_parallel_group, remote_device, pin_memory, mpu, zero_param_parallel_group, zero_quantized_weights,
            zero_quantized_nontrainable_weights, sequence_data_parallel_group, param_swapper: arguments of DeepSpeed
            that are refused.

    Raises:
        ConfigError: an argument is not honoured.
        DeferredInitError: an operation within the context cannot be deferred.
    """

    def __init__(
        self,
        module: Any = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: Any = None,
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
        *,
        seed: int | None = None,
    ) -> None:
        refused = {
            "module": module,
            "data_parallel_group": data_parallel_group,
            "remote_device": remote_device,
            "pin_memory": pin_memory,
            "mpu": mpu,
            "zero_param_parallel_group": zero_param_parallel_group,
            "zero_quantized_weights": zero_quantized_weights,
            "zero_quantized_nontrainable_weights": zero_quantized_nontrainable_weights,
            "sequence_data_parallel_group": sequence_data_parallel_group,
            "param_swapper": param_swapper,
        }
        if given := [name for name, value in refused.items() if value]:
            raise ConfigError(f"zero.Init({given[0]}=...) is not honoured by this version: leave it out")
        if not mem_efficient_linear:
            raise ConfigError("zero.Init(mem_efficient_linear=False): torch's linear is always used here; leave it out")
        if config is not None and config_dict_or_path is not None:
            raise ConfigError("zero.Init(config=..., config_dict_or_path=...) are two names of one argument: pass one")
        if dtype is not None and not dtype.is_floating_point:
            raise ConfigError(f"zero.Init(dtype={dtype}): write a floating-point dtype")
        if seed is not None and not 0 <= seed < 2**63:
            raise ConfigError(f"zero.Init(seed={seed}): write a number in [0, 2**63)")
        source = config if config is not None else config_dict_or_path
        if source is not None:
            load_config(source, os.environ)
        self._enabled = enabled
        self._dtype = dtype
        self._seed = seed
        self._context = ExitStack()

    def __enter__(self) -> Self:
        if not self._enabled:
            return self
        if self._dtype is not None:
            self._context.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self._dtype)
        seed = int(torch.empty((), dtype=torch.int64).random_()) if self._seed is None else self._seed
        self._context.enter_context(Recorder(seed))
        return self

    def __exit__(self, *_: object) -> None:
        self._context.close()


class GatheredParameters:
    """A context in which parameters are whole, for reading, or for one rank to change. A collective.

    It enters `engine.gathered` of each engine that has some of the parameters. Parameters without an engine are left
    alone.

    Args:
        params: a parameter, several parameters, or a module.
        modifier_rank: the rank whose changes count; see `engine.gathered`.
        fwd_module: an argument of DeepSpeed that is refused.
        enabled: False: the context does nothing.

    Raises:
        ConfigError: `fwd_module` was given.
    """

    def __init__(
        self,
        params: torch.nn.Module | torch.Tensor | Iterable[torch.Tensor],
        modifier_rank: int | None = None,
        fwd_module: Any = None,
        enabled: bool = True,
    ) -> None:
        if fwd_module is not None:
            raise ConfigError(
                "zero.GatheredParameters(fwd_module=...) is not honoured by this version: leave it out; the weights of "
                "other modules may be used in any forward"
            )
        if isinstance(params, torch.nn.Module):
            params = params.parameters()
        elif isinstance(params, torch.Tensor):
            params = (params,)
        self._of_engine: dict[Engine, list[torch.Tensor]] = {}
        for tensor in params if enabled else ():
            if isinstance(engine := owner_of(tensor), Engine):
                self._of_engine.setdefault(engine, []).append(tensor)
        self._modifier_rank = modifier_rank
        self._context = ExitStack()

    def __enter__(self) -> None:
        with ExitStack() as entered:
            for engine, tensors in self._of_engine.items():
                entered.enter_context(engine.gathered(tensors, self._modifier_rank))
            self._context = entered.pop_all()

    def __exit__(self, *error: Any) -> bool | None:
        return self._context.__exit__(*error)

"""`Accelerator`: Accelerate's class, with an engine in the place of DistributedDataParallel and the optimizer.

Data loaders, schedulers, trackers, collectives and the count of micro-batches are Accelerate's own. The update is made
in `optimizer.step()`, as in Accelerate without plug-ins, and not in `backward`, as with Accelerate's DeepSpeed plug-in.

This module owns the engine of the one model that is trained. It must never compute anything, because the engine and
Accelerate do so.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import accelerate
import torch
from accelerate.utils import DynamoBackend, broadcast_object_list, convert_outputs_to_fp32
from accelerate.utils.deepspeed import DeepSpeedSchedulerWrapper, DummyOptim, DummyScheduler
from torch import nn

from trainer_client.accelerate.optimizer import EngineOptimizer
from trainer_client.accelerate.options import ConfigSource, Options, without_launchers_choice
from trainer_client.accelerate.placeholders import check_places, fill
from trainer_client.accelerate.selection import Selection
from trainer_client.config.paramserver import configured_device_kind
from trainer_client.engine.engine import Engine
from trainer_client.errors import ConfigError
from trainer_client.initialization import initialize_with_rates_of_script

# The tag of the engine's checkpoint, which is the one that Accelerate gives to a checkpoint of DeepSpeed.
_TAG = "pytorch_model"


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """Accelerate's `Accelerator`, whose `prepare` makes the model and its optimizer an engine over the store.

        accelerator = Accelerator(config={"zero_optimization": {"stage": 3}})
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        for inputs, targets in loader:
            loss = loss_function(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    One Accelerator trains one model, whose optimizer is prepared in the same call. Models that are not trained may be
    prepared, too. Each start of the script is a new job in the store, unless the config has `paramserver.job` or
    `paramserver.resume`.
    """

    def __init__(self, *arguments: Any, config: ConfigSource = None, **keywords: Any) -> None:
        """Take Accelerate's arguments, and the training config.

        Args:
            config: a config in DeepSpeed's format, as a dict or the path of a JSON file; None: the config of the
                DeepSpeedPlugin, or of `accelerate launch --use_deepspeed`, if there is one. ZeRO's stage is 2 if the
                config names none. Accelerate decides the batch sizes and the accumulation steps.

        Raises:
            ConfigError: an argument cannot be honoured, or two arguments contradict each other.
        """
        options = Options.of(arguments, keywords, config, os.environ)
        with without_launchers_choice(os.environ):
            super().__init__(**options.arguments)
        self._options = options
        # Accelerate gets no gradient scaler, because the engine scales the loss, and enters autocast around the model's
        # forward.
        self.scaler = None
        self.native_amp = options.autocasts
        self._engine: Engine | None = None
        # Whether `save_state` is collecting weights for Accelerate to write. Meanwhile `get_state_dict` returns {} for
        # the engine, because the engine writes its weights itself.
        self._saves = False
        # The further arguments of `save_state` and `load_state` for the engine. They are kept here, because Accelerate
        # does not pass them to its hooks, which call the engine.
        self._save_arguments: dict[str, Any] = {}
        self._load_arguments: dict[str, Any] = {}
        self.register_save_state_pre_hook(self._save_engine)
        self.register_load_state_pre_hook(self._load_engine)

    @property
    def engine(self) -> Engine:
        """The engine of the model that is trained. The property raises RuntimeError before a model is prepared."""
        if self._engine is None:
            raise RuntimeError(
                "no model was prepared for training: write `model, optimizer = accelerator.prepare(model, optimizer)`, "
                "both in one call"
            )
        return self._engine

    # Preparation of models, optimizers and schedulers

    def prepare(self, *objects: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Prepare objects of any kinds, and return them in the same order. All ranks must call this.

        The trained model and its optimizer are given in one call. All other objects may be prepared in the same call or
        in further calls. Objects that are prepared already, and objects of unknown kinds, such as plain tensors, are
        returned unchanged.

        Args:
            device_placement: for each object, whether it is placed on the device. It has an effect only for data
                loaders and for models that are not trained.

        Raises:
            ConfigError: the objects cannot be trained together, or an argument or the config cannot be honoured.
        """
        selection = Selection.of(objects, has_engine=self._engine is not None)
        if selection is not None:
            objects = selection.replaced(self._prepare_engine(selection))
        return super().prepare(*objects, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Place a model that is not trained on the device, under autocast if `mixed_precision` says so."""
        # Accelerate returns an engine unchanged, because `_prepare_engine` has marked it as prepared.
        prepared: nn.Module = super().prepare_model(model, device_placement=device_placement, evaluation_mode=True)
        return prepared

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """Return an optimizer that `prepare` has already prepared. Raise ConfigError for any other optimizer."""
        if not isinstance(optimizer, EngineOptimizer):
            raise ConfigError(
                "prepare_optimizer(optimizer) without its model: write "
                "`model, optimizer = accelerator.prepare(model, optimizer)`"
            )
        return super().prepare_optimizer(optimizer, device_placement=device_placement)

    def _prepare_engine(self, selection: Selection) -> dict[int, Any]:
        """Make an engine of the selected model and optimizer.

        Returns:
            By the `id` of each selected object: what `prepare` returns in its place.
        """
        model, optimizer, scheduler = selection.model, selection.optimizer, selection.scheduler
        config = self._options.training_config(
            accumulation=self.gradient_accumulation_steps,
            world_size=self.num_processes,
            batch_size=selection.batch_size(self.num_processes if self.split_batches else 1),
            job=self._new_job(),
        )
        check_places(config, optimizer, scheduler)
        fill(config, optimizer, scheduler, 1 if self.split_batches else self.num_processes)
        self._check_device()
        compilation = self._compilation()
        _move_to_cpu(model)
        stands_in = isinstance(optimizer, DummyOptim)
        engine, _, _, made = initialize_with_rates_of_script(
            model=model,
            optimizer=None if stands_in else optimizer,
            model_parameters=optimizer.params if stands_in else None,
            lr_scheduler=getattr(scheduler, "lr_scheduler_callable", None),
            config=config,
        )
        if compilation is not None:
            engine.compile(backend=compilation.pop("backend"), compile_kwargs=compilation)
        if self._options.converts_outputs:
            engine.forward = convert_outputs_to_fp32(engine.forward)  # type: ignore[method-assign]
        wrapper = EngineOptimizer(engine)
        marked: Any
        for marked in (engine, wrapper):
            # `_is_accelerate_prepared` makes Accelerate return the object unchanged if the script prepares it again.
            marked._is_accelerate_prepared = True
        self._engine = engine
        replacements: dict[int, Any] = {id(model): engine, id(optimizer): wrapper}
        if isinstance(scheduler, DummyScheduler):
            # The scheduler that the script gets for its DummyScheduler does nothing, because the engine itself steps
            # the schedule of its config.
            prepared = DeepSpeedSchedulerWrapper(made, wrapper)
            prepared._is_accelerate_prepared = True
            replacements[id(scheduler)] = prepared
        return replacements

    def _new_job(self) -> str:
        """Return a name that no job has, the same on all ranks. All ranks must call this.

        A script of Accelerate begins anew each time that it is started, so each start has a job of its own.
        """
        name = f"accelerate-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        (agreed,) = broadcast_object_list([name])
        return str(agreed)

    def _check_device(self) -> None:
        """Raise ConfigError if Accelerate and the engine would use different devices."""
        ours = configured_device_kind(self._options.config)
        if self.device.type != ours:
            raise ConfigError(
                f"Accelerator() uses {self.device.type}, and the engine {ours}: leave cpu=True out, or "
                'write "device": "cpu" into the section paramserver of the config for both'
            )

    def _compilation(self) -> dict[str, Any] | None:
        """Return the Dynamo plug-in's arguments for compiling the model; None if the model is not compiled."""
        plugin = self.state.dynamo_plugin
        if plugin.backend is DynamoBackend.NO:
            return None
        if plugin.use_regional_compilation:
            raise ConfigError(
                "use_regional_compilation of the Dynamo plug-in is not honoured: compile the blocks in the script, "
                "with block.compile()"
            )
        arguments: dict[str, Any] = plugin.to_kwargs()
        return arguments

    # Methods that a training loop calls in each step

    def backward(self, loss: torch.Tensor, **keywords: Any) -> None:
        """Run the backward pass of a micro-batch, whose loss is divided by the accumulation steps.

        All ranks must call this.

        Args:
            loss: the loss; if it has several elements, `gradient` must be given, as for `torch.Tensor.backward`.

        Raises:
            RuntimeError: no model was prepared for training.
        """
        engine = self.engine
        loss = loss / self.gradient_accumulation_steps
        if keywords.keys() <= {"retain_graph"}:
            engine.backward(loss, **keywords)
        elif loss.numel() == 1:
            engine.scale(loss).backward(**keywords)
        else:
            loss.backward(**keywords)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Within the context, have backward passes add gradients up without communication, at any stage of ZeRO."""
        with model.no_sync() if isinstance(model, Engine) else super().no_sync(model):
            yield

    @contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """Enter a context that does nothing, because all ranks have the same number of batches.

        Raises:
            ConfigError: `even_batches` is false. Every rank takes part in each gather, so no rank may end before the
                others.
        """
        if not (self.even_batches if even_batches is None else even_batches):
            raise ConfigError(
                "join_uneven_inputs(even_batches=False) is not honoured: every rank takes part in each gather; leave "
                "even_batches true"
            )
        yield

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Have the gradient clipped by its norm when the next step is made. All ranks must call this.

        Args:
            parameters: all trainable parameters of the model.

        Returns:
            The norm over all ranks before clipping: 0-D, fp32, on the device.

        Raises:
            ConfigError: some of the model's trainable parameters are missing, or the norm is not the 2-norm.
            RuntimeError: the micro-batch is not the last one of its step.
        """
        if not self._are_trained("clip_grad_norm_", chosen := _listed(parameters)):
            return torch.nn.utils.clip_grad_norm_(chosen, max_norm, norm_type)
        if norm_type != 2:
            raise ConfigError(
                f"clip_grad_norm_(norm_type={norm_type}) is not honoured: only the 2-norm is; leave it out"
            )
        self._require_sync("clip_grad_norm_")
        norm = self.engine.clip_grad_norm_(float(max_norm))
        return torch.tensor(norm, dtype=torch.float32, device=self.device)

    def clip_grad_value_(self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
        """Have each element of the gradient clipped when the next step is made; see `clip_grad_norm_`."""
        if not self._are_trained("clip_grad_value_", chosen := _listed(parameters)):
            torch.nn.utils.clip_grad_value_(chosen, clip_value)
            return
        self._require_sync("clip_grad_value_")
        self.engine.clip_grad_value_(float(clip_value))

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Do nothing, because the engine removes the loss scale itself before it clips and returns norms."""

    def _are_trained(self, what: str, chosen: Sequence[torch.Tensor]) -> bool:
        """Return whether the engine trains these parameters. Raise ConfigError if they are only a part of its own."""
        if self._engine is None:
            return False
        ids = {id(parameter) for parameter in chosen}
        trained = [(name, p) for name, p in self._engine.module.named_parameters() if p.requires_grad]
        missing = [name for name, parameter in trained if id(parameter) not in ids]
        if len(missing) == len(trained):
            return False
        if missing:
            raise ConfigError(
                f"{what}() got a part of the trainable parameters, without {missing[0]} and {len(missing) - 1} others: "
                "one norm and one limit count for the whole step; pass model.parameters()"
            )
        return True

    def _require_sync(self, what: str) -> None:
        if not self.sync_gradients:
            raise RuntimeError(
                f"{what}() before the last micro-batch of a step: write it under `if accelerator.sync_gradients:`"
            )

    # Access to weights, and the writing and loading of checkpoints

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Return the model without the engine around it."""
        inner = model.module if isinstance(model, Engine) else model
        unwrapped: nn.Module = super().unwrap_model(inner, keep_fp32_wrapper, keep_torch_compile)
        return unwrapped

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """Return the weights of a model by name, on the CPU. For the model that is trained, all ranks must call this.

        For the model that is trained, the main process gets the fp32 (master) weights, and the other processes get an
        empty dict, as with Accelerate and FSDP.

        Args:
            unwrap: whether the names are those of the model. If false, they begin with "module.".
        """
        if not isinstance(model, Engine):
            state: dict[str, torch.Tensor] = super().get_state_dict(model, unwrap)
            return state
        if self._saves:
            # Within `save_state`, Accelerate collects the weights that it will write. The engine's weights are not
            # among them, because `_save_engine` writes a checkpoint of the engine.
            return {}
        weights = model.full_state_dict(rank0_only=True)
        return weights if unwrap else {f"module.{name}": value for name, value in weights.items()}

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **keywords: Any) -> Any:
        """Save the engine's states, and those of schedulers, loaders, random generators and registered objects.

        All ranks must call this. Accelerate's documentation describes the names of the directories and their number.
        `keywords` are passed to `engine.save_checkpoint`.
        """
        self._saves, self._save_arguments = True, keywords
        try:
            with self._without_optimizer():
                return super().save_state(output_dir, safe_serialization)
        finally:
            self._saves = False

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **keywords: Any
    ) -> None:
        """Load the states that `save_state` has saved. All ranks must call this.

        `keywords` are passed to `engine.load_checkpoint`.
        """
        self._load_arguments = keywords
        with self._without_optimizer():
            super().load_state(input_dir, load_kwargs)

    def _save_engine(self, models: list[nn.Module], weights: list[Any], output_dir: str) -> None:
        """Write the engine's checkpoint, and remove the trained model's weights from those that Accelerate writes."""
        # Accelerate has collected the weights by now. If a hook of the script, which runs after this hook, calls
        # `get_state_dict`, it gets the whole weights again.
        self._saves = False
        for index in reversed(range(len(models))):
            model = models[index]
            if isinstance(model, Engine):
                model.save_checkpoint(output_dir, _TAG, **self._save_arguments)
                del weights[index]

    def _load_engine(self, models: list[nn.Module], input_dir: str) -> None:
        """Load the engine's checkpoint, and remove the engine from the models that Accelerate loads by itself."""
        for model in [model for model in models if isinstance(model, Engine)]:
            model.load_checkpoint(input_dir, _TAG, **self._load_arguments)
            models.remove(model)

    @contextmanager
    def _without_optimizer(self) -> Iterator[None]:
        """Within the context, hide the optimizer from Accelerate: its states are in the engine's checkpoint."""
        optimizers: list[Any] = self._optimizers
        self._optimizers: list[Any] = []
        try:
            yield
        finally:
            self._optimizers = optimizers

    # The end of training: the engine is closed

    def free_memory(self, *objects: Any) -> Any:
        """Close the engine and forget all prepared objects, so that another model can be prepared.

        All ranks must call this.
        """
        self._close_engine()
        return super().free_memory(*objects)

    def end_training(self) -> None:
        """Close the engine, end the trackers, and leave the process group. All ranks must call this."""
        self._close_engine()
        super().end_training()

    def _close_engine(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()


def _listed(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def _move_to_cpu(model: nn.Module) -> None:
    """Move a model to the CPU if the script has moved it to a device: the store takes its values from the CPU."""
    if any(tensor.device.type not in ("cpu", "meta") for tensor in model.parameters()):
        model.to("cpu")

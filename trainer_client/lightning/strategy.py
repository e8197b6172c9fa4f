"""`ParamserverStrategy`: Lightning's strategy for DDP, with an engine in the place of DistributedDataParallel.

Launchers, process groups, samplers, loops, schedules and callbacks are Lightning's own. This module owns the engine of
the one model that is trained. It must never compute anything, because the engine and Lightning do so.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from trainer_client import zero
from trainer_client.base import at_exit
from trainer_client.config.paramserver import configured_device_kind
from trainer_client.engine.engine import Engine
from trainer_client.errors import ConfigError
from trainer_client.initialization import initialize_with_rates_of_script
from trainer_client.lightning.devices import follow
from trainer_client.lightning.manifest import manifest_entries
from trainer_client.lightning.options import ConfigSource, check_precision, read_config, training_config
from trainer_client.lightning.precision import EnginePrecision

# The tag of the engine's checkpoint, which is the one that Lightning gives to a checkpoint of DeepSpeed.
_TAG = "checkpoint"
# The entries of an optimizer's parameter group that name the group's parameters. All other entries are
# hyper-parameters.
_NO_SETTINGS = ("params", "param_names")


class ParamserverStrategy(DDPStrategy):
    """A strategy that trains a LightningModule over the store.

        Trainer(strategy=ParamserverStrategy(config={"zero_optimization": {"stage": 3}}), devices=2).fit(model, loader)

    One strategy fits one model, which has one optimizer and automatic optimization. After `fit` the engine stays, for
    `validate`, `test` and `predict`, until `close` is called or the process ends. Each fit is a new job in the store,
    unless the config has `paramserver.job` or `paramserver.resume`.

    Args:
        config: a config in DeepSpeed's format, as a dict or the path of a JSON file. ZeRO's stage is 2 if the config
            names none. The Trainer decides the number of accumulated micro-batches, and the precision unless the config
            has a section for it.
        parallel_devices, cluster_environment, accelerator, process_group_backend, timeout: as for DDPStrategy.

    Raises:
        ConfigError: the config cannot be read.
    """

    strategy_name = "paramserver"

    def __init__(
        self,
        config: ConfigSource = None,
        *,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        self._config = read_config(config)
        self._engine: Engine | None = None
        # Whether the present call of the Trainer (such as `fit` or `test`) uses a plain model without an engine, which
        # DDPStrategy has set up.
        self._is_plain = False
        # Whether the engine is within a fit, and whether the present call of the Trainer has failed.
        self._is_fitting = False
        self._has_failed = False
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )

    @property
    def engine(self) -> Engine:
        """The engine of the trained model. The property raises RuntimeError before `fit` has made the engine."""
        if self._engine is None:
            raise RuntimeError("ParamserverStrategy has no engine before trainer.fit() has set the model up")
        return self._engine

    @property
    def _engine_in_use(self) -> Engine | None:
        """The engine, if the Trainer's present or last call uses the engine's model; None if it uses a plain model.

        After a fit, `validate`, `test` and `predict` may be given another model.
        """
        return self._engine if self._engine is not None and self.model is self._engine else None

    @property
    def precision_plugin(self) -> Precision:
        """The engine's precision plug-in if the Trainer's call uses the engine; else the Trainer's own plug-in."""
        if (engine := self._engine_in_use) is not None:
            return EnginePrecision(engine, self._trainers_precision.precision)
        return self._trainers_precision

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._trainers_precision = plugin if plugin is not None else Precision()
        check_precision(self._trainers_precision.precision)

    # The set-up of the process group, the engine and the model

    def setup_environment(self) -> None:
        """Join the process group, and set LOCAL_RANK, from which the engine takes this process's local rank."""
        super().setup_environment()
        os.environ["LOCAL_RANK"] = str(self.local_rank)

    def setup(self, trainer: Trainer) -> None:
        """Make an engine of the model for `fit`, or use the engine of an earlier fit. All ranks must call this.

        Without an engine, `validate`, `test` and `predict` compute with the plain model.

        Raises:
            ConfigError: the model or an argument of the Trainer cannot be honoured.
        """
        if trainer.state.fn == TrainerFn.FITTING:
            assert self.accelerator is not None
            self.accelerator.setup(trainer)
            self._check(trainer)
            self._is_fitting = True
            self.setup_optimizers(trainer)
            follow(self.lightning_module, self.root_device)
        elif self._engine is not None and self._engine.module is self.lightning_module:
            self.model = self._engine
        else:
            self._is_plain = True
            super().setup(trainer)

    def _check(self, trainer: Trainer) -> None:
        if self._engine is not None:
            raise ConfigError(
                "ParamserverStrategy has fitted a model before: make a new strategy and Trainer, and pass the "
                "ckpt_path to go on"
            )
        assert self.lightning_module is not None
        if not self.lightning_module.automatic_optimization:
            raise ConfigError(
                "automatic_optimization = False is not honoured by ParamserverStrategy: return the loss from "
                "training_step, or write the loop with trainer_client.initialize()"
            )
        if self._layer_sync is not None:
            raise ConfigError(
                "Trainer(sync_batchnorm=True) is not honoured by ParamserverStrategy: convert the model with "
                "torch.nn.SyncBatchNorm.convert_sync_batchnorm() before fit()"
            )
        if type(self.checkpoint_io) is not TorchCheckpointIO:
            raise ConfigError(
                f"the plug-in {type(self.checkpoint_io).__name__} is not honoured by ParamserverStrategy: the store "
                "keeps the steps of checkpoints; leave it out"
            )
        for callback in trainer.callbacks:
            if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
                raise ConfigError(
                    f"the callback {type(callback).__name__} is not honoured by ParamserverStrategy, because it "
                    "changes weights and checkpoints that the store has: leave it out, and average "
                    "strategy.engine.full_state_dict() in a callback of your own"
                )
        ours = configured_device_kind(self._config)
        if self.root_device.type != ours:
            raise ConfigError(
                f"the Trainer uses {self.root_device.type}, and the engine {ours}: leave accelerator= out, or "
                'set it to "cpu" and write "device": "cpu" into the section paramserver of the config'
            )

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Make the engine of the model and the optimizer that it configures. All ranks must call this."""
        super().setup_optimizers(trainer)
        optimizer = self._own_optimizer()
        instance = trainer.fit_loop._data_source.instance
        engine, store_optimizer, _, _ = initialize_with_rates_of_script(
            model=self.lightning_module,
            optimizer=optimizer,
            config=training_config(
                self._config,
                precision=self._trainers_precision.precision,
                accumulation=trainer.accumulate_grad_batches,
                world_size=self.world_size,
                batch_size=instance.batch_size if isinstance(instance, DataLoader) else None,
                job=self.broadcast(f"lightning-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"),
            ),
            dist_init_required=False,
        )
        self._engine = self.model = engine
        self.optimizers = [store_optimizer]

    def _own_optimizer(self) -> Optimizer | None:
        """Return the optimizer that the module has configured; None if the config's optimizer is used.

        Raises:
            ConfigError: the module has configured several optimizers, or neither the module nor the config has one, or
                both have.
        """
        given = [one for one in self.optimizers if not isinstance(one, _MockOptimizer)]
        if len(given) > 1:
            raise ConfigError(
                f"configure_optimizers() returned {len(given)} optimizers: make one, with a parameter group for each "
                "set of hyper-parameters"
            )
        for section, present in (("optimizer", given), ("scheduler", self.lr_scheduler_configs)):
            if present and section in self._config:
                raise ConfigError(
                    f"the config has the section {section!r}, and configure_optimizers() returned one, too: remove "
                    "one of them"
                )
        if not given and "optimizer" not in self._config:
            raise ConfigError("configure_optimizers() returned no optimizer, and the config has none: return one")
        return given[0] if given else None

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Build modules on the default device, because the engine takes the model's values from host memory.

        `empty_init` has no effect. A model that is to be built without memory has to be built in `configure_model`.
        """
        with self._trainers_precision.tensor_init_context():
            yield

    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        """For a fit at stage 3, build the modules of `configure_model` without memory."""
        assert self.lightning_module is not None
        is_fit = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        with zero.Init(enabled=is_fit and self._config["zero_optimization"]["stage"] == 3):
            yield

    # Training and evaluation

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Within the context, have backward passes add gradients up without communication.

        The last backward pass of the step, outside of the context, communicates.
        """
        with self.engine.no_sync():
            yield

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `validation_step` without gradients; see `_without_gradients`."""
        with _without_gradients():
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `test_step` without gradients; see `_without_gradients`."""
        with _without_gradients():
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `predict_step` without gradients; see `_without_gradients`."""
        with _without_gradients():
            return super().predict_step(*args, **kwargs)

    # The saving and loading of checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: a checkpoint is loaded after `setup`, because the engine loads it, and `setup` makes the engine."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return {} for the engine's model, because the store keeps its weights; else the plain state dict."""
        return {} if self._engine_in_use is not None else super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return {}, because the store keeps the optimizer states."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Keep the present step in the store, and write a manifest of the step into the directory `filepath`.

        All ranks must call this.

        Raises:
            ConfigError: `storage_options` were given.
            CheckpointError, StoreError, OSError, RuntimeError: as `Engine.save_checkpoint`.
        """
        if storage_options is not None:
            raise ConfigError("save_checkpoint(storage_options=...) is not honoured: the store keeps the step")
        if (engine := self._engine_in_use) is None:
            super().save_checkpoint(checkpoint, filepath)
            return
        entries = manifest_entries(checkpoint)
        engine.save_checkpoint(str(self.broadcast(filepath)), _TAG, client_state=entries, save_latest=False)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a directory that `save_checkpoint` has written, or read a file of Lightning. All ranks must call this.

        A file of Lightning is loaded in parts after this call: Lightning loads the counts and schedules,
        `load_model_state_dict` the weights, and `load_optimizer_state_dict` the hyper-parameters. The optimizer states
        in the file are not loaded.

        Raises:
            ConfigError: the path is a directory, and there is no engine to load it.
            CheckpointError: the directory holds no checkpoint, or no store keeps its step any more.
        """
        path = self.broadcast(checkpoint_path)
        # Lightning requires the entry "optimizer_states" in a loaded checkpoint. The engine's checkpoint has no such
        # entry, because the engine loads the optimizer states itself. So an empty list is added.
        states: dict[str, Any] = {"optimizer_states": []}
        # Rank 0 decides for all ranks whether the path is a directory, because only rank 0 writes and reads manifests,
        # and other nodes may not have the directory.
        if not self.broadcast(Path(path).is_dir()):
            states.update(super().load_checkpoint(path, weights_only))
            return states
        assert self.lightning_module is not None
        if (engine := self._engine_in_use) is None:
            raise ConfigError(
                f"{path} is a checkpoint of ParamserverStrategy, and only a strategy that has fitted the model loads "
                "it: export the step with `paramserver export`, or call fit(ckpt_path=...) first"
            )
        is_fit = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        _, state = engine.load_checkpoint(
            path,
            _TAG,
            load_module_strict=self.lightning_module.strict_loading,
            load_lr_scheduler_states=is_fit,
            load_module_only=not is_fit,
        )
        assert state is not None, "a checkpoint with a tag has a state"
        return states | state

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights in a file of Lightning into the model of the Trainer's call. All ranks must call this.

        For a directory this does nothing, because `load_checkpoint` has loaded the weights.
        """
        if "state_dict" not in checkpoint:
            return
        if (engine := self._engine_in_use) is None:
            super().load_model_state_dict(checkpoint, strict)
        else:
            engine.load_state_dict(checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Set the parameter groups' hyper-parameters to those in a file of Lightning. All ranks must call this.

        The learning rate is among them, because some schedules multiply the present learning rate. The optimizer states
        are not loaded and begin at zero. Flags, such as `nesterov`, keep the values of the script.

        Raises:
            ConfigError: the optimizer in the file has another number of groups.
        """
        # An empty optimizer state in the file is passed over. A file has one if it was saved after a fit, for another
        # module than the fitted one.
        for optimizer, state in zip(self.optimizers, filter(None, checkpoint["optimizer_states"]), strict=False):
            groups, stored = optimizer.param_groups, state["param_groups"]
            if len(groups) != len(stored):
                raise ConfigError(
                    f"the optimizer has {len(groups)} parameter groups, that in the file of ckpt_path {len(stored)}: "
                    "make the same groups, or load the weights alone, with module.load_state_dict() before fit()"
                )
            for group, settings in zip(groups, stored, strict=True):
                group.update({key: settings[key] for key in _hyper_parameters(group) & _hyper_parameters(settings)})

    # The end of a call of the Trainer, after an error or without one

    def on_exception(self, exception: BaseException) -> None:
        """Close the engine after an error, without waiting for other ranks. The job stays at its last committed step.

        The engine is closed if the error comes within a fit, or if there are several ranks, because the other ranks
        wait for this rank. If there is only one rank and the error comes after a fit, the engine stays open, because
        all steps are committed.
        """
        self._has_failed = True
        at_exit.unregister(self)
        if self._engine is not None and (self._is_fitting or self._engine.world_size > 1):
            self._engine.__exit__(type(exception), exception, exception.__traceback__)

    def teardown(self) -> None:
        """Commit the last step of a fit. All ranks must call this.

        The engine stays open for `validate`, `test` and `predict`.
        """
        has_failed, self._has_failed, self._is_fitting = self._has_failed, False, False
        if self._is_plain:
            self._is_plain = False
            super().teardown()
            return
        if self._engine is not None and not self._engine.is_closed and not has_failed:
            self._engine.commit_last_step()
            at_exit.register(self, ParamserverStrategy.close)
        assert self.accelerator is not None
        self.accelerator.teardown()

    def close(self) -> None:
        """Close the engine, as `Engine.close` does. A repeated call has no effect. All ranks must call this.

        The model has no values afterwards.
        """
        at_exit.unregister(self)
        if self._engine is not None:
            self._engine.close()


def _hyper_parameters(group: Mapping[str, Any]) -> set[str]:
    """Return the names of a parameter group's hyper-parameters, without its flags."""
    return {key for key, value in group.items() if key not in _NO_SETTINGS and not isinstance(value, bool | None)}


@contextmanager
def _without_gradients() -> Generator[None, None, None]:
    """Within the context, compute without gradients, but not in inference mode.

    The engine could not use tensors that are made in inference mode for training later.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield


StrategyRegistry.register("paramserver", ParamserverStrategy, description="Training over the stores of paramserver")

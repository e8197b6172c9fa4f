"""What `ParamserverStrategy` does besides training: loaded files, calls after a fit, errors and refusals."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.integration.support.equality import are_equal
from trainer_client.errors import ConfigError

pytest.importorskip("lightning", reason="lightning is not installed: `make peers` installs it")

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging

from trainer_client.lightning.strategy import ParamserverStrategy

WIDTH = 4
BATCHES = 4
Make = Callable[..., tuple[Trainer, Any]]

# Lightning calls what the newest torch deprecates, and advises to use more workers.
pytestmark = pytest.mark.filterwarnings("ignore:::lightning", "ignore:.*LeafSpec.*:FutureWarning")


@pytest.fixture(autouse=True)
def _own_environment() -> Iterator[None]:
    """Lightning says in the environment which rank a process is, and leaves its process group at the process's end."""
    with patch.dict(os.environ):
        yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture
def make(model_store: str, tmp_path: Path) -> Iterator[Make]:
    """A function that makes a Trainer and its strategy, which is closed at the end of the test.

    The function's arguments are those of the Trainer, and `section` with further keys of `paramserver`. With `plain`
    the strategy is Lightning's own.
    """
    strategies = []

    def make(*, plain: bool = False, section: Any = None, **arguments: Any) -> tuple[Trainer, Any]:
        strategy: Any = "ddp"
        if not plain:
            keys = {"address": model_store, **(section or {})}
            strategy = ParamserverStrategy(config={"paramserver": keys, "gradient_clipping": 0})
            strategies.append(strategy)
        trainer = Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=1,
            logger=False,
            default_root_dir=tmp_path,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **{"max_epochs": 1, **arguments},
        )
        return trainer, strategy

    yield make
    for strategy in strategies:
        strategy.close()


class Module(LightningModule):
    """One layer, and a schedule that halves the learning rate at each step. It notes losses and rates.

    Args:
        left_out: the batches for which it returns no loss.
    """

    def __init__(self, left_out: tuple[int, ...] = ()) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.left_out = left_out
        self.layer = nn.Linear(WIDTH, 1)
        self.losses: list[float] = []
        self.rates: list[float] = []

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor | None:
        loss: torch.Tensor = self.layer(batch).square().mean()
        self.losses.append(loss.item())
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return None if index in self.left_out else loss

    def test_step(self, batch: torch.Tensor, _: int) -> None:
        self.layer(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, fused=True)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def loader() -> DataLoader[Any]:
    samples: Any = torch.randn(2 * BATCHES, WIDTH, generator=torch.Generator().manual_seed(1))
    return DataLoader(samples, batch_size=2)


def plain_file(make: Make, path: Path) -> dict[str, torch.Tensor]:
    """Write a file of plain Lightning after one epoch, and return the weights in it."""
    trainer, _ = make(plain=True)
    trainer.fit(Module(), loader())
    trainer.save_checkpoint(path)
    weights: dict[str, torch.Tensor] = torch.load(path)["state_dict"]
    return weights


def test_files_of_another_model_have_nothing_to_do_with_the_trained_one(make: Make, tmp_path: Path) -> None:
    weights = plain_file(make, tmp_path / "plain.ckpt")
    trainer, strategy = make(max_epochs=2)
    trainer.fit(Module(), loader())
    trained = strategy.engine.full_state_dict()
    other = Module()

    trainer.test(other, loader(), ckpt_path=str(tmp_path / "plain.ckpt"), verbose=False)
    trainer.save_checkpoint(tmp_path / "other.ckpt")

    assert are_equal(strategy.engine.full_state_dict(), trained) and not are_equal(trained, weights)
    assert are_equal(dict(other.state_dict()), weights)
    assert are_equal(torch.load(tmp_path / "other.ckpt")["state_dict"], weights)


def test_a_file_of_lightning_has_the_rate_from_which_its_schedule_goes_on(make: Make, tmp_path: Path) -> None:
    plain_file(make, tmp_path / "plain.ckpt")
    expected, found = Module(), Module()

    for module in (expected, found):
        trainer, _ = make(plain=module is expected, max_epochs=2)
        trainer.fit(module, loader(), ckpt_path=str(tmp_path / "plain.ckpt"))

    assert found.rates == expected.rates == [0.1 / 2**step for step in range(BATCHES, 2 * BATCHES)]
    assert found.losses == expected.losses


def test_a_file_with_other_parameter_groups_is_refused(make: Make, tmp_path: Path) -> None:
    plain_file(make, tmp_path / "plain.ckpt")
    module = Module()
    groups = [{"params": [parameter]} for parameter in module.parameters()]
    module.configure_optimizers = lambda: torch.optim.SGD(groups, lr=0.1)  # type: ignore[method-assign]
    trainer, _ = make(max_epochs=2)

    with pytest.raises(ConfigError, match="has 2 parameter groups, that in the file of ckpt_path 1"):
        trainer.fit(module, loader(), ckpt_path=str(tmp_path / "plain.ckpt"))


def test_a_named_job_goes_on_with_its_weights_and_a_new_schedule_at_its_first_rate(make: Make, job: str) -> None:
    modules = [Module(), Module()]
    for module in modules:
        trainer, strategy = make(section={"job": job})
        trainer.fit(module, loader())
        strategy.close()

    first, again = modules
    assert strategy.engine.resumed_step == BATCHES and again.losses[0] != first.losses[0]
    assert again.rates == first.rates == [0.1 / 2**step for step in range(BATCHES)]


@pytest.mark.parametrize("callback", [EMAWeightAveraging(), StochasticWeightAveraging(swa_lrs=0.1)])
def test_a_callback_that_averages_weights_is_refused(make: Make, callback: Any) -> None:
    trainer, _ = make(callbacks=[callback])

    with pytest.raises(ConfigError, match=f"{type(callback).__name__} is not honoured"):
        trainer.fit(Module(), loader())


def test_an_error_after_a_fit_takes_neither_the_engine_nor_its_last_step(make: Make, job: str) -> None:
    # With this durability only the third step is committed within the fit.
    section = {"job": job, "durability": "snapshot:3"}
    trainer, strategy = make(section=section)
    module = Module()
    trainer.fit(module, loader())
    module.test_step = lambda *_: 1 / 0  # type: ignore[assignment, method-assign]

    with pytest.raises(ZeroDivisionError):
        trainer.test(module, loader(), verbose=False)
    with pytest.raises(ConfigError, match="has fitted a model before"):
        trainer.fit(Module(), loader())

    expected = strategy.engine.full_state_dict()
    strategy.engine.close_without_commit()
    again, strategy = make(section=section, max_epochs=0)
    again.fit(Module(), loader())
    assert strategy.engine.resumed_step == BATCHES
    assert are_equal(strategy.engine.full_state_dict(), expected)


@pytest.mark.parametrize("left_out", [(0,), (1,), (2, 3)])
def test_a_batch_without_a_loss_has_no_part_in_its_step(make: Make, left_out: tuple[int, ...]) -> None:
    expected, found = Module(left_out), Module(left_out)
    for module in (expected, found):
        trainer, _ = make(plain=module is expected, max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.1)
        trainer.fit(module, loader())

    assert found.losses == expected.losses


class WithHyperParameters(Module):
    def __init__(self, width: int, where: Path) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_a_checkpoint_is_without_hyper_parameters_that_torch_would_refuse(make: Make, tmp_path: Path) -> None:
    """A `Path` is such a value, and no other is."""
    trainer, strategy = make()
    trainer.fit(WithHyperParameters(WIDTH, tmp_path), loader())

    with pytest.warns(UserWarning, match=r"is without hyper_parameters\.where, because"):
        trainer.save_checkpoint(tmp_path / "saved")

    _, state = strategy.engine.load_checkpoint(tmp_path / "saved", "checkpoint")
    assert state["hyper_parameters"] == {"width": WIDTH} and state["loops"]
    again, _ = make(max_epochs=2)
    module = WithHyperParameters(WIDTH, tmp_path)
    again.fit(module, loader(), ckpt_path=str(tmp_path / "saved"))
    assert len(module.losses) == BATCHES

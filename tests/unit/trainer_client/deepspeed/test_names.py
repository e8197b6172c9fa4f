"""The page for users of DeepSpeed lists every name that there is, and refused names are refused."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from packaging.version import Version

import trainer_client
from tests.unit.trainer_client.pages import words_by_name
from trainer_client import ops, zero
from trainer_client.deepspeed.names import TABLE
from trainer_client.errors import ConfigError, NotBuiltError
from trainer_client.ops import op_builder
from trainer_client.runtime.sequence_parallel import ulysses_sp
from trainer_client.runtime.zero import partition_parameters

PAGE = (Path(__file__).parents[4] / "docs/deepspeed.md").read_text(encoding="utf-8")
LISTED = words_by_name(PAGE)
WORDS = ("honoured", "without effect", "refused")
# The modules whose names are DeepSpeed's. The page names the constants of that of the schedules together.
FACES = [*(set(TABLE) - {"runtime.lr_schedules"}), "accelerator", "comm", "inference", "interface_version", "zero"]


def find(path: str) -> Any:
    """Return what `from deepspeed.X import Y` finds, with this package's name in place of DeepSpeed's."""
    module, _, name = f"trainer_client.{path}".rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        # An attribute of the package is a module, as `deepspeed.checkpointing` is.
        parent, _, attribute = module.rpartition(".")
        return getattr(getattr(importlib.import_module(parent), attribute), name)


def test_the_page_has_names_of_all_three_kinds() -> None:
    assert set(LISTED.values()) == set(WORDS)
    assert len(LISTED) > 150


@pytest.mark.parametrize("name", [name for name in LISTED if "(" not in name])
def test_every_name_of_the_page_can_be_imported(name: str) -> None:
    assert find(name) is not None


@pytest.mark.parametrize("name", [n for n, word in LISTED.items() if word == "refused" and "(" not in n])
def test_a_refused_name_says_what_to_write_instead(name: str) -> None:
    refused = find(name)
    parameters = inspect.signature(refused).parameters.values()
    required = [p for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]

    with pytest.raises((NotBuiltError, ConfigError), match=f"{refused.__name__}.*: .{{10}}"):
        refused(*[0 for _ in required])


@pytest.mark.parametrize("face", sorted(FACES))
def test_every_name_of_deepspeeds_modules_is_on_the_page(face: str) -> None:
    module = importlib.import_module(f"trainer_client.{face}")
    values = {id(find(name)) for name in LISTED if "(" not in name}
    missing = [n for n in module.__all__ if f"{face}.{n}" not in LISTED and id(getattr(module, n)) not in values]

    assert [name for name in missing if not isinstance(getattr(module, name), ModuleType)] == []


def test_every_argument_of_init_is_on_the_page() -> None:
    listed_arguments = {
        re.sub(r"zero\.Init\((\w+)=\)", r"\1", name) for name in LISTED if name.startswith("zero.Init(")
    }

    # `seed` is this library's own.
    assert listed_arguments == set(inspect.signature(zero.Init).parameters) - {"seed"}


def test_a_users_class_of_a_name_that_is_not_built_is_refused_as_well() -> None:
    class Mine(trainer_client.PipelineModule):
        def __init__(self, layers: int) -> None:
            self.layers = layers

    assert not isinstance(zero, trainer_client.PipelineModule)
    with pytest.raises(NotBuiltError, match="PipelineModule of DeepSpeed is not built here: pipeline parallelism"):
        Mine(layers=3)


def test_functions_of_a_class_that_is_not_built_are_refused_as_well() -> None:
    """Accelerate calls a function of the class and makes no object, and looks at the names of its arguments before."""
    register = ulysses_sp.UlyssesSPAttentionHF.register_with_transformers

    assert "seq_length_is_variable" in inspect.signature(register).parameters
    with pytest.raises(NotBuiltError, match="register_with_transformers of DeepSpeed is not built here: sequence"):
        register(None, "sdpa", 2)
    for function in (ulysses_sp.TiledMLP.apply, ulysses_sp.TiledFusedLogitsLoss.apply):
        with pytest.raises(NotBuiltError, match=r"Tiled.*apply of DeepSpeed is not built here: .{10}"):
            function(1)


def test_operators_are_usable_whose_feature_is_here_and_none_is_loaded() -> None:
    usable = ops.__compatible_ops__

    assert usable[ops.aio.AsyncIOBuilder.NAME]
    assert not usable["sparse_attn"]
    for builder in op_builder.OpBuilder.__subclasses__():
        assert builder().is_compatible() == usable[builder().name]
        with pytest.raises(NotBuiltError, match=f"{builder.__name__}.load of DeepSpeed is not built here: .{{10}}"):
            builder().load()


def test_constructors_can_be_wrapped_as_deepspeeds_are() -> None:
    wrap = partition_parameters.zero_wrapper_for_fp_tensor_constructor

    made = wrap(partition_parameters._orig_torch_arange, torch.bfloat16, torch.device("meta"))

    assert (made(2.0).dtype, made(2.0).device.type) == (torch.bfloat16, "meta")
    assert (made(2).dtype, made(2, device="cpu").device.type) == (torch.int64, "cpu")
    assert wrap(torch.ones, None)(2).dtype == torch.float32


def test_the_version_is_that_of_the_deepspeed_whose_names_these_are() -> None:
    version = Version(trainer_client.__version__)

    assert version >= Version("0.19.6")
    assert version.local == "paramserver"
    assert version.release == (
        trainer_client.__version_major__,
        trainer_client.__version_minor__,
        trainer_client.__version_patch__,
    )

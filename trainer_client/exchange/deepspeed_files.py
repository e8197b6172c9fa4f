"""The files of a checkpoint of DeepSpeed: the search for them, and their opening without DeepSpeed.

This module must never load a class of DeepSpeed: stand-ins take the place of the few classes that DeepSpeed's files
name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainer_client.base.foreign import torch_files
from trainer_client.base.foreign.files import read_regular
from trainer_client.errors import ImportCheckpointError
from trainer_client.exchange.source import check_foreign, name_within

LATEST = "latest"
_MOST_TAG_BYTES = 4096
_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_EXPERT_FILE = re.compile(r"(?:layer_\d+_)?expert_.*|layer_\d+.*|expp_rank_.*")


class _Record:
    """The stand-in for a class of DeepSpeed that only holds values: its attributes are those of the pickled object."""

    def __init__(self, *values: Any) -> None:
        self.values = values


class Scaler(_Record):
    """The stand-in for DeepSpeed's loss scalers, which keeps the attributes of the pickled scaler."""


def _stage(value: int) -> int:
    """Return the number of a ZeRO stage. The pickle calls this function where it names DeepSpeed's enumeration."""
    return int(value)


def _stage_by_name(kind: object, name: str) -> int:
    """Return the number of a ZeRO stage by its name, as some versions of Python pickle an enumeration.

    This function stands in for `getattr` in the pickle, and refuses all other attributes and objects.
    """
    if kind is not _stage or name not in _STAGES:
        raise ValueError(f"the attribute {name!r} of {kind!r} is not loaded")
    return _STAGES[name]


_STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3, "max_stage": 3}
_STAND_INS: Mapping[str, Callable[..., Any]] = {
    "deepspeed.runtime.zero.config.ZeroStageEnum": _stage,
    "builtins.getattr": _stage_by_name,
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": Scaler,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": Scaler,
    "deepspeed.utils.tensor_fragment.fragment_address": _Record,
}


def is_deepspeed(path: Path) -> bool:
    """Return whether a directory is a checkpoint of DeepSpeed, or has the directories of several checkpoints."""
    return path.is_dir() and ((path / LATEST).is_file() or any(map(_MODEL_FILE.fullmatch, _names(path))))


def find_directory(path: Path, tag: str | None) -> Path:
    """Return the directory of a tag, by default of the newest tag. Raise ImportCheckpointError if there is none."""
    if tag is None and (path / LATEST).is_file():
        tag = read_regular(path / LATEST, _MOST_TAG_BYTES).decode(errors="replace").strip()
        tag = name_within(tag, path / LATEST)
    directory = path if tag is None else path / name_within(tag, "the tag")
    if not directory.is_dir():
        there = ", ".join(sorted(other.name for other in path.iterdir() if other.is_dir())) or "none"
        raise ImportCheckpointError(f"{path} has no checkpoint of the tag {tag!r}; its directories: {there}")
    return directory


def _names(directory: Path) -> list[str]:
    return sorted(file.name for file in directory.iterdir())


def find_files(directory: Path) -> tuple[list[Path], list[Path]]:
    """Return the model files and the optimizer files, each in the order of the ranks.

    It can raise ImportCheckpointError.
    """
    check_foreign(directory)
    found: tuple[dict[int, Path], dict[int, Path]] = ({}, {})
    for name in _names(directory):
        if _EXPERT_FILE.fullmatch(name):
            raise ImportCheckpointError(
                f"{directory} has {name}: checkpoints with pipeline stages or files of experts are not read"
            )
        for pattern, files in zip((_MODEL_FILE, _OPTIMIZER_FILE), found, strict=True):
            if (match := pattern.fullmatch(name)) is None:
                continue
            if int(match[2]) != 0:
                raise ImportCheckpointError(
                    f"{directory} has {name}: checkpoints of models split over ranks (tensor parallelism) are not read"
                )
            files[int(match[1] or 0)] = directory / name
    for what, files in zip(("model", "optimizer"), found, strict=True):
        if missing := set(range(max(files, default=-1) + 1)) - files.keys():
            raise ImportCheckpointError(f"{directory} lacks the {what} file of rank {min(missing)}")
    models, optimizers = ([files[rank] for rank in sorted(files)] for files in found)
    if not models:
        hint = "a universal checkpoint, which is not read" if (directory / "zero").is_dir() else "no ZeRO checkpoint"
        raise ImportCheckpointError(f"{directory} has no file *_model_states.pt: it is {hint}")
    return models, optimizers


def load_dict(path: Path) -> dict[str, Any]:
    """Return the dict that a checkpoint's file has. Raise ImportCheckpointError if it has another or unsafe value."""
    content = torch_files.load(path, _STAND_INS)
    if not isinstance(content, dict):
        raise ImportCheckpointError(f"{path} has a {type(content).__name__}, where a dict is expected")
    return content

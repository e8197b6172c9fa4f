"""Checkpoints in the layouts of DeepSpeed's ZeRO, written from the tensors of a plain PyTorch run.

The layouts are those that DeepSpeed 0.14 to 0.19 write (`runtime/engine.py`, `runtime/zero/stage_1_and_2.py`,
`runtime/zero/stage3.py`, `runtime/bf16_optimizer.py`), with the classes that its files name.
"""

from __future__ import annotations

import enum
import sys
import types
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

Layout = Literal["stage 1", "stage 2", "stage 3", "bf16 optimizer"]
STATES = ("exp_avg", "exp_avg_sq")
# The number of parameters in each sub-group of stage 3.
_SUB_GROUP = 5


class ZeroStageEnum(int, enum.Enum):
    optimizer_states = 1
    gradients = 2
    weights = 3


class DynamicLossScaler:
    def __init__(self) -> None:
        self.cur_scale = 512.0
        self.cur_iter = 9
        self.last_overflow_iter = 4
        self.cur_hysteresis = 2
        self.dynamic = True


class FragmentAddress:
    def __init__(self, numel: int, start: int) -> None:
        self.numel, self.start = numel, start


_CLASSES = {
    ZeroStageEnum: "deepspeed.runtime.zero.config",
    DynamicLossScaler: "deepspeed.runtime.fp16.loss_scaler",
    FragmentAddress: "deepspeed.utils.tensor_fragment",
}
FragmentAddress.__name__ = FragmentAddress.__qualname__ = "fragment_address"


@contextmanager
def _deepspeed() -> Iterator[None]:
    """Give the classes the modules that they have in DeepSpeed, so that they are pickled under these names."""
    modules = set()
    for kind, name in _CLASSES.items():
        parts = name.split(".")
        modules |= {".".join(parts[: end + 1]) for end in range(len(parts))}
        kind.__module__ = name
    added = {name: types.ModuleType(name) for name in modules if name not in sys.modules}
    sys.modules.update(added)
    for kind, name in _CLASSES.items():
        setattr(sys.modules[name], kind.__name__, kind)
    try:
        yield
    finally:
        for name in added:
            del sys.modules[name]


def write_checkpoint(
    directory: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    layout: Layout,
    ranks: int,
    step: int,
    samples: int,
    scheduler: Mapping[str, Any] | None = None,
    client_state: Mapping[str, Any] | None = None,
    kinds: Sequence[str] = STATES,
) -> Path:
    """Write the checkpoint `directory`/global_stepN of a run of `ranks` ranks, and return its directory.

    Args:
        model: a model in fp32, whose weights are the fp32 masters.
        optimizer: an AdamW with its states.
        kinds: the kinds of states that are written.
    """
    target = directory / f"global_step{step}"
    target.mkdir(parents=True)
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = [[p for p in group["params"] if p.requires_grad] for group in optimizer.param_groups]
    owners = list(range(len(groups)))
    if layout == "stage 3":
        cut = [
            (owner, group[i : i + _SUB_GROUP])
            for owner, group in enumerate(groups)
            for i in range(0, len(group), _SUB_GROUP)
        ]
        owners, groups = [owner for owner, _ in cut], [group for _, group in cut]
    flat = {
        kind: [_partitions(_values(group, optimizer, kind), ranks, whole=layout == "stage 3") for group in groups]
        for kind in ("master", *kinds)
    }
    numels = [sum(p.numel() for p in group) for group in groups]
    settings = [
        {key: value for key, value in group.items() if key != "params"}
        | {"params": [number for number, other in enumerate(owners) if other == owner]}
        for owner, group in enumerate(optimizer.param_groups)
    ]
    with _deepspeed():
        for rank in range(ranks):
            states = {
                number: {"step": torch.tensor(float(step))} | {kind: flat[kind][number][rank] for kind in kinds}
                for number in range(len(groups))
            }
            masters = [partitions[rank] for partitions in flat["master"]]
            if layout in ("stage 1", "stage 2"):
                # These stages leave out the padding of the weights, and not that of the states.
                sizes = [len(partitions[0]) for partitions in flat["master"]]
                masters = [
                    part[: max(0, min(size, numel - rank * size))]
                    for part, size, numel in zip(masters, sizes, numels, strict=True)
                ]
            zero = _zero_state(layout, ranks, {"state": states, "param_groups": settings}, masters)
            prefix = "bf16_" if layout == "bf16 optimizer" else ""
            torch.save(
                {"optimizer_state_dict": zero, "ds_config": {}, "ds_version": "0.16.0"},
                target / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
            )
            name = (
                f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
                if layout == "stage 3"
                else "mp_rank_00_model_states.pt"
            )
            if layout == "stage 3" or rank == 0:
                content = _model_state(model, names, groups, layout, ranks, rank)
                content |= {"global_steps": step, "global_samples": samples, "skipped_steps": 0}
                content |= {"lr_scheduler": scheduler, "dp_world_size": ranks, "ds_version": "0.16.0"}
                torch.save(content | dict(client_state or {}), target / name)
    (directory / "latest").write_text(target.name)
    return target


def _values(group: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer, kind: str) -> list[torch.Tensor]:
    return [(p.detach() if kind == "master" else optimizer.state[p][kind]).float().reshape(-1) for p in group]


def _partitions(values: Sequence[torch.Tensor], ranks: int, *, whole: bool) -> list[torch.Tensor]:
    """Return each rank's part of a flattened group.

    With `whole`, as in stage 3, each tensor is cut for itself.
    """
    if whole:
        parts = [_padded(value, -(-value.numel() // ranks) * ranks).view(ranks, -1) for value in values]
        return [torch.cat([part[rank] for part in parts]) for rank in range(ranks)]
    flat = torch.cat([*values])
    aligned = -(-flat.numel() // (2 * ranks)) * 2 * ranks
    return [part.clone() for part in _padded(flat, aligned).view(ranks, -1)]


def _padded(flat: torch.Tensor, numel: int) -> torch.Tensor:
    return torch.nn.functional.pad(flat, (0, numel - flat.numel()))


def _zero_state(layout: Layout, ranks: int, base: dict[str, Any], masters: list[torch.Tensor]) -> dict[str, Any]:
    if layout == "stage 3":
        return {
            "zero_stage": ZeroStageEnum.weights,
            "loss_scaler": DynamicLossScaler(),
            "dynamic_loss_scale": True,
            "overflow": False,
            "partition_count": ranks,
            "optimizer_state_dict": base,
            "fp32_flat_groups": masters,
        }
    state = {
        "clip_grad": 0.0,
        "base_optimizer_state": base,
        "single_partition_of_fp32_groups": masters,
        "group_paddings": [0] * len(masters),
        "partition_count": [ranks] * len(masters),
        "param_slice_mappings": [OrderedDict(weight=FragmentAddress(4, 0))],
        "ds_version": "0.16.0",
    }
    if layout != "bf16 optimizer":
        stage = ZeroStageEnum.optimizer_states if layout == "stage 1" else ZeroStageEnum.gradients
        state |= {"zero_stage": stage, "loss_scaler": DynamicLossScaler(), "overflow": False}
    return state


def _model_state(
    model: nn.Module,
    names: Mapping[nn.Parameter, str],
    groups: Sequence[Sequence[nn.Parameter]],
    layout: Layout,
    ranks: int,
    rank: int,
) -> dict[str, Any]:
    frozen = OrderedDict((name, p) for p, name in names.items() if not p.requires_grad)
    module = model.state_dict(keep_vars=True)
    if layout == "stage 3":
        # The parameters are partitioned, and what is left of them in the state dict has no elements.
        plain = OrderedDict(
            (name, torch.empty(0) if isinstance(value, nn.Parameter) else value.clone())
            for name, value in module.items()
        )
        fragments = {
            name: _padded(p.detach().reshape(-1), -(-p.numel() // ranks) * ranks).view(ranks, -1)[rank].clone()
            for name, p in frozen.items()
        }
    else:
        plain = OrderedDict((name, value.detach().clone()) for name, value in module.items())
        fragments = {name: p.detach().clone() for name, p in frozen.items()}
    first: dict[int, str] = {}
    shared = {
        name: first[id(value)]
        for name, value in module.items()
        if isinstance(value, nn.Parameter) and first.setdefault(id(value), name) != name
    }
    keeps_frozen = layout in ("stage 2", "stage 3")
    return {
        "module": plain,
        "buffer_names": [name for name, value in module.items() if not isinstance(value, nn.Parameter)],
        "optimizer": None,
        "param_shapes": [OrderedDict((names[p], p.shape) for p in group) for group in groups],
        "frozen_param_shapes": OrderedDict((name, p.shape) for name, p in frozen.items()) if keeps_frozen else None,
        "frozen_param_fragments": OrderedDict(fragments) if keeps_frozen else None,
        "shared_params": shared,
        "ds_config": {"train_batch_size": 4},
    }

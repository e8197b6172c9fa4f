"""The values of keys that are "auto", which Hugging Face's tools replace before DeepSpeed sees them.

This module owns the rules. A rule uses what the library knows: the other keys, and the dtypes of the model's
parameters. If that is not enough, the rule does what Accelerate does when it fills in a config by itself. Every other
key gets its default. This module must never replace "auto" in a key that has "auto" among its values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trainer_client.base.section import Section, is_honoured
from trainer_client.config.keys import section_at
from trainer_client.errors import ConfigError

AUTO = "auto"

# The keys for which "auto" is a value of this library, so that no rule replaces the "auto".
_WORDS = (
    "paramserver.device",
    "paramserver.resume",
    "paramserver.tiling",
    "paramserver.tiling.largest_tile",
    "paramserver.activations.recompute",
    "paramserver.gather",
    "paramserver.pin_arena",
    "paramserver.gradient_reduction",
)
# The section `scheduler` is left out here, because another rule resolves its keys: a schedule takes its rates from the
# optimizer.
_SCHEDULER = "scheduler"

_MICRO_BATCH = "train_micro_batch_size_per_gpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """The values from which a rule of this module finds the value of a key that is "auto".

    Attributes:
        raw: the config as it was written.
        dtypes: the dtypes of the model's floating-point parameters; empty: there is no model yet.
    """

    raw: Mapping[str, Any]
    dtypes: Collection[torch.dtype]

    def get(self, path: str) -> Any:
        """Return the value at a dotted name; None for a key that is not there, or is "auto"."""
        value: Any = self.raw
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return None if value == AUTO else value

    def computes_in(self, dtype: torch.dtype, other: str) -> bool:
        """Return whether the model's parameters are of `dtype`, and the config does not choose another format."""
        return set(self.dtypes) == {dtype} and not self.get(f"{other}.enabled")


# The rules for keys that are "auto": each returns the key's value. A rule that returns None removes the key, so that
# the key has its default, or its value follows from the other batch sizes.
_RULES: Mapping[str, Callable[[_Known], Any]] = {
    _MICRO_BATCH: lambda known: None if known.get("train_batch_size") else 1,
    "gradient_clipping": lambda known: 0.0 if known.get("paramserver.gradient_clipping_value") else 1.0,
    "zero_optimization.stage": lambda known: 2,
    "bf16.enabled": lambda known: known.computes_in(torch.bfloat16, "fp16"),
    "fp16.enabled": lambda known: known.computes_in(torch.float16, "bf16"),
}
# If one of these keys is "auto" and the config gives no micro-batch size, then the micro-batch size is treated as
# "auto", too.
_BATCH_KEYS = ("train_batch_size", _MICRO_BATCH)


def resolve_automatic(
    raw: Mapping[str, Any], model: type[Section], dtypes: Collection[torch.dtype]
) -> tuple[dict[str, Any], list[str]]:
    """Return the config without "auto", and the dotted names of the honoured keys that were "auto".

    Args:
        raw: the config, with the keys of today.
        model: the class of the config.
        dtypes: the dtypes of the model's floating-point parameters; empty if there is no model yet.

    Raises:
        ConfigError: a key has no value that the library could know; the message says what to write.
    """
    known = _Known(raw=raw, dtypes=dtypes)
    found = list(_find(raw))
    problems = [
        f'{".".join(path)} is "auto": write the value itself'
        for path in found
        if path[0] == "paramserver" or _is_required(model, raw, path)
    ]
    if problems:
        raise ConfigError("\n".join(problems))
    if any(raw.get(key) == AUTO for key in _BATCH_KEYS) and _MICRO_BATCH not in raw:
        raw = {**raw, _MICRO_BATCH: AUTO}
        found.append((_MICRO_BATCH,))
    resolved = dict(raw)
    for path in found:
        section = section_at(model, raw, path[:-1])
        if section is None or path[-1] not in section.model_fields:
            # The key is unknown, so its "auto" is not replaced: the error about the unknown key shows what the user has
            # written.
            continue
        rule = _RULES.get(".".join(path))
        _replace(resolved, path, None if rule is None else rule(known))
    return resolved, [".".join(path) for path in found if _is_honoured(model, raw, path)]


def _find(section: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the paths of the keys that are "auto", without the keys that have "auto" among their values."""
    for key, value in section.items():
        path = (*prefix, key)
        if isinstance(value, Mapping) and path != (_SCHEDULER,):
            yield from _find(value, path)
        elif value == AUTO and ".".join(path) not in _WORDS:
            yield path


def _replace(config: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    """Set the key at a path, or remove it if the value is None. Sections on the way are copied."""
    section = config
    for key in path[:-1]:
        section[key] = dict(section[key])
        section = section[key]
    if value is None:
        del section[path[-1]]
    else:
        section[path[-1]] = value


def _is_required(model: type[Section], raw: Mapping[str, Any], path: tuple[str, ...]) -> bool:
    section = section_at(model, raw, path[:-1])
    return section is not None and path[-1] in section.model_fields and section.model_fields[path[-1]].is_required()


def _is_honoured(model: type[Section], raw: Mapping[str, Any], path: tuple[str, ...]) -> bool:
    """Return whether neither the key nor a section around it is without effect or refused."""
    section: type[Section] | None = model
    for index, key in enumerate(path):
        field = None if section is None else section.model_fields.get(key)
        if field is None or not is_honoured(field):
            return False
        section = section_at(model, raw, path[: index + 1])
    return True

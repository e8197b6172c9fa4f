"""The keys at the top of a config that are no keys of this library: dotted ones, and those that no program reads.

Programs such as TRL write "zero_optimization.reduce_bucket_size" at the top level, and many public configs have keys of
their own beside DeepSpeed's. DeepSpeed ignores both at the top level, while it refuses unknown keys within its
sections. This module decides what this library does with both. It must never drop a key whose name is near that of a
known one.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from trainer_client.base.section import Section
from trainer_client.config.keys import all_paths, section_at
from trainer_client.config.older_names import OLDER_NAMES
from trainer_client.errors import ConfigError

# An unknown top-level key counts as a mistyped known key if their similarity, in [0, 1], is at least this. In the
# public configs of tests/data, keys with a similarity of 0.72 and less were the projects' own, and those of 0.87 and
# more were meant for DeepSpeed.
_ALIKE = 0.75
# Top-level keys that other programs use, and the key of this config that each means.
_MEANT = {
    "max_grad_norm": "gradient_clipping",
    "clip_grad_norm": "gradient_clipping",
    "batch_size": "train_batch_size",
    "per_device_train_batch_size": "train_micro_batch_size_per_gpu",
}

_OLDER = frozenset(older.name for older in OLDER_NAMES if not older.section)
_UNKNOWN = "unknown to DeepSpeed and to this library"


def with_sections(raw: Mapping[str, Any], model: type[Section]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the config with each dotted key in its section, and the dotted keys without effect, with the reason.

    The key "a.b" is key b of section a. If the section itself has key b, that one counts, as with DeepSpeed.

    Raises:
        ConfigError: the section that a dotted key names is no dict.
    """
    config: dict[str, Any] = {key: value for key, value in raw.items() if not _is_dotted(key, raw, model)}
    without_effect = {}
    for path, value in raw.items():
        if not _is_dotted(path, raw, model):
            continue
        *names, key = path.split(".")
        inner = config
        for name in names:
            section = inner.get(name, {})
            if not isinstance(section, Mapping):
                raise ConfigError(
                    f"{path} = {value!r} is refused: {name} = {section!r} is no section; write {name} as a dict with "
                    "this key in it"
                )
            # The user's section is copied before keys are added to it, so that the caller's own dict does not change.
            inner[name] = dict(section)
            inner = inner[name]
        if inner.setdefault(key, value) != value:
            without_effect[path] = f"the section itself says {inner[key]!r}"
    return config, without_effect


def without_unknown(config: Mapping[str, Any], model: type[Section]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the config without the keys at its top that nothing reads, and these keys, with the reason.

    An unknown key whose name is near that of a known one stays, so that the check of the whole config refuses it.
    """
    unknown = [key for key in config if key not in model.model_fields and meant(key, model) is None]
    return {key: value for key, value in config.items() if key not in unknown}, dict.fromkeys(unknown, _UNKNOWN)


def meant(key: str, model: type[Section]) -> str | None:
    """Return the known key that an unknown key at the top of the config probably means; None if there is none.

    The result is the dotted name of the only section's key of this name, or the key at the top with the most similar
    name.
    """
    if key in _MEANT:
        return _MEANT[key]
    elsewhere = {path for path in all_paths(model) if path.rpartition(".")[2] == key}
    if len(elsewhere) == 1:
        return elsewhere.pop()
    near = difflib.get_close_matches(key, sorted([*model.model_fields, *_OLDER]), n=1, cutoff=_ALIKE)
    return near[0] if near else None


def _is_dotted(key: str, raw: Mapping[str, Any], model: type[Section]) -> bool:
    """Return whether a key at the top of the config is a dotted name, "a.b", that means key b of section a."""
    *names, _ = key.split(".")
    if not names:
        return False
    return names[0] in _OLDER or section_at(model, raw, tuple(names)) is not None

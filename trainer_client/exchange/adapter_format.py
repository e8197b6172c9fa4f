"""The export of an adapter alone, as peft writes it: its tensors under peft's names for files, and its config.

This module must never write a tensor of the base model, which `PeftModel.from_pretrained` gets from its own files.
"""

from __future__ import annotations

from collections.abc import Sequence

from paramserver.contract.documents import parse_json
from paramserver.contract.printable import printable
from trainer_client.errors import ConfigError, ExportError
from trainer_client.exchange.destination import Destination
from trainer_client.exchange.safetensors_format import write_safetensors
from trainer_client.exchange.stored_model import ModelTensor, StoredModel

_STEM, _CONFIG = "adapter_model", "adapter_config.json"
# Beside an adapter, peft may train a copy of a whole module. The names of the copy's parameters have this word as a
# part, so an export finds them by it.
_WHOLE_MODULE = "modules_to_save"


def adapter_tensors(model: StoredModel, tensors: Sequence[ModelTensor], adapter: str) -> dict[str, ModelTensor]:
    """Return the tensors of an adapter by the names that they have in the adapter's file.

    Raises:
        ConfigError: the step has no such adapter; the message lists the adapters that it has.
        ExportError: the adapter is of a kind that cannot be written.
    """
    if adapter not in model.adapters:
        names = ", ".join(map(repr, map(printable, model.adapters))) or "none"
        raise ConfigError(f"step {model.step} of job {model.job!r} has no adapter {adapter!r}; its adapters: {names}")
    try:
        config = parse_json(model.adapters[adapter])
    except ValueError as error:
        raise ExportError(f"the stored config of adapter {adapter!r} is no JSON: {error}") from None
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none":
        raise ExportError(
            f"adapter {adapter!r} is of peft_type {config.get('peft_type')!r} with bias {config.get('bias')!r}; only "
            "LoRA without trained biases can be written alone: export the whole model"
        )
    found: dict[str, ModelTensor] = {}
    for tensor in tensors:
        parts = tensor.name.split(".")
        if adapter not in parts:
            continue
        place = len(parts) - 1 - parts[::-1].index(adapter)
        before = parts[place - 1] if place else ""
        if before == _WHOLE_MODULE:
            found[".".join([*parts[: place - 1], *parts[place + 1 :]])] = tensor
        elif before.startswith("lora_"):
            found[".".join([*parts[:place], *parts[place + 1 :]])] = tensor
    if not found:
        raise ExportError(f"adapter {adapter!r} has no tensors in job {model.job!r}")
    return found


def write_adapter(model: StoredModel, found: dict[str, ModelTensor], adapter: str, destination: Destination) -> None:
    """Write an adapter as peft does: `adapter_model.safetensors` and `adapter_config.json`.

    Args:
        model: the step, which has the adapter's config.
        found: the adapter's tensors, as `adapter_tensors` returns them.
        adapter: the adapter's name.
        destination: the directory of the files.
    """
    names = {tensor.name: name for name, tensor in found.items()}
    whole = sum(tensor.nbytes for tensor in found.values())
    write_safetensors(model, list(found.values()), destination, max(1, whole), stem=_STEM, names=names)
    with destination.create(_CONFIG) as file:
        file.write(f"{model.adapters[adapter]}\n".encode())

"""The client state of a commit: the values besides tensors that a run needs to resume exactly, as JSON without pickle.

This module owns the encoding, and the states of the random generators. It must never read a format other than its own.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import logging
import math
import numbers
import random
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch.sparse import check_sparse_tensor_invariants

from paramserver.contract.documents import parse_json
from trainer_client.base import device as devices
from trainer_client.base.foreign import torch_files
from trainer_client.errors import ClientStateError

log = logging.getLogger(__name__)

FORMAT = 2

# The keys of random states for generators on the host, which every machine has. All other keys name kinds of devices,
# as torch does.
_ON_HOST = frozenset({"torch", "python", "numpy"})

# Advice for the error text about a value that a commit cannot store, by the name of the value's class.
_INSTEAD = {
    "set": "write sorted(...)",
    "frozenset": "write sorted(...)",
    "PosixPath": "write str(...)",
    "ndarray": "write torch.from_numpy(...)",
    "bytes": "write a tensor of torch.uint8",
    "complex": "write a tuple of two numbers",
    "Fraction": "write float(...)",
    "Decimal": "write float(...)",
    "longdouble": "write float(...)",
    "datetime": "write its isoformat()",
}

_TENSOR, _TUPLE, _PAIRS, _COUNTER = "$tensor", "$tuple", "$pairs", "$counter"


def encode(state: Mapping[str, Any]) -> bytes:
    """Return the state as bytes for a commit. Raise ClientStateError, with its place, for a value without encoding."""
    return _to_text({"format": FORMAT, "state": _pack(state, "")})


def with_entry(encoded: bytes, name: str, value: Any) -> bytes:
    """Return an encoded state with the entry `name` added. Raise ClientStateError if `value` cannot be encoded."""
    end = b"}}"
    assert encoded.endswith(end), "the state is the last entry of the document"
    return encoded[: -len(end)] + b"," + _to_text({name: _pack(value, f".{name}")})[1:-1] + end


def decode(encoded: bytes) -> dict[str, Any]:
    """Return the decoded state. Raise ClientStateError if it was not written in this version's format."""
    try:
        document = parse_json(encoded)
        if document["format"] == FORMAT:
            state: dict[str, Any] = _unpack(document["state"])
            return state
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RuntimeError) as error:
        raise ClientStateError(f"the stored client state cannot be read: {error}") from None
    raise ClientStateError(f"the stored client state has format {document['format']}, this version reads {FORMAT}")


def encode_freely(state: Mapping[str, Any]) -> dict[str, str]:
    """Return an encoded state under the name of its format: "json" or, if it has types that JSON lacks, "torch".

    Raises:
        ClientStateError: torch would not load the state with `weights_only=True`.
    """
    try:
        return {"json": encode(state).decode()}
    except ClientStateError as error:
        refused = error
    buffer = io.BytesIO()
    try:
        torch.save(dict(state), buffer)
        _load_judged(buffer.getvalue())
    except Exception as error:  # torch and pickle raise errors of many classes for values that they cannot encode.
        raise ClientStateError(
            f"{refused}. Other types must load with torch.load(weights_only=True), and do not: {error}"
        ) from None
    return {"torch": base64.b64encode(buffer.getvalue()).decode()}


def decode_freely(encoded: Mapping[str, str]) -> dict[str, Any]:
    """Return the state of which `encode_freely` made `encoded`, with its tensors on the CPU.

    Raises:
        ClientStateError: `encoded` is damaged, or has objects that are not admitted.
    """
    try:
        if "json" in encoded:
            return decode(encoded["json"].encode())
        return dict(_load_judged(base64.b64decode(encoded["torch"])))
    except Exception as error:  # The bytes may come from a foreign file, for which torch raises errors of many classes.
        raise ClientStateError(f"the stored state cannot be read: {error}") from None


def _load_judged(content: bytes) -> Any:
    """Return the object in a file of torch.save. A file that is not admitted raises one of many errors."""
    judged = torch_files.judged(content, "the stored state")
    # A sparse tensor from a foreign file may have indices outside of its shape, with which later operations would read
    # other memory. So torch checks the indices of each loaded tensor.
    with check_sparse_tensor_invariants():
        # This machine may not have the device that a stored tensor was on, so all tensors are loaded to the CPU.
        return torch.load(io.BytesIO(judged), map_location="cpu", weights_only=True)


def random_states(device: torch.device) -> dict[str, Any]:
    """Return the states of all generators that a training loop uses.

    These are the generators of torch, of Python, of numpy if it is imported, and of `device` unless it is the CPU. The
    state of the device's generator has the device's kind as its name.
    """
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device.type != devices.CPU:
        states[device.type] = devices.random_state(device)
    if numpy := sys.modules.get("numpy"):
        name, keys, position, has_gauss, cached = numpy.random.get_state()
        states["numpy"] = (name, keys.tolist(), position, has_gauss, cached)
    return states


def derived_random_states(states: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Return random states for a new rank, derived from those of another rank and from the new rank's number."""
    content = states["torch"].numpy().tobytes() + rank.to_bytes(8, "little")
    seed = int.from_bytes(hashlib.sha256(content).digest()[:8], "little") >> 1
    derived: dict[str, Any] = {
        "torch": torch.Generator().manual_seed(seed).get_state(),
        "python": random.Random(seed).getstate(),
    }
    if (kind := devices.kind_in_use()) in states:
        derived[kind] = torch.Generator(kind).manual_seed(seed).get_state()
    if "numpy" in states and (numpy := sys.modules.get("numpy")):
        name, keys, position, has_gauss, cached = numpy.random.RandomState(seed % (1 << 32)).get_state()
        derived["numpy"] = (name, keys.tolist(), position, has_gauss, cached)
    return derived


def restore_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    """Set the random generators of torch, Python, `device` and numpy to the states that a commit carried.

    The generators of `device` and of numpy are left as they are if the commit has no state for them, and numpy's
    generator also if this process has not imported numpy. If the commit was made on another kind of device, its random
    numbers cannot go on here, and a warning says so.
    """
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if device.type != devices.CPU and device.type in states:
        devices.set_random_state(states[device.type], device)
    committed_on = next((kind for kind in states if kind not in _ON_HOST), devices.CPU)
    if committed_on != device.type:
        seed = "have the seed that the script gave them" if device.type != devices.CPU else "go on as the host's did"
        log.warning(
            "the step was committed on %s, and this rank computes on %s: the random numbers of dropout and of others "
            "on the device %s, so this run differs from one that was not interrupted",
            committed_on,
            device.type,
            seed,
        )
    if "numpy" in states and (numpy := sys.modules.get("numpy")):
        numpy.random.set_state(states["numpy"])


def check(value: Any, name: str) -> int:
    """Return the size of a value in an encoded state, in bytes.

    Args:
        name: the name of the value in the text of the error.

    Raises:
        ClientStateError: the value cannot be encoded; the message says which part of it.
    """
    return len(_to_text(_pack(value, "", name)))


def _to_text(packed: Any) -> bytes:
    return json.dumps(packed, separators=(",", ":")).encode()


def _to_number(value: Any) -> Any:
    """Return the number of Python that equals a scalar of another class; another value is returned as it is.

    Rates and counts of a script may be scalars of numpy, or arrays of numpy without dimensions. A scalar that no number
    of Python equals, such as one third (`fractions.Fraction`), is returned as it is.
    """
    if getattr(value, "shape", None) == () and not isinstance(value, torch.Tensor) and hasattr(value, "item"):
        number = value.item()
    elif isinstance(value, numbers.Real):
        number = int(value) if isinstance(value, numbers.Integral) else float(value)
    else:
        return value
    is_same = number == value or (isinstance(number, float) and math.isnan(number))
    return number if is_same else value


def _pack(value: Any, path: str, name: str = "client state") -> Any:
    """Return `value` as JSON types; a type that JSON does not have becomes a dict with one key that begins with $."""
    if not isinstance(value, bool | int | float):
        value = _to_number(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor):
        try:
            flat = value.detach().cpu().contiguous().reshape(-1)
            content = base64.b64encode(flat.view(torch.uint8).numpy().tobytes()).decode()
        except (RuntimeError, TypeError) as error:
            # Sparse, quantized, nested, conjugated and meta tensors have no plain bytes, so torch raises an error for
            # them.
            reason = str(error).partition("\n")[0]
            raise ClientStateError(
                f"{name}{path} is a tensor that cannot be committed ({reason}): give a dense tensor with values"
            ) from None
        return {_TENSOR: [str(value.dtype).removeprefix("torch."), list(value.shape), content]}
    if isinstance(value, tuple):
        return {_TUPLE: [_pack(item, f"{path}[{index}]", name) for index, item in enumerate(value)]}
    if isinstance(value, list):
        return [_pack(item, f"{path}[{index}]", name) for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value) and not isinstance(value, Counter):
            return {key: _pack(item, f"{path}.{key}", name) for key, item in value.items()}
        pairs = [[_pack(key, path, name), _pack(item, f"{path}[{key!r}]", name)] for key, item in value.items()]
        return {_COUNTER if isinstance(value, Counter) else _PAIRS: pairs}
    raise ClientStateError(
        f"{name}{path} is a {type(value).__name__}: only numbers, strings, tensors, lists, tuples and dicts of them "
        f"can be committed; {_INSTEAD.get(type(value).__name__, 'convert it')}"
    )


def _unpack(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpack(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not (tag := next(iter(value))).startswith("$"):
        return {key: _unpack(item) for key, item in value.items()}
    content = value[tag]
    if tag == _TENSOR:
        name, shape, encoded = content
        raw = bytearray(base64.b64decode(encoded))
        if not isinstance(dtype := vars(torch).get(name), torch.dtype):
            raise ValueError(f"{name!r} is no dtype")
        flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        return flat.reshape(shape)
    if tag == _TUPLE:
        return tuple(_unpack(item) for item in content)
    pairs = {_unpack(key): _unpack(item) for key, item in content}
    return Counter(pairs) if tag == _COUNTER else pairs

"""The export of one committed step: the choice of tensors and format, and the result.

This module owns nothing beyond a call; `begin_export` owns its thread. It must never change the store.
"""

from __future__ import annotations

import fnmatch
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypedDict, Unpack, get_args

import torch

from paramserver.contract.printable import printable
from trainer_client.client.transport.credentials import Credentials
from trainer_client.errors import ConfigError, ExportError
from trainer_client.exchange.adapter_format import adapter_tensors, write_adapter
from trainer_client.exchange.destination import CHECKSUMS, Destination, WrittenFile, open_destination
from trainer_client.exchange.safetensors_format import write_safetensors
from trainer_client.exchange.stored_model import ModelTensor, OptimizerStates, StoredModel, open_model
from trainer_client.exchange.torch_format import write_fp32

log = logging.getLogger(__name__)

Format = Literal["safetensors", "dcp", "deepspeed-fp32"]
WeightDType = Literal["fp32", "bf16", "fp16"]

DEFAULT_SHARD_BYTES = 5_000_000_000
DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# The niceness that the thread of an export beside training has above that of the thread that began the export
# (setpriority(2)). On busy cores a thread of the trainer or the store gets some nine times the processor time of the
# export's thread.
_MORE_NICE = 10
# Patterns of the files in a model's directory that are weights or list weights. An export does not copy them with the
# model's config and tokenizer, because it writes weights of its own.
_WEIGHT_FILES = (
    *("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf", "*.onnx", "*.distcp"),
    *("*.index.json", CHECKSUMS, ".*"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportResult:
    """The result of an export that is complete.

    Attributes:
        job: the job.
        step: the number of the exported step.
        format: the format of the files.
        destination: the directory, as the caller has named it.
        tensors: the number of tensors, optimizer states included.
        files: the written files, without the file of their checksums.
        left_out: names of the model's state dict that the store does not have, so that the export lacks them.
        seconds: the duration.
    """

    job: str
    step: int
    format: Format
    destination: str
    tensors: int
    files: tuple[WrittenFile, ...]
    left_out: tuple[str, ...]
    seconds: float

    @property
    def size_bytes(self) -> int:
        """The sum of the sizes of the written files, without the file of their checksums."""
        return sum(file.size_bytes for file in self.files)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorProgress:
    """The progress of an export or import: the bytes of tensors that were read, and the bytes of all tensors."""

    read_bytes: int
    total_bytes: int


class FormatOptions(TypedDict, total=False):
    """The keyword arguments of `export_step`, except the format, that a trainer's own export method takes, too."""

    dtype: WeightDType | None
    optimizer: bool
    adapter: str | None
    max_shard_bytes: int
    extra_files: Sequence[str | os.PathLike[str]]
    overwrite: bool
    credentials: Credentials | None
    kept: str | None
    on_progress: Callable[[TensorProgress], None] | None


class ExportOptions(FormatOptions, total=False):
    """The keyword arguments of `export_step` that `begin_export` takes, too."""

    format: Format


@dataclass(frozen=True, slots=True)
class PendingExport:
    """An export that runs on a thread of its own.

    Attributes:
        accepted: done when the arguments are found to be right and the destination can be written.
        staged: done when the store holds the step for the export; its result is the step's number. From then on the
            export writes exactly that step, even if the trainer commits further steps or the step is deleted. The store
            copies nothing for this.
        persisted: done when the export is complete.
    """

    accepted: Future[None]
    staged: Future[int]
    persisted: Future[ExportResult]


def export_step(
    store: str | Sequence[str],
    job: str,
    step: int | None,
    destination: str | os.PathLike[str],
    *,
    format: Format = "safetensors",
    dtype: WeightDType | None = None,
    optimizer: bool = False,
    adapter: str | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    extra_files: Sequence[str | os.PathLike[str]] = (),
    overwrite: bool = False,
    credentials: Credentials | None = None,
    kept: str | None = None,
    on_progress: Callable[[TensorProgress], None] | None = None,
    on_accepted: Callable[[], None] | None = None,
    on_staged: Callable[[int], None] | None = None,
) -> ExportResult:
    """Write a committed step of a job as files of another framework, and return a description of the files.

    The export reads from the store alone, in pieces of some megabytes, while training goes on. The destination is
    complete, or does not exist.

    Args:
        store: the address of the store daemon (`unix:/path` or `host:port`); where the ranks of a job are attached to
            stores of several nodes, the addresses of all of them.
        job: name of the job.
        step: number of the step; None: the newest one that all of the stores have.
        destination: a directory, or a URL of one that fsspec knows.
        format: "safetensors" (as transformers writes it), "dcp" (torch.distributed.checkpoint) or "deepspeed-fp32" (the
            consolidated file of zero_to_fp32.py).
        dtype: dtype of the parameters, converted from the fp32 weights; None: with safetensors the dtype in which the
            model computed, otherwise fp32.
        optimizer: write the optimizer's states, too; "dcp" only.
        adapter: name of a LoRA adapter of peft ("default", unless the user has named it), which alone is written as
            peft writes it; "safetensors" only.
        max_shard_bytes: the most bytes of tensors in one file; not for "dcp".
        extra_files: files that are copied beside the weights, such as a config and a tokenizer. In place of a
            directory, all files in it but weights are copied.
        overwrite: whether an export that is at the destination already is replaced.
        credentials: token and TLS files to connect with; None: those that the environment names, as for StoreClient.
        kept: the name under which the stores keep the step; `step` is None then.
        on_progress: called after each piece that was read.
        on_accepted: called when the arguments are found to be right and the destination can be written, before any
            store is contacted. The export goes on when it returns.
        on_staged: called with the number of the step as soon as the store holds it for this export.

    Raises:
        ConfigError: an argument is malformed, or does not go with the format.
        StoreNotFoundError: there is no such job or step; the message says which there are.
        ExportError: the destination exists or cannot be written, or the format cannot have a tensor.
        StoreError: the store failed.
    """
    began = time.monotonic()
    stores = [store] if isinstance(store, str) else list(store)
    if kept is not None and step is not None:
        raise ConfigError(f"kept={kept!r} and step={step}: a kept step has one number, so leave `step` out")
    _check(stores, format, dtype, optimizer=optimizer, adapter=adapter, max_shard_bytes=max_shard_bytes)
    extras = list(_files_of(extra_files))
    target = open_destination(destination, overwrite=overwrite)
    shown = Credentials.from_environment(os.environ) if credentials is None else credentials
    progress = _ProgressCount(on_progress)
    # The destination's context is entered first, so that an existing directory is refused before any store is
    # contacted.
    with ExitStack() as held:
        held.enter_context(target)
        if on_accepted is not None:
            on_accepted()
        model = held.enter_context(open_model(stores, job, step, shown, progress.add, kept=kept))
        if on_staged is not None:
            on_staged(model.step)
        weights = model.weights(_dtype_of(format, dtype))
        adapted = None if adapter is None else adapter_tensors(model, weights, adapter)
        if adapted is not None:
            weights = list(adapted.values())
        states = model.optimizer() if optimizer else None
        everything = [*weights, *_tensors_of(states)]
        model.plan(everything)
        progress.total_bytes = sum(tensor.nbytes for tensor in everything if tensor.kind is not None)
        target.require(sum(tensor.nbytes for tensor in everything))
        if adapted is not None and adapter is not None:
            write_adapter(model, adapted, adapter, target)
        else:
            _write(format, model, weights, states, target, max_shard_bytes)
        for path in extras:
            target.copy(path)
    return ExportResult(
        job=job,
        step=model.step,
        format=format,
        destination=target.name,
        tensors=len(everything),
        files=tuple(target.files),
        left_out=() if adapter is not None else model.left_out,
        seconds=time.monotonic() - began,
    )


def begin_export(
    store: str | Sequence[str],
    job: str,
    step: int | None,
    destination: str | os.PathLike[str],
    *,
    committed: Future[None] | None = None,
    **options: Unpack[ExportOptions],
) -> PendingExport:
    """Begin an export on a thread of its own, and return the PendingExport with its futures.

    An error is logged, and is also the result of the futures that are not done. The thread has a lower priority than
    the caller, so that the export slows the training in the same process little.

    The arguments are those of `export_step`, and `committed`, a future that is done when the trainer has committed the
    step. If it is given, the export asks the stores for the step only after that, and fails if the future is cancelled.
    """
    pending = PendingExport(Future(), Future(), Future())

    def accept() -> None:
        pending.accepted.set_result(None)
        if committed is not None:
            try:
                committed.result()
            except CancelledError:
                raise ExportError(f"step {step} of job {printable(job)!r} was abandoned before its commit") from None

    def run() -> None:
        thread = threading.get_native_id()
        # If a sandbox forbids to set a priority, the error is ignored, and the export runs with the priority of its
        # caller.
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _MORE_NICE)
        try:
            result = export_step(
                *(store, job, step, destination), on_accepted=accept, on_staged=pending.staged.set_result, **options
            )
        except BaseException as error:
            log.error("export of job %r to %s: %s", printable(job), destination, error)
            for future in (pending.accepted, pending.staged, pending.persisted):
                if not future.done():
                    future.set_exception(error)
        else:
            pending.persisted.set_result(result)

    threading.Thread(target=run, name=f"export {job}").start()
    return pending


def _write(
    format: Format,
    model: StoredModel,
    weights: Sequence[ModelTensor],
    states: OptimizerStates | None,
    target: Destination,
    max_shard_bytes: int,
) -> None:
    if format == "safetensors":
        write_safetensors(model, weights, target, max_shard_bytes)
    elif format == "dcp":
        from trainer_client.exchange.dcp_format import write_dcp  # noqa: PLC0415 - takes 1 s

        write_dcp(model, weights, states, target)
    else:
        write_fp32(model, weights, target, max_shard_bytes)


def _check(
    stores: Sequence[str], format: str, dtype: str | None, *, optimizer: bool, adapter: str | None, max_shard_bytes: int
) -> None:
    if not stores:
        raise ConfigError("store has no address: give that of the store daemon, such as unix:/path/paramserver.sock")
    if format not in get_args(Format):
        raise ConfigError(f"format {format!r} is none of {', '.join(get_args(Format))}")
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is none of {', '.join(DTYPES)}")
    if format == "deepspeed-fp32" and dtype not in (None, "fp32"):
        raise ConfigError(f"dtype {dtype!r} does not go with the format deepspeed-fp32, whose weights are fp32")
    if optimizer and format != "dcp":
        raise ConfigError(f"the format {format} has no optimizer states: leave them out, or write dcp")
    if adapter is not None and format != "safetensors":
        raise ConfigError(f"an adapter alone is written as safetensors, and the format is {format}")
    if max_shard_bytes <= 0:
        raise ConfigError(f"max_shard_bytes {max_shard_bytes} must be positive")


def _dtype_of(format: Format, dtype: WeightDType | None) -> torch.dtype | None:
    if dtype is not None:
        return DTYPES[dtype]
    return None if format == "safetensors" else torch.float32


def _tensors_of(states: OptimizerStates | None) -> list[ModelTensor]:
    return [] if states is None else [tensor for kinds in states.states.values() for tensor in kinds.values()]


def _files_of(paths: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Return the files that are copied into the export: the given ones, and those in the given directories.

    Raise ConfigError if a file does not exist, or has a name that cannot stand in the file of checksums. Weights in a
    directory are left out, because the export writes its own.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        try:
            if path.is_dir():
                files += [file for file in sorted(path.iterdir()) if file.is_file() and not _is_weight_file(file)]
            elif path.is_file():
                files.append(path)
            else:
                raise ConfigError(f"{path} is neither a file nor a directory, so it cannot be copied into the export")
        except OSError as error:
            raise ConfigError(f"{path} cannot be copied into the export: {error.strerror}") from None
    for file in files:
        if not _fits_a_line(file.name):
            raise ConfigError(
                f"{str(file)!r} cannot be copied into the export, because {CHECKSUMS} has a line for each file, and "
                "its name does not fit into a line: rename it"
            )
    return files


def _fits_a_line(name: str) -> bool:
    """Return whether a file's name can stand in SHA256SUMS, where a backslash has a special meaning."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return "\\" not in name and name.splitlines() == [name]


def _is_weight_file(path: Path) -> bool:
    return any(fnmatch.fnmatch(path.name, pattern) for pattern in _WEIGHT_FILES)


class _ProgressCount:
    """Counts the bytes that an export has read so far, and passes the sum to `on_progress` after each piece."""

    def __init__(self, on_progress: Callable[[TensorProgress], None] | None) -> None:
        self.total_bytes = 0
        self._read_bytes = 0
        self._on_progress = on_progress

    def add(self, nbytes: int) -> None:
        """Add `nbytes` to the bytes that were read, and call `on_progress` with the new sum."""
        self._read_bytes += nbytes
        if self._on_progress is not None:
            self._on_progress(TensorProgress(read_bytes=self._read_bytes, total_bytes=self.total_bytes))

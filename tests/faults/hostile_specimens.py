"""The whole files that the campaign of hostile_files.py spoils, and how each of them is opened."""

from __future__ import annotations

import base64
import io
import json
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import save

from tests.integration.support.daemon import Daemon
from tests.integration.support.deepspeed_checkpoint import write_checkpoint
from trainer_client.client.store_client.client_sync import StoreClientSync
from trainer_client.copying.backup import BackupStep
from trainer_client.copying.verbs import backup
from trainer_client.exchange.import_checkpoint import _opened
from trainer_client.exchange.imported_job import ImportedJob
from trainer_client.exchange.imported_state import encode_state
from trainer_client.exchange.weight_files import divide
from trainer_client.training.run import checkpoint_files, client_state
from trainer_client.training.run.checkpoint_files import CheckpointManifest, KeptAt

JOB = "job"
STATE = {"counters": {"global_steps": 3, "train_batch_size": 2}, "pair": (1, {2: [3.5]}), "tensor": torch.arange(6)}


def make_specimens(root: Path) -> None:
    """Make a directory for each of OPENERS."""
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    for name in OPENERS:
        (root / name).mkdir()
    save_file(weights, root / "safetensors" / "model.safetensors")
    save_file(weights, root / "safetensors index" / "part.safetensors")
    torch.save(weights, root / "torch" / "pytorch_model.bin")
    torch.save(weights, root / "torch index" / "part.bin")
    for kind, file in (("safetensors", "model.safetensors"), ("torch", "pytorch_model.bin")):
        part = "part.safetensors" if kind == "safetensors" else "part.bin"
        index = json.dumps({"metadata": {}, "weight_map": dict.fromkeys(weights, part)})
        (root / f"{kind} index" / f"{file}.index.json").write_text(index)
    with warnings.catch_warnings(action="ignore"):
        save({"model": weights, "optimizer": {"lr": 0.1}}, checkpoint_id=root / "dcp", no_dist=True)
    for stage in ("stage 2", "stage 3"):
        write_checkpoint(
            root / f"deepspeed {stage}",
            model,
            optimizer,
            layout="stage 2" if stage == "stage 2" else "stage 3",
            ranks=2,
            step=1,
            samples=2,
            client_state={"mine": {"epoch": 1, "seen": (1, 2)}},
        )
    _make_states(root)
    _make_backup(root / "backup")


def _make_states(root: Path) -> None:
    (root / "client state" / "state.json").write_bytes(client_state.encode(STATE))
    content = io.BytesIO()
    torch.save({"set": {1, 2}, "tensor": torch.ones(3), "bytes": b"x"}, content)
    (root / "user state" / "state.pt").write_bytes(content.getvalue())
    manifest = CheckpointManifest(
        tag="tag",
        job=JOB,
        kept="kept",
        step=3,
        global_steps=3,
        stores=(KeptAt(address="unix:/x", state_dir="/x"),),
        metric=0.5,
        run_states=(client_state.encode(STATE).decode(),),
        client_states=(client_state.encode_freely({"epoch": 1}),),
        buffers=(client_state.encode({"buffer": torch.ones(2)}).decode(),),
        saved_at=1.0,
    )
    (root / "manifest" / checkpoint_files.MANIFEST).write_text(manifest.to_json())


def _make_backup(target: Path) -> None:
    values = {f"tensor {number}": torch.arange(1000.0) + number for number in range(3)}
    with tempfile.TemporaryDirectory(prefix="hostile-store-") as directory, Daemon(Path(directory) / "state") as daemon:
        with StoreClientSync.connect(daemon.address) as client, client.open(JOB, values) as writer:
            writer.put(values)
            writer.commit()
        options: dict[str, Any] = {"step": None, "kept": None, "keep_last": None}
        backup(JOB, daemon.address, str(target), **options, credentials={}, on_progress=lambda _: None)


def _import(path: Path) -> None:
    """Do all of an import but for the store."""
    checkpoint = _opened(path, None, verify=True, weights_only=False)
    tensors, buffers = divide(checkpoint, None)
    ImportedJob("imported", tensors, dtype=torch.float32, device="nvme", durability="step")
    for tensor in tensors:
        for values in (tensor.weight, *tensor.states.values()):
            values.read(torch.empty(tensor.numel), 0)
    encode_state(checkpoint, tensors, buffers, "here")


def _read_user_state(path: Path) -> None:
    content = (path / "state.pt").read_bytes() if (path / "state.pt").is_file() else b""
    client_state.decode_freely({"torch": base64.b64encode(content).decode()})


def _read_manifest(path: Path) -> None:
    manifest = checkpoint_files.read_manifest(path)
    for rank in range(2):
        checkpoint_files.decode_user_state(manifest.client_state_of(rank), "here")
        checkpoint_files.decode_buffers(manifest.buffers_of(rank), "here")
    checkpoint_files.decode_run_state(manifest.run_states[0], "here")


def _restore(path: Path) -> None:
    """Do all of a restore but for the store."""
    source = BackupStep(str(path), JOB)
    slabs = [slab for slab in source.description.slabs.values() if slab.version is not None]
    source.digests(slabs)
    for slab, parts in source.read(slabs):
        for _ in slab.expand(parts):
            pass


def _read_client_state(path: Path) -> Any:
    content = (path / "state.json").read_bytes() if (path / "state.json").is_file() else b""
    return client_state.decode(content)


OPENERS: Mapping[str, Callable[[Path], Any]] = {
    **dict.fromkeys(("safetensors", "safetensors index", "torch", "torch index", "dcp"), _import),
    **dict.fromkeys(("deepspeed stage 2", "deepspeed stage 3"), _import),
    "client state": _read_client_state,
    "user state": _read_user_state,
    "manifest": _read_manifest,
    "backup": _restore,
}

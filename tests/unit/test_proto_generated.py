"""The generated code equals the code that protoc and proto/stored_kind.py now generate from proto/."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from proto import stored_kind

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path("paramserver/v1")


def generated_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*_pb2*.py*")}


def test_generated_code_is_up_to_date(tmp_path: Path) -> None:
    sources = sorted(path.relative_to(ROOT / "proto") for path in (ROOT / "proto" / PACKAGE).glob("*.proto"))
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    protoc = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={ROOT / 'proto'}", *outputs, *map(str, sources)]
    subprocess.run(protoc, check=True, cwd=ROOT)

    fresh = generated_files(tmp_path / PACKAGE)
    committed = generated_files(ROOT / PACKAGE)

    assert sorted(committed) == sorted(fresh), "files differ: run `make proto` and remove what it does not make"
    stale = [name for name in fresh if committed[name] != fresh[name]]
    assert not stale, f"generated from older .proto files or by another protoc: {stale}; run `make proto`"


def test_the_words_of_the_stored_kinds_are_up_to_date() -> None:
    assert stored_kind.FILE.read_text() == stored_kind.text(), "run `make proto`"

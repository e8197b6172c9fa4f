"""The device's library is compiled once for a torch, an interpreter and the sources; its absence is no silent skip."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.device import native_build
from tests.integration.support.forked import Forked


def test_the_library_is_kept_under_a_key_of_torch_and_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("g++") is None:
        pytest.skip("there is no g++ on the PATH; the library is there from before")
    kept = native_build.library()
    assert kept.exists()
    assert "torch-" in kept.parent.name
    changed = tmp_path / "native"
    changed.mkdir()
    for source in native_build.SOURCES.iterdir():
        (changed / source.name).write_bytes(source.read_bytes())
    monkeypatch.setattr(native_build, "SOURCES", changed)
    assert native_build.library() == kept
    (changed / "device.cpp").write_text("this does not compile\n")
    monkeypatch.setattr(native_build, "KEPT", tmp_path / "kept")
    with pytest.raises(RuntimeError, match="error:"):
        native_build.library()
    assert [path.name for path in (tmp_path / "kept").glob("*/*")] == ["lock"]
    monkeypatch.setenv("PATH", "")
    with pytest.raises(native_build.NoCompilerError, match=r"no `g\+\+` on the PATH"):
        native_build.library()


@pytest.mark.parametrize(("required", "code", "says"), [("", 0, "1 skipped"), ("1", 1, "1 failed")])
def test_without_a_compiler_the_tests_are_skipped_or_fail_if_they_are_required(
    tmp_path: Path, required: str, code: int, says: str
) -> None:
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PARAMSERVER_"))}
    log = tmp_path / "log"
    run = Forked(
        "tests.device.without_library",
        [str(tmp_path), "-q", str(Path(__file__).with_name("test_random.py"))],
        environment=variables | {"PATH": "", "PARAMSERVER_REQUIRE_DEVICE": required},
        log=log,
    )
    assert run.wait() == code, log.read_text()
    assert says in log.read_text()
    assert "no `g++` on the PATH" in log.read_text()

"""A simulated power loss keeps all synced writes, and keeps, drops or tears the others at random, in whole sectors."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.faults import shim
from tests.faults.power_loss import SECTOR_BYTES, Fate, Mood, Outcome, Record, events, lose_power

ROOT = Path(__file__).parents[2]


class Machine:
    """A directory that the shim watches, and processes that write there."""

    def __init__(self, directory: Path) -> None:
        self.files = directory / "files"
        self.files.mkdir()
        self.log = directory / "undo.log"
        self._environment = shim.environment(shim.build(directory))

    def run(self, program: str) -> int:
        """Run a Python program in a process of its own, and return its exit status.

        The program has the modules `shim` and `os`, and the descriptor `fd` of the file `data`.
        """
        begin = f"""
            import json, os, random, sys
            from pathlib import Path
            from tests.faults import shim
            shim.configure(Path({str(self.files)!r}), Path({str(self.log)!r}))
            fd = os.open({str(self.data)!r}, os.O_RDWR | os.O_CREAT)
        """
        text = textwrap.dedent(begin) + textwrap.dedent(program)
        return subprocess.run([sys.executable, "-c", text], cwd=ROOT, env=self._environment, check=False).returncode

    def begin(self, contents: bytes) -> None:
        """Create the file with these contents, and sync it."""
        program = f"os.write(fd, {contents!r}); os.fsync(fd); os.fsync(os.open({str(self.files)!r}, os.O_RDONLY))"
        assert self.run(program) == 0
        assert self.lose(0).fates == {}
        assert self.data.read_bytes() == contents

    @property
    def data(self) -> Path:
        """The path of the file."""
        return self.files / "data"

    def lose(self, seed: int, mood: Mood | None = None) -> Outcome:
        """Simulate a power loss."""
        return lose_power(self.files, self.log, random.Random(seed), mood)

    def results(self, seeds: int) -> list[bytes]:
        """Return the file's contents after a power loss with each seed below `seeds`, each time from the same start."""
        contents, log = self.data.read_bytes(), self.log.read_bytes()
        found = []
        for seed in range(seeds):
            # The file is rewritten in place, because the log knows it by its inode.
            self.data.write_bytes(contents)
            self.log.write_bytes(log)
            self.lose(seed)
            found.append(self.data.read_bytes())
        return found


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    try:
        return Machine(tmp_path)
    except shim.NoCompilerError as error:
        pytest.skip(str(error))


def test_a_synced_write_survives_and_one_that_is_not_is_kept_dropped_or_torn(machine: Machine) -> None:
    machine.begin(bytes(8192))
    assert machine.run("os.pwrite(fd, b'a' * 4096, 0); os.fdatasync(fd); os.pwrite(fd, b'b' * 4096, 4096)") == 0
    found = machine.results(40)
    assert all(contents[:4096] == b"a" * 4096 for contents in found)
    ends = [contents[4096:] for contents in found]
    assert {bytes(4096), b"b" * 4096} < set(ends)
    torn = [end for end in ends if 0 < end.count(b"b") < 4096]
    assert torn and all(end.count(b"b") % SECTOR_BYTES == 0 for end in torn)


def test_what_a_failed_sync_was_to_cover_is_lost_though_a_later_one_succeeds(machine: Machine) -> None:
    machine.begin(bytes(1024))
    program = """
        os.pwrite(fd, b'a' * 512, 0)
        shim.fail_at(1, 5)
        try:
            os.fsync(fd)
        except OSError:
            pass
        else:
            sys.exit("the sync was to fail")
        os.pwrite(fd, b'b' * 512, 512)
        os.fsync(fd)
    """
    assert machine.run(textwrap.dedent(program)) == 0
    assert set(machine.results(20)) == {bytes(512) + b"b" * 512}


def test_growth_and_shrinkage_that_no_sync_covered_are_taken_back(machine: Machine) -> None:
    machine.begin(b"x" * 3000)
    assert machine.run("os.posix_fallocate(fd, 3000, 5000); os.ftruncate(fd, 700); os.pwrite(fd, b'y', 2000)") == 0
    assert machine.data.stat().st_size == 2001
    machine.lose(0, Mood.DROP)
    assert machine.data.read_bytes() == b"x" * 3000


def test_a_new_file_may_vanish_until_its_directory_is_synced(machine: Machine) -> None:
    assert machine.run("os.write(fd, b'x'); os.fsync(fd)") == 0
    outcome = machine.lose(0, Mood.DROP)
    assert outcome.vanished == ("data",) and not machine.data.exists()
    machine.begin(b"x")


def test_an_unlinked_file_leaves_no_trace_for_one_that_gets_its_inode(machine: Machine) -> None:
    machine.begin(b"x")
    program = """
        os.pwrite(fd, b'y' * 100, 0)
        os.close(fd)
        os.unlink({path!r})
        fd = os.open({path!r}, os.O_RDWR | os.O_CREAT)
        os.write(fd, b'new')
        os.fsync(fd)
        os.fsync(os.open({directory!r}, os.O_RDONLY))
    """
    assert machine.run(textwrap.dedent(program).format(path=str(machine.data), directory=str(machine.files))) == 0
    machine.lose(0, Mood.DROP)
    assert machine.data.read_bytes() == b"new"


def test_the_process_is_killed_at_the_chosen_call_and_a_write_is_torn_there(machine: Machine) -> None:
    machine.begin(bytes(4096))
    assert machine.run("shim.kill_at(2, 500); os.pwrite(fd, b'a' * 512, 0); os.pwrite(fd, b'b' * 2048, 1024)") == -9
    assert machine.data.read_bytes() == b"a" * 512 + bytes(512) + b"b" * 1024 + bytes(2048)
    assert [(record, name) for record, _, name in events(machine.log)] == [(Record.KILL, "data")]
    assert machine.lose(0, Mood.DROP).fates == {Fate.DROPPED: 2}
    assert machine.data.read_bytes() == bytes(4096)


@pytest.mark.parametrize("seed", range(8))
def test_every_sector_is_as_it_was_at_some_instant_since_its_last_sync(machine: Machine, seed: int) -> None:
    """The writes are random; they overlap and split sectors."""
    machine.begin(bytes(4096))
    history = machine.files.parent / "history.json"
    program = f"""
        rng = random.Random({seed})
        states = [bytes(4096)]
        for i in range(1, 60):
            start = rng.randrange(4000)
            os.pwrite(fd, bytes([i]) * rng.randint(1, min(1500, 4096 - start)), start)
            states.append(os.pread(fd, 4096, 0))
            if rng.random() < 0.1:
                os.fdatasync(fd)
                states = states[-1:]
        Path({str(history)!r}).write_text(json.dumps([state.hex() for state in states]))
    """
    assert machine.run(textwrap.dedent(program)) == 0
    states = [bytes.fromhex(state) for state in json.loads(history.read_text())]
    for contents in machine.results(20):
        for start in range(0, 4096, SECTOR_BYTES):
            sector = slice(start, start + SECTOR_BYTES)
            assert contents[sector] in [state[sector] for state in states]

"""Access to the arena: processes of the daemon's user get it over its socket, or by its name from another container."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.support.daemon import Daemon, run_serve, tiers
from tests.integration.support.forked import ROOT
from tests.integration.support.ranks import free_port

IS_ROOT = os.geteuid() == 0
NOBODY = 65534

# This program connects, as another user, to the socket `name` in an inherited directory, and prints the number of
# descriptors that it receives.
KNOCK = """
import os, socket, sys
directory, name, uid = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
os.setgroups([]); os.setgid(uid); os.setuid(uid)
with socket.socket(socket.AF_UNIX) as arena_socket:
    arena_socket.connect(f"/proc/self/fd/{directory}/{name}")
    print(len(socket.recv_fds(arena_socket, 1, 1)[1]))
"""

PLANE = """
import sys
from contextlib import closing
from trainer_client.client.transport.rank_store import RankStore
with closing(RankStore(sys.argv[1], "in another container")) as store:
    print(store.plane.name)
"""


@pytest.fixture
def name() -> Iterator[Path]:
    """A file name in shared memory that no other test uses."""
    path = Path("/dev/shm") / f"paramserver-test-{uuid.uuid4().hex}"
    yield path
    path.unlink(missing_ok=True)


@pytest.mark.skipif(not IS_ROOT, reason="only root can become another user")
def test_another_user_gets_no_descriptor_even_where_the_socket_lets_it_connect(tmp_path: Path) -> None:
    with Daemon(tmp_path / "state") as daemon:
        arena_socket = Path(f"{daemon.socket}.arena")
        assert arena_socket.stat().st_mode & 0o777 == 0o600
        daemon.state_dir.chmod(0o755)
        arena_socket.chmod(0o666)
        directory = os.open(daemon.state_dir, os.O_PATH)
        try:
            found = {
                uid: subprocess.run(
                    [sys.executable, "-S", "-c", KNOCK, str(directory), arena_socket.name, str(uid)],
                    pass_fds=[directory],
                    capture_output=True,
                    text=True,
                    check=True,
                ).stdout
                for uid in (os.getuid(), NOBODY)
            }
        finally:
            os.close(directory)
        assert found == {os.getuid(): "1\n", NOBODY: "0\n"}
        assert f"refused the arena to user {NOBODY}: it is for user {os.getuid()} and root only" in daemon.log


@pytest.mark.skipif(not IS_ROOT, reason="only root can make a mount namespace")
def test_a_named_arena_is_mapped_from_another_mount_namespace(tmp_path: Path, name: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    with Daemon(tmp_path / "state", {"arena_file": str(name), "listen": address}) as daemon:
        # The tmpfs hides the daemon's sockets, as in another container that mounts only the arena's volume.
        script = f'mount -t tmpfs none "{daemon.state_dir}" && exec "$0" -c "$1" "$2"'
        command = ["unshare", "--mount", "sh", "-c", script, sys.executable, PLANE, address]
        inside = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if "unshare failed" in inside.stderr or "permission denied" in inside.stderr:
            pytest.skip(f"mount namespaces are not to be had here: {inside.stderr.strip()}")
        assert (inside.returncode, inside.stdout) == (0, "arena\n"), inside.stderr
        assert f"shared memory {name}" in tiers(daemon.address)[0].detail
        assert daemon.stop() == 0
    assert not name.exists()


def test_the_file_is_this_users_alone_and_takes_the_place_of_one_that_was_left_behind(
    tmp_path: Path, name: Path
) -> None:
    config = {"arena_file": str(name)}
    with Daemon(tmp_path / "state", config) as daemon:
        assert name.stat().st_mode & 0o777 == 0o600 and name.stat().st_size == 16 << 20
        assert name.stat().st_blocks * 512 >= 16 << 20, "allocated in full"
        inode = name.stat().st_ino
        other = run_serve("--config", str(config_of(tmp_path / "other", name)))
        assert other.returncode == 1 and f"arena_file: {name} is in use by another daemon" in other.stderr
        assert name.stat().st_ino == inode
        daemon.kill()
    assert name.exists()
    with Daemon(tmp_path / "state", config) as daemon:
        assert name.stat().st_ino != inode
        assert daemon.stop() == 0
    assert not name.exists()


@pytest.mark.parametrize(
    ("place", "reason"), [("disk", "whose pages are written to a disk"), ("taken", "exists and no daemon has made it")]
)
def test_a_name_that_cannot_be_the_arenas_is_refused(tmp_path: Path, name: Path, place: str, reason: str) -> None:
    path = name
    if place == "disk":
        path = tmp_path / "arena"
        if str(path).startswith("/dev/shm"):
            pytest.skip("the temporary directory is in shared memory")
    else:
        path.write_text("somebody else's")
    refused = run_serve("--config", str(config_of(tmp_path / "state", path)))
    assert refused.returncode == 1 and f"arena_file: {path}" in refused.stderr and reason in refused.stderr
    assert "Traceback" not in refused.stderr
    assert place == "disk" or path.read_text() == "somebody else's"


def config_of(state_dir: Path, arena_file: Path) -> Path:
    path = state_dir.with_suffix(".toml")
    path.write_text(f'state_dir = "{state_dir}"\narena_file = "{arena_file}"\nhost_budget = "16MiB"\n')
    return path

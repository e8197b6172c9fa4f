"""Network namespaces on one switch, whose links can be made slower or cut.

They need root, and the commands `ip` and `tc`.
"""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

# The network interface of each namespace.
LINK = "eth0"
# No interface has this address, so a frame to it is lost.
_NOWHERE = "02:00:00:00:00:01"
_numbers = itertools.count()
# A link of 10 GB/s sends this much between two ticks of the slowest clock of a kernel, 10 ms.
_BURST = "16mb"


class NamespaceError(Exception):
    """Namespaces cannot be made here; the message says why."""


@contextmanager
def switched(hosts: Sequence[str]) -> Iterator[list[str]]:
    """Yield the names of network namespaces with the given IPv4 addresses, all on one switch of their own.

    Raises:
        NamespaceError: this user may not make them, or a command is missing.
    """
    if os.geteuid() != 0:
        raise NamespaceError("network namespaces need root")
    with ExitStack() as made:
        try:
            names = [f"psb{os.getpid()}-{next(_numbers)}" for _ in range(len(hosts) + 1)]
            for name in names:
                _run("ip", "netns", "add", name)
                made.callback(_run, "ip", "netns", "delete", name)
                _run("ip", "-n", name, "link", "set", "lo", "up")
            center, *ends = names
            _run("ip", "-n", center, "link", "add", "switch", "type", "bridge")
            _run("ip", "-n", center, "link", "set", "switch", "up")
            for number, (name, host) in enumerate(zip(ends, hosts, strict=True)):
                port = f"port{number}"
                add = ("link", "add", port, "type", "veth", "peer", "name", LINK, "netns", name)
                _run("ip", "-n", center, *add)
                _run("ip", "-n", center, "link", "set", port, "master", "switch", "up")
                _run("ip", "-n", name, "address", "add", f"{host}/24", "dev", LINK)
                _run("ip", "-n", name, "link", "set", LINK, "up")
        except FileNotFoundError as error:
            raise NamespaceError(f"there is no {error.filename}") from error
        except subprocess.CalledProcessError as error:
            raise NamespaceError(f"they are not allowed here: {error.stderr.decode().strip()}") from error
        yield ends


def why_not_switched() -> str | None:
    """Return the reason why `switched` raises on this machine; None if it does not."""
    try:
        with switched(["10.0.0.1"]):
            return None
    except NamespaceError as error:
        return str(error)


def cut(namespace: str) -> None:
    """Cut the link of a namespace: packets to it are dropped, and their senders get no error."""
    _run("ip", "-n", namespace, "link", "set", LINK, "down")


def join(namespace: str) -> None:
    """Undo `cut`."""
    _run("ip", "-n", namespace, "link", "set", LINK, "up")


def mute(namespace: str, hosts: Sequence[str]) -> None:
    """Cut the link of a namespace in one direction: what it sends to these hosts is lost, without an error."""
    for host in hosts:
        _run("ip", "-n", namespace, "neigh", "replace", host, "lladdr", _NOWHERE, "dev", LINK, "nud", "permanent")


def unmute(namespace: str, hosts: Sequence[str]) -> None:
    """Undo `mute`."""
    for host in hosts:
        _run("ip", "-n", namespace, "neigh", "delete", host, "dev", LINK)


def shape(namespaces: Sequence[str], gigabytes_per_second: float, *, burst: str = _BURST) -> str | None:
    """Limit what each namespace sends; return None, or why the kernel refuses, so that the links stay as they are.

    `burst` is what a link that was idle sends at once, in the words of `tc`.
    """
    rate = f"{gigabytes_per_second * 8:g}gbit"
    for name in namespaces:
        try:
            shaping = ("qdisc", "replace", "dev", LINK, "root", "tbf", "rate", rate)
            _run("ip", "netns", "exec", name, "tc", *shaping, "burst", burst, "latency", "50ms")
        except FileNotFoundError as error:
            return f"there is no {error.filename}"
        except subprocess.CalledProcessError as error:
            return str(error.stderr.decode().strip())
    return None


def unshape(namespaces: Sequence[str]) -> None:
    """Undo `shape`."""
    for name in namespaces:
        _run("ip", "netns", "exec", name, "tc", "qdisc", "delete", "dev", LINK, "root")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)

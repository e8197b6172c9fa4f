"""Runs the `main` of a module within a network namespace: `python -m tests.integration.support.in_namespace NAME MODULE
ARGUMENTS`, where NAME is a namespace of `ip netns`."""

from __future__ import annotations

import ctypes
import importlib
import os
import sys

_CLONE_NEWNET = 0x40000000


def main() -> None:
    namespace, module, *arguments = sys.argv[1:]
    # Python has os.setns from 3.12 on.
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    if libc.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")
    os.close(descriptor)
    sys.argv = [module, *arguments]
    importlib.import_module(module).main()


if __name__ == "__main__":
    main()

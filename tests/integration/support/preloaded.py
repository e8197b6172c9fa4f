"""What the server of forked.py has imported when it forks a process. Only that server imports this module."""

from __future__ import annotations

import gc
import importlib

# Collections find nothing here. A later one in a forked process would visit, and so copy, the memory of all modules.
gc.disable()
for module in ("tests.integration.support.training", "paramserver.server"):
    importlib.import_module(module)
gc.collect()
gc.freeze()
gc.enable()

"""What the server of forked.py has imported when it forks a process. Only that server imports this module."""

from __future__ import annotations

import gc
import importlib
import os

# torch asks NVML then whether there is a GPU, and not CUDA's runtime, which cannot be used in a process that was forked
# after such a question.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
# Collections find nothing here. A later one in a forked process would visit, and so copy, the memory of all modules.
gc.disable()
MODULES = (
    # gRPC comes before trainer_client, which would import it with fewer lines for the log. Daemons log them all.
    "grpc",
    "tests.integration.support.training",
    "paramserver.cli",
    "paramserver.admin.cli",
    "paramserver.server",
    "uvloop",
    # A trainer imports this when it needs it.
    "trainer_client.exchange.dcp_format",
)
for module in MODULES:
    importlib.import_module(module)
gc.collect()
gc.freeze()
gc.enable()

"""The constant of `deepspeed.launcher.runner` that `accelerate launch` imports before it starts ranks."""

from __future__ import annotations

__all__ = ["DEEPSPEED_ENVIRONMENT_NAME"]

# The file in which `accelerate launch` leaves environment variables for DeepSpeed's own launcher of several machines.
# This library has no such launcher and does not read the file; docs/accelerate.md says how several machines are used.
DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"

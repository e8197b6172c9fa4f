"""DeepSpeed's `deepspeed.launcher`: the name that other launchers import. `paramserver launch` is the launcher here."""

from __future__ import annotations

from trainer_client.launcher import runner

__all__ = ["runner"]

"""The sections `activation_checkpointing` and `checkpoint`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from trainer_client.base.section import Section
from trainer_client.config.deepspeed_keys import with_rows


@with_rows("activation_checkpointing")
class ActivationCheckpointingSection(Section):
    """The section `activation_checkpointing`: what becomes of boundaries, the saved inputs of checkpointed parts.

    It holds for DeepSpeed's checkpoint functions and for torch's.
    """

    cpu_checkpointing: bool = Field(
        default=False,
        description="move boundaries to the store's host memory, and to NVMe where that is full: "
        "[large models](large-models.md#activations)",
    )
    synchronize_checkpoint_boundary: bool = Field(
        default=False, description="wait for the device at each boundary that is moved"
    )
    profile: bool = Field(default=False, description="log bytes and waits of the boundaries of each step")


@with_rows("checkpoint")
class CheckpointSection(Section):
    """The section `checkpoint`: how `save_checkpoint` and `load_checkpoint` treat DeepSpeed's checkpoints."""

    tag_validation: Annotated[
        Literal["Ignore", "Warn", "Fail"],
        BeforeValidator(lambda value: value.capitalize() if isinstance(value, str) else value),
        Field(description="of `save_checkpoint`: compare the tags of ranks: `Ignore`, `Warn`, `Fail`"),
    ] = "Warn"
    load_universal: bool = Field(
        default=False,
        description="without a tag, `load_checkpoint` reads `latest_universal` instead of `latest`",
    )

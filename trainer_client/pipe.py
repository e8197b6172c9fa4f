"""DeepSpeed's pipeline parallelism, which is not built. The names can be imported, for scripts that test for them."""

from __future__ import annotations

from trainer_client.not_built import NotBuilt

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]

_REMEDY = (
    "pipeline parallelism is not built; stage 3 with offload_param trains a model that is larger than a device, so "
    "pass the model as one nn.Module"
)


class PipelineModule(NotBuilt, remedy=_REMEDY):
    """DeepSpeed's model in stages."""


class LayerSpec(NotBuilt, remedy=_REMEDY):
    """DeepSpeed's description of a layer that one stage builds."""


class TiedLayerSpec(NotBuilt, remedy=_REMEDY):
    """DeepSpeed's description of a layer that several stages share."""

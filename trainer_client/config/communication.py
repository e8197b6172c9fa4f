"""The keys of the config about how gradients are clipped and sent between the ranks."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat

from trainer_client.config.precision import DTypeName
from trainer_client.section import Section
from trainer_client.standing import Refused, WithoutEffect

_DIVIDED_FIRST = (
    "gradients are always divided by the number of ranks before they are added, which differs in rounding only"
)


def _in_lower_case(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


class CommunicationKeys(Section):
    """The keys of the config that say how gradients are clipped and added over the ranks."""

    gradient_clipping: NonNegativeFloat = Field(default=0.0, description="limit of the gradient's global norm; 0: none")
    communication_data_type: DTypeName | None = Field(
        default=None,
        description="in which gradients are added over the ranks: `fp32`, `bf16`, `fp16`; null: the parameter's",
    )
    gradient_allreduce_op: Annotated[Literal["mean", "sum"], BeforeValidator(_in_lower_case)] = Field(
        default="mean", description="a step's gradient: the `mean` of those of the ranks, or their `sum`; stages 0 to 2"
    )
    sparse_gradients: Annotated[
        bool,
        Refused(
            why="gradients of embeddings are dense in the store",
            instead="set it to false, and build embeddings with sparse=False",
        ),
        Field(description="exchange gradients of embeddings in sparse form"),
    ] = False
    prescale_gradients: Annotated[
        bool,
        WithoutEffect(why=_DIVIDED_FIRST),
        Field(description="divide gradients before they are added over the ranks"),
    ] = False
    gradient_predivide_factor: Annotated[
        float, WithoutEffect(why=_DIVIDED_FIRST), Field(description="factor of that division")
    ] = 1.0
    seq_parallel_communication_data_type: Annotated[
        str | None,
        WithoutEffect(why="there is no sequence parallelism"),
        Field(description="dtype of gradients between ranks of one sequence"),
    ] = "fp32"
    disable_allgather: Annotated[
        bool, WithoutEffect(why="DeepSpeed does not read it either"), Field(description="nothing in DeepSpeed 0.19")
    ] = False

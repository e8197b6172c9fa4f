"""What comes in over the wire is checked field by field; each refusal names the field and the value."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, get_args

import grpc
import pytest

import trainer_client
from paramserver import vocabulary
from paramserver.contract.dtypes import WIRE_DTYPES
from paramserver.contract.limits import MAX_CLIENT_STATE_BYTES
from paramserver.contract.optimizers.optimizer import HyperParameters
from paramserver.contract.words import words_of
from paramserver.errors import LateError, UnavailableError
from paramserver.rpc import convert
from paramserver.rpc.status import status_code
from paramserver.v1 import parameter_store_pb2 as pb
from storage.base import errors
from storage.base.errors import InvalidRequestError, NewerFormatError
from storage.base.shard import DType, Durability, Kind, TierName

HUGE = (1 << 64) - 1


def open_job(**changes: Any) -> pb.OpenJobRequest:
    fields: dict[str, Any] = {
        "job": "job",
        "run_id": "run",
        "rank": 1,
        "world_size": 4,
        "attached_ranks": 2,
        "parameters": [pb.Parameter(fqn="w", shape=[2, 3], dtype=pb.DTYPE_BFLOAT16, trainable=True)],
        "durability": pb.Durability(step=pb.Durability.Step()),
    }
    return pb.OpenJobRequest(**(fields | changes))


def kinds(*names: str, param: pb.DType = pb.DTYPE_BFLOAT16) -> list[pb.KindSpec]:
    return [
        pb.KindSpec(
            kind=f"KIND_{name}",
            dtype=param if name in ("PARAM", "GRAD") else pb.DTYPE_FLOAT32,
            placement=pb.TIER_NVME,
        )
        for name in names
    ]


def shard_group(**changes: Any) -> pb.ShardGroup:
    fields: dict[str, Any] = {
        "name": "unit[0:32]",
        "numel": 32,
        "shards": [pb.Shard(fqn="w", offset=0, numel=20, position=0)],
        "kinds": kinds("PARAM", "MASTER", "EXP_AVG", "EXP_AVG_SQ", "GRAD"),
    }
    return pb.ShardGroup(**(fields | changes))


def adamw(**changes: Any) -> pb.ApplyGradientsRequest.HyperParameters:
    fields = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "update_count": 1}
    return pb.ApplyGradientsRequest.HyperParameters(adamw=pb.AdamW(**(fields | changes)))


def adam(**changes: Any) -> pb.ApplyGradientsRequest.HyperParameters:
    fields = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "update_count": 1}
    return pb.ApplyGradientsRequest.HyperParameters(adam=pb.Adam(**(fields | changes)))


def sgd(**changes: Any) -> pb.ApplyGradientsRequest.HyperParameters:
    fields: dict[str, Any] = {"lr": 1e-3, "momentum": 0.9, "update_count": 1}
    return pb.ApplyGradientsRequest.HyperParameters(sgd=pb.Sgd(**(fields | changes)))


def lion(**changes: Any) -> pb.ApplyGradientsRequest.HyperParameters:
    fields = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}
    return pb.ApplyGradientsRequest.HyperParameters(lion=pb.Lion(**(fields | changes)))


def adagrad(**changes: Any) -> pb.ApplyGradientsRequest.HyperParameters:
    fields = {"lr": 1e-2, "eps": 1e-10, "update_count": 1}
    return pb.ApplyGradientsRequest.HyperParameters(adagrad=pb.Adagrad(**(fields | changes)))


def test_a_job_is_taken_as_it_is_described() -> None:
    spec = convert.job_spec(open_job())
    assert (spec.name, spec.world_size, spec.local_ranks) == ("job", 4, 2)
    (parameter,) = spec.parameters
    assert (parameter.fqn, parameter.shape, parameter.dtype) == ("w", (2, 3), DType.BFLOAT16)
    assert spec.durability == Durability(every_steps=1)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"job": ""}, "job must be 1 to 1024 bytes of printable text; it is ''"),
        ({"job": "a\nb"}, "job must be .* printable"),
        ({"job": "x" * 1025}, "job must be 1 to 1024 bytes"),
        ({"world_size": 0}, "world_size 0"),
        ({"world_size": 1 << 30}, f"world_size {1 << 30}"),
        ({"attached_ranks": 0}, "attached_ranks 0"),
        ({"attached_ranks": 5}, "world_size 4 and attached_ranks 5"),
        ({"rank": 4}, "rank 4 is not below world_size 4"),
        ({"durability": pb.Durability()}, "durability is not set; set step, snapshot or none"),
        ({"durability": pb.Durability(snapshot=pb.Durability.Snapshot())}, "snapshot.every_steps 0"),
        ({"durability": pb.Durability(snapshot=pb.Durability.Snapshot(every_steps=HUGE))}, "snapshot.every_steps"),
        ({"parameters": [pb.Parameter(fqn="w", shape=[1])]}, "dtype of parameter 'w' has the value 0"),
        ({"parameters": [pb.Parameter(fqn="", dtype=pb.DTYPE_FLOAT32)]}, r"parameters\.fqn must be"),
        ({"parameters": [pb.Parameter(fqn="w", dtype=pb.DTYPE_FLOAT32)] * 2}, "listed twice in `parameters`"),
        (
            {"parameters": [pb.Parameter()] * (convert.MAX_PARAMETERS + 1)},
            "parameters has 262145 entries; at most",
        ),
        (
            {"parameters": [pb.Parameter(fqn="w", dtype=pb.DTYPE_FLOAT32, shape=[1] * 65)]},
            "shape of parameter 'w' has 65 entries; at most 64",
        ),
        (
            {"parameters": [pb.Parameter(fqn="w", dtype=pb.DTYPE_FLOAT32, shape=[HUGE, HUGE])]},
            rf"parameter 'w' of shape \[{HUGE}, {HUGE}\] has more than {1 << 48} elements",
        ),
        (
            {"parameters": [pb.Parameter(fqn="w", dtype=pb.DTYPE_FLOAT32, shape=[1 << 24, (1 << 24) + 1])]},
            "has more than 281474976710656 elements",
        ),
    ],
)
def test_a_malformed_job_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        convert.job_spec(open_job(**changes))


@pytest.mark.parametrize("every_steps", [0, 1, 2, 1000])
def test_durability_survives_the_wire(every_steps: int) -> None:
    value = Durability(every_steps=every_steps)
    assert convert.durability(convert.durability_to_wire(value)) == value


def test_a_group_is_taken_as_it_is_described() -> None:
    spec = convert.group_spec(shard_group())
    assert (spec.name, spec.numel, spec.shards[0].numel) == ("unit[0:32]", 32, 20)
    assert spec.slab_of_kind[Kind.PARAM].dtype is DType.BFLOAT16
    assert spec.slab_of_kind[Kind.MASTER].placement is TierName.NVME


@pytest.mark.parametrize(
    "good",
    [
        kinds("PARAM"),
        kinds("PARAM", "EXP_AVG", "EXP_AVG_SQ", "GRAD", param=pb.DTYPE_FLOAT32),
        kinds("PARAM", "MASTER", "EXP_AVG", "EXP_AVG_SQ", "GRAD"),
        kinds("PARAM", "GRAD", param=pb.DTYPE_FLOAT32),
        kinds("PARAM", "MASTER", "GRAD"),
        kinds("PARAM", "MASTER", "MOMENTUM_BUFFER", "GRAD"),
        kinds("PARAM", "MASTER", "SUM", "GRAD"),
        kinds("PARAM", "EXP_AVG", "GRAD", param=pb.DTYPE_FLOAT32),
    ],
    ids=["frozen", "fp32", "bf16", "no states", "no states in bf16", "momentum", "adagrad", "lion"],
)
def test_the_kinds_that_a_client_declares_are_accepted(good: list[pb.KindSpec]) -> None:
    assert len(convert.group_spec(shard_group(kinds=good)).slabs) == len(good)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"name": ""}, r"groups\.name must be"),
        ({"name": "\x00"}, r"groups\.name must be"),
        ({"numel": HUGE}, f"numel {HUGE} is above"),
        ({"numel": 17}, "numel 17 must be a positive multiple of 16"),
        ({"shards": [pb.Shard(fqn="", numel=1)]}, "shards.fqn of group"),
        ({"shards": [pb.Shard(fqn="w", numel=HUGE)]}, f"shard 'w' at position 0, {HUGE} elements"),
        ({"shards": [pb.Shard(fqn="w", numel=1, position=HUGE)]}, f"position {HUGE}"),
        ({"shards": [pb.Shard(fqn="w", numel=1, offset=HUGE)]}, f"offset {HUGE}"),
        ({"kinds": []}, "no slab of kind param"),
        (
            {"kinds": kinds("PARAM") * (len(Kind) + 1)},
            f"kinds of group 'unit.0:32.' has {len(Kind) + 1} entries; at most {len(Kind)}",
        ),
        ({"kinds": kinds("PARAM", "PARAM")}, "names a kind twice"),
        ({"kinds": [pb.KindSpec(kind=99, dtype=pb.DTYPE_FLOAT32, placement=pb.TIER_HOST)]}, "kind has the value 99"),  # type: ignore[arg-type]
        ({"kinds": [pb.KindSpec(kind=pb.KIND_PARAM, placement=pb.TIER_HOST)]}, "dtype of group .* value 0"),
        ({"kinds": [pb.KindSpec(kind=pb.KIND_PARAM, dtype=pb.DTYPE_FLOAT32)]}, "placement of group .* value 0"),
        (
            {
                "kinds": [
                    *kinds("PARAM"),
                    pb.KindSpec(kind=pb.KIND_MASTER, dtype=pb.DTYPE_FLOAT16, placement=pb.TIER_HOST),
                ]
            },
            "kind master must be float32, not float16",
        ),
        ({"kinds": kinds("PARAM", "EXP_AVG", "EXP_AVG_SQ", "GRAD")}, "its param is bfloat16: updates need kind master"),
        (
            {"kinds": kinds("PARAM", "MASTER", "EXP_AVG", "EXP_AVG_SQ", "SUM", "GRAD")},
            "optimizer states exp_avg, exp_avg_sq, sum; no optimizer here has more than 2",
        ),
        (
            {
                "kinds": [
                    *kinds("PARAM"),
                    pb.KindSpec(kind=pb.KIND_SUM, dtype=pb.DTYPE_BFLOAT16, placement=pb.TIER_HOST),
                ]
            },
            "kind sum must be float32, not bfloat16",
        ),
        ({"kinds": kinds("PARAM", "MASTER", param=pb.DTYPE_FLOAT32)}, "float32 and is the master weight itself"),
    ],
)
def test_a_malformed_group_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        convert.group_spec(shard_group(**changes))


def test_a_codec_that_is_not_known_is_refused_by_name() -> None:
    state = pb.KindSpec(kind=pb.KIND_EXP_AVG, dtype=pb.DTYPE_FLOAT32, placement=pb.TIER_HOST)
    for codec, refused, named in (
        ("int3", NewerFormatError, "written by a newer release, or asked for by one: codec 'int3'"),
        ("x" * 5000, InvalidRequestError, "codec of group 'unit"),
    ):
        state.codec = codec
        with pytest.raises(refused, match=named):
            convert.group_spec(shard_group(kinds=[*kinds("PARAM", "MASTER", "EXP_AVG_SQ", "GRAD"), state]))


def test_groups_lie_inside_the_parameters_of_their_job() -> None:
    job = convert.job_spec(open_job(parameters=[pb.Parameter(fqn="w", shape=[4, 9], dtype=pb.DTYPE_BFLOAT16)]))
    assert [spec.name for spec in convert.group_specs(job, [shard_group()])] == ["unit[0:32]"]
    whole = shard_group(numel=48, shards=[pb.Shard(fqn="w", offset=16, numel=20)])
    assert convert.group_specs(job, [whole])
    for shard, named in (
        (pb.Shard(fqn="v", numel=1), "a shard of 'v', which is no parameter of job 'job'"),
        (pb.Shard(fqn="w", offset=16, numel=21), "21 elements from 16 leave 'w', which has 36"),
        (pb.Shard(fqn="w", offset=HUGE - 15, numel=1), f"1 elements from {HUGE - 15} leave 'w'"),
    ):
        with pytest.raises(InvalidRequestError, match=named):
            convert.group_specs(job, [shard_group(numel=48, shards=[shard])])


def test_groups_and_shards_of_a_request_are_bounded() -> None:
    job = convert.job_spec(open_job())
    with pytest.raises(InvalidRequestError, match="groups has 65537 entries; at most 65536"):
        convert.group_specs(job, [pb.ShardGroup()] * (convert.MAX_GROUPS + 1))
    crowded = [pb.ShardGroup(shards=[pb.Shard()] * (1 << 17))] * 2
    with pytest.raises(InvalidRequestError, match="groups have 262145 shards; at most 262144"):
        convert.group_specs(job, [*crowded, pb.ShardGroup(shards=[pb.Shard()])])


@pytest.mark.parametrize("value", [convert.MAX_STEP + 1, 1 << 63, HUGE])
def test_steps_and_positions_that_are_not_exact_everywhere_are_refused(value: int) -> None:
    assert convert.step(convert.MAX_STEP, "step") == convert.position(convert.MAX_STEP, "position") == (1 << 53) - 1
    with pytest.raises(InvalidRequestError, match=f"settled_step is {value}; at most {(1 << 53) - 1}"):
        convert.step(value, "settled_step")
    with pytest.raises(InvalidRequestError, match=f"next_use is {value}"):
        convert.position(value, "next_use")


def test_batches_and_client_states_are_bounded() -> None:
    assert len(convert.batch(range(convert.MAX_BATCH), "wants")) == convert.MAX_BATCH
    with pytest.raises(InvalidRequestError, match="wants has 16385 entries; at most 16384 are allowed"):
        convert.batch(range(convert.MAX_BATCH + 1), "wants")
    assert len(convert.client_state(bytes(MAX_CLIENT_STATE_BYTES))) == 2 << 20
    with pytest.raises(InvalidRequestError, match="client_state has 2097153 bytes; at most 2097152"):
        convert.client_state(bytes(MAX_CLIENT_STATE_BYTES + 1))


@pytest.mark.parametrize(
    ("row", "named"),
    [
        (adamw(lr=-1.0), r"adamw\.lr = -1\.0"),
        (adamw(lr=math.nan), r"adamw\.lr = nan"),
        (adamw(lr=math.inf), r"adamw\.lr = inf"),
        (adamw(beta1=1.0), r"adamw\.beta1 = 1\.0"),
        (adamw(beta2=-0.1), r"adamw\.beta2 = -0\.1"),
        (adamw(beta2=math.nan), r"adamw\.beta2 = nan"),
        (adamw(eps=-1e-8), r"adamw\.eps"),
        (adamw(weight_decay=math.inf), r"adamw\.weight_decay = inf"),
        (adamw(update_count=0), r"adamw\.update_count = 0"),
        (adamw(update_count=HUGE), rf"adamw\.update_count = {HUGE}"),
        (adam(beta1=math.nan), r"adam\.beta1 = nan"),
        (adam(update_count=0), r"adam\.update_count = 0"),
        (sgd(lr=-1.0), r"sgd\.lr = -1\.0"),
        (sgd(momentum=-0.5), r"sgd\.momentum = -0\.5"),
        (sgd(dampening=math.inf), r"sgd\.dampening = inf"),
        (sgd(weight_decay=math.nan), r"sgd\.weight_decay = nan"),
        (sgd(update_count=0), r"sgd\.update_count = 0"),
        (sgd(nesterov=True, momentum=0.0), r"sgd\.nesterov needs a momentum and no dampening; they are 0\.0 and 0\.0"),
        (sgd(nesterov=True, dampening=0.5), r"sgd\.nesterov needs .* they are 0\.9 and 0\.5"),
        (lion(lr=math.inf), r"lion\.lr = inf"),
        (lion(beta2=1.0), r"lion\.beta2 = 1\.0"),
        (lion(weight_decay=-1.0), r"lion\.weight_decay = -1\.0"),
        (adagrad(lr_decay=-1.0), r"adagrad\.lr_decay = -1\.0"),
        (adagrad(eps=math.nan), r"adagrad\.eps = nan"),
        (adagrad(initial_accumulator_value=-1.0), r"adagrad\.initial_accumulator_value = -1\.0"),
        (adagrad(update_count=0), r"adagrad\.update_count = 0"),
    ],
)
def test_hyper_parameters_that_torch_would_refuse_are_refused(row: HyperParameters, named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        convert.hyper_parameters(row)


def test_hyper_parameters_that_torch_takes_are_taken() -> None:
    for row in (adamw(), adam(), sgd(), sgd(nesterov=True), sgd(momentum=1.5), lion(), adagrad()):
        assert convert.hyper_parameters(row) == row


def test_an_optimizer_that_is_not_set_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="optimizer is not set; known are adamw, adam, sgd"):
        convert.hyper_parameters(pb.ApplyGradientsRequest.HyperParameters())


@pytest.mark.parametrize(
    ("indexes", "scale", "named"),
    [
        ([], 1.0, "has 1 shards, hyper_parameters_of_shard has 0 entries"),
        ([0, 0], 1.0, "has 1 shards, hyper_parameters_of_shard has 2 entries"),
        ([1], 1.0, "must be -1 or an index below 1"),
        ([-2], 1.0, "must be -1 or an index below 1"),
        ([0], math.nan, "grad_scale nan is not finite"),
        ([0], -math.inf, "grad_scale -inf is not finite"),
    ],
)
def test_an_update_that_does_not_fit_its_group_is_refused(indexes: list[int], scale: float, named: str) -> None:
    group, known = convert.group_spec(shard_group()), [convert.hyper_parameters(adamw())]

    def update(indexes: list[int], scale: float) -> pb.ApplyGradientsRequest.GroupUpdate:
        return pb.ApplyGradientsRequest.GroupUpdate(
            group=group.name, grad_scale=scale, hyper_parameters_of_shard=indexes
        )

    assert convert.optimizer_update(group, update([-1], 1.0), known).hyper_parameters == [None]
    with pytest.raises(InvalidRequestError, match=named):
        convert.optimizer_update(group, update(indexes, scale), known)


@pytest.mark.parametrize(
    ("states", "fits", "row", "missing"),
    [
        (("EXP_AVG", "EXP_AVG_SQ"), [adamw(), adam(), lion(), sgd(momentum=0.0)], adagrad(), "adagrad.*without sum"),
        (("EXP_AVG",), [lion()], adamw(), "adamw: it was registered without exp_avg_sq"),
        (("MOMENTUM_BUFFER",), [sgd(), sgd(momentum=0.0)], lion(), "lion.*without exp_avg"),
        ((), [sgd(momentum=0.0)], sgd(), "sgd.*without momentum_buffer"),
        (("SUM",), [adagrad()], adam(), "adam.*without exp_avg, exp_avg_sq"),
    ],
)
def test_a_group_is_updated_by_the_optimizers_whose_states_it_has(
    states: tuple[str, ...], fits: list[HyperParameters], row: HyperParameters, missing: str
) -> None:
    group = convert.group_spec(shard_group(kinds=kinds("PARAM", "MASTER", *states, "GRAD")))
    update = pb.ApplyGradientsRequest.GroupUpdate(group=group.name, grad_scale=1.0, hyper_parameters_of_shard=[0])
    for good in fits:
        assert convert.optimizer_update(group, update, [good]).hyper_parameters == [good]
    with pytest.raises(InvalidRequestError, match=missing):
        convert.optimizer_update(group, update, [row])
    update.hyper_parameters_of_shard[:] = [-1]
    assert convert.optimizer_update(group, update, [row]).hyper_parameters == [None]


def test_a_shard_without_bytes_of_a_state_is_updated_by_the_optimizers_that_do_not_need_it() -> None:
    message = shard_group(kinds=kinds("PARAM", "MASTER", "MOMENTUM_BUFFER", "GRAD"))
    message.numel = 4096
    del message.shards[:]
    message.shards.add(fqn="kept", numel=2048)
    message.shards.add(fqn="lacking", numel=2048, position=2048)
    message.kinds[2].codec = "plain@0,absent@2048"
    group = convert.group_spec(message)
    update = pb.ApplyGradientsRequest.GroupUpdate(group=group.name, grad_scale=1.0, hyper_parameters_of_shard=[0, 1])
    rows = [sgd(), sgd(momentum=0.0)]
    assert convert.optimizer_update(group, update, rows).hyper_parameters == rows
    update.hyper_parameters_of_shard[:] = [0, 0]
    with pytest.raises(InvalidRequestError, match=r"'lacking' in group .* by sgd: .* without momentum_buffer"):
        convert.optimizer_update(group, update, rows)


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_a_clip_value_is_positive_or_absent(value: float) -> None:
    group = convert.group_spec(shard_group())
    update = pb.ApplyGradientsRequest.GroupUpdate(group=group.name, grad_scale=1.0, hyper_parameters_of_shard=[0])
    assert convert.optimizer_update(group, update, [adamw()]).clip_value is None
    update.grad_clip_value = 0.25
    assert convert.optimizer_update(group, update, [adamw()]).clip_value == 0.25
    update.grad_clip_value = value
    with pytest.raises(InvalidRequestError, match=f"grad_clip_value {value} must be positive and finite"):
        convert.optimizer_update(group, update, [adamw()])


def test_every_enum_of_the_wire_is_known_or_refused() -> None:
    assert set(vocabulary.KIND_TO_WIRE.values()) == set(pb.Kind.values()) - {pb.KIND_UNSPECIFIED}
    assert set(vocabulary.DTYPE_TO_WIRE.values()) == set(pb.DType.values()) - {pb.DTYPE_UNSPECIFIED}
    assert set(vocabulary.TIER_TO_WIRE.values()) == set(pb.Tier.values()) - {pb.TIER_UNSPECIFIED}
    with pytest.raises(InvalidRequestError, match="kind has the value 0"):
        convert.kind(pb.KIND_UNSPECIFIED)
    # The kinds that can be asked for by name, and torch's names of the types.
    stored = {kind.value for kind in Kind} - {"grad"}
    assert stored == set(get_args(trainer_client.Kind))
    assert {dtype.torch: value for dtype, value in vocabulary.DTYPE_TO_WIRE.items()} == WIRE_DTYPES
    for words, wire in ((Kind, pb.Kind), (DType, pb.DType), (TierName, pb.Tier)):
        assert {word.value for word in words} == set(words_of(wire))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidRequestError, grpc.StatusCode.INVALID_ARGUMENT),
        (errors.NotFoundError, grpc.StatusCode.NOT_FOUND),
        (errors.AlreadyExistsError, grpc.StatusCode.ALREADY_EXISTS),
        (errors.ConflictError, grpc.StatusCode.FAILED_PRECONDITION),
        (errors.BudgetExceededError, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (errors.DiskFullError, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (errors.StepAbortedError, grpc.StatusCode.ABORTED),
        (errors.DataLossError, grpc.StatusCode.DATA_LOSS),
        (errors.DeviceStuckError, grpc.StatusCode.UNAVAILABLE),
        (errors.DeviceError, grpc.StatusCode.INTERNAL),
        (UnavailableError, grpc.StatusCode.UNAVAILABLE),
        (LateError, grpc.StatusCode.DEADLINE_EXCEEDED),
        (errors.StorageError, grpc.StatusCode.INTERNAL),
    ],
)
def test_errors_have_the_status_codes_of_the_contract(
    error: Callable[[str], errors.StorageError], code: grpc.StatusCode
) -> None:
    assert status_code(error("x")) is code

"""Engines for inference: the logits of the plain model bit for bit, from a committed step, within a budget, shared."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_model
from torch import nn

import trainer_client
from tests.integration.support.daemon import MIB, Daemon, tiers
from tests.integration.support.forked import ROOT
from tests.integration.support.training import Run, build_model, micro_batches
from trainer_client.errors import ConfigError, PhaseError, StoreNotFoundError

TOKENS = torch.randint(0, 250, (2, 16), generator=torch.Generator().manual_seed(0))
NEW_TOKENS = 3
# A budget with room for some units of the models, and not for all.
FEW_BYTES = 320 << 10


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        n_layer=6, n_embd=64, n_head=4, vocab_size=256, n_positions=64, bos_token_id=None, eos_token_id=None
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config)


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        vocab_size=256,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.MixtralForCausalLM(config)


def made(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return build().bfloat16().eval()


def config_for(address: str, job: str, host_bytes: int | None = None, **section: Any) -> dict[str, Any]:
    inference = {"host_bytes": host_bytes} | section
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3},
        "paramserver": {"address": address, "job": job, "inference": inference},
    }


def opened(model: nn.Module, config: dict[str, Any], **arguments: Any) -> trainer_client.InferenceEngine:
    engine, *others = trainer_client.initialize(model=model, config=config, **arguments)
    assert others == [None, None, None]
    assert isinstance(engine, trainer_client.InferenceEngine)
    return engine


@torch.no_grad()
def outputs(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of the model, and the tokens that it generates."""
    logits = model(TOKENS).logits
    return logits, model.generate(TOKENS, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)


def assert_equal(actual: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("inference") / "state", {"host_budget": "32MiB", "nvme_budget": "1GiB"}) as it:
        yield it
        assert "Traceback" not in it.log, it.log


@pytest.mark.parametrize("build", [gpt2, llama, mixtral])
def test_logits_and_generated_tokens_are_those_of_the_plain_model(
    store: Daemon, build: Callable[[], nn.Module]
) -> None:
    expected = outputs(model := made(build))
    whole = sum(parameter.nbytes for parameter in model.parameters())
    # The first engine puts the model into the store, and the others find it there, with parameters on the meta device.
    for host_bytes, streams in ((None, False), (max(whole // 5, FEW_BYTES), True), (0, True)):
        with opened(
            copy.deepcopy(model), config_for(store.address, build.__name__, host_bytes), prefer_streams=host_bytes == 0
        ) as engine:
            for _ in range(2):
                assert_equal(outputs(engine), expected)
            assert (engine.train_micro_batch_size_per_gpu(), engine.zero_optimization_stage()) == (2, 3)
            assert engine.config is engine.module.config
            # The model itself computes the same.
            assert_equal(outputs(engine.module), expected)
            state = engine.full_state_dict()
            assert state.keys() == model.state_dict().keys()
            assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
            if streams:
                with pytest.raises(RuntimeError, match=r"engine\.full_state_dict"):
                    engine.module.state_dict()


@pytest.mark.parametrize("host_bytes", [None, 0])
def test_an_engine_is_moved_and_converted_to_nothing_else(store: Daemon, host_bytes: int | None) -> None:
    with opened(made(gpt2), config_for(store.address, "converted", host_bytes)) as engine:
        assert engine.to("cpu") is engine
        assert engine.to(torch.bfloat16) is engine
        with pytest.raises(RuntimeError, match=r"stay torch\.bfloat16 on cpu, and cannot become torch\.float32 on cpu"):
            engine.float()
        with pytest.raises(RuntimeError, match=r"cannot become torch\.bfloat16 on meta: pass dtype="):
            engine.to("meta")


def test_a_budget_is_kept_while_a_model_is_streamed(store: Daemon) -> None:
    model = made(llama)
    before = tiers(store.address)[0].used_bytes
    used = []
    with opened(copy.deepcopy(model), config_for(store.address, "budget", FEW_BYTES)) as engine:
        handle = engine.module.model.layers[3].mlp.register_forward_hook(
            lambda *_: used.append(tiers(store.address)[0].used_bytes - before)
        )
        for _ in range(3):
            engine(TOKENS)
        handle.remove()
    assert max(used) <= FEW_BYTES < sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_weights_are_cast_where_the_model_has_another_dtype(store: Daemon, stored: torch.dtype) -> None:
    wanted = torch.bfloat16 if stored is torch.float32 else torch.float32
    torch.manual_seed(3)
    model = llama().eval().to(stored)
    config = config_for(store.address, f"cast-{stored}")
    with opened(copy.deepcopy(model), config):
        before = tiers(store.address)[0].used_bytes
    model.to(wanted)
    expected = outputs(model)

    # All units stay, or some are fetched for each use, or each is read part by part, or they are sent in streams.
    for host_bytes, prefer_streams in ((None, False), (FEW_BYTES, False), (0, False), (None, True)):
        section = config_for(store.address, f"cast-{stored}", host_bytes)
        with opened(copy.deepcopy(model), section, prefer_streams=prefer_streams) as engine:
            for _ in range(2):
                assert_equal(outputs(engine), expected)
            assert tiers(store.address)[0].used_bytes <= before
            state = engine.full_state_dict()
            assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


def test_engines_share_one_copy_and_a_write_stays_in_its_process(store: Daemon) -> None:
    expected = outputs(model := made(gpt2))
    config = config_for(store.address, "shared")
    before = tiers(store.address)[0].used_bytes
    with opened(copy.deepcopy(model), config) as first:
        with_one = tiers(store.address)[0].used_bytes
        assert with_one - before >= sum(parameter.nbytes for parameter in model.parameters())
        with opened(copy.deepcopy(model), config) as second:
            assert tiers(store.address)[0].used_bytes == with_one
            second.module.transformer.h[0].mlp.c_fc.weight.data.zero_()
            assert not torch.equal(second(TOKENS).logits, expected[0])
            assert_equal(outputs(first), expected)
        # The leases of the first one outlast those of the second one.
        assert_equal(outputs(first), expected)


def test_a_write_to_a_streamed_weight_is_gone_at_its_next_use(store: Daemon) -> None:
    expected = outputs(model := made(gpt2))
    with opened(copy.deepcopy(model), config_for(store.address, "written", FEW_BYTES)) as engine:

        def write(module: nn.Module, *_: Any) -> None:
            module.weight.data.zero_()

        handles = [block.ln_1.register_forward_hook(write) for block in engine.module.transformer.h]
        engine(TOKENS)
        for handle in handles:
            handle.remove()
        assert_equal(outputs(engine), expected)


def test_a_step_is_held_while_training_commits_further_steps(store: Daemon) -> None:
    run = Run(steps=4)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "paramserver": {"address": store.address, "job": "trained"},
    }
    data = list(micro_batches(4))
    plain = build_model(run).bfloat16().eval()
    bf16 = {"bf16": {"enabled": True}}

    def assert_computes_as(engine: trainer_client.InferenceEngine, weights: dict[str, torch.Tensor]) -> None:
        plain.load_state_dict(weights)
        with torch.no_grad():
            assert torch.equal(engine(input_ids=data[0]).logits, plain(input_ids=data[0]).logits)

    with trainer_client.initialize(model=build_model(run), config=config)[0] as trainer:
        held: list[tuple[trainer_client.InferenceEngine, dict[str, torch.Tensor]]] = []
        for batch in data:
            trainer.backward(trainer(input_ids=batch, labels=batch).loss)
            trainer.step()
            trainer.wait_for_commit()
            if trainer.global_steps in (1, 3):
                weights = {name: value.bfloat16() for name, value in trainer.full_state_dict().items()}
                few = None if trainer.global_steps == 1 else FEW_BYTES
                engine = opened(build_model(run), config_for(store.address, "trained", few) | bf16)
                assert engine.step_number == trainer.global_steps
                held.append((engine, weights))
            for engine, weights in held:
                assert_computes_as(engine, weights)
        for engine, weights in held:
            assert_computes_as(engine, weights)
            engine.close()
        newest = {name: value.bfloat16() for name, value in trainer.full_state_dict().items()}
    plain.float()
    with opened(build_model(run), config_for(store.address, "trained")) as engine:
        assert_computes_as(engine, newest)
    with pytest.raises(StoreNotFoundError, match="step 1"):
        opened(build_model(run), config_for(store.address, "trained", step=1) | bf16)


def test_an_engine_goes_on_with_the_next_daemon(tmp_path: Path) -> None:
    expected = outputs(model := made(gpt2))
    config = {"host_budget": "16MiB", "nvme_budget": "64MiB"}
    with Daemon(tmp_path / "state", config) as daemon:
        engines = [opened(copy.deepcopy(model), config_for(daemon.address, "g", size)) for size in (None, FEW_BYTES)]
        for engine in engines:
            assert_equal(outputs(engine), expected)
        daemon.kill()
        with Daemon(tmp_path / "state", config):
            for engine in engines:
                assert_equal(outputs(engine), expected)
                engine.close()


def test_a_checkpoint_is_put_into_the_store_once(store: Daemon, tmp_path: Path) -> None:
    expected = outputs(model := made(llama))
    save_model(model, str(tmp_path / "model.safetensors"))
    names = []
    for _ in range(2):
        with torch.device("meta"):
            empty = llama().bfloat16().eval()
        section = {"address": store.address}
        assert trainer_client.load_checkpoint_and_dispatch(empty, tmp_path, "auto", paramserver=section) is empty
        assert_equal(outputs(empty), expected)
        names.append((empty.paramserver_engine.job, empty.paramserver_engine.step_number))
        empty.paramserver_engine.close()
        with pytest.raises(RuntimeError, match="closed"):
            empty(TOKENS)
    assert names[0] == names[1]


def test_init_inference_converts_and_starts_a_daemon_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(3)
    model = gpt2().eval()
    expected = outputs(copy.deepcopy(model).bfloat16())
    budget = {"host_budget": 32 * MIB, "nvme_budget": 256 * MIB}
    with trainer_client.init_inference(model, dtype=torch.bfloat16, max_out_tokens=64, paramserver=budget) as engine:
        assert_equal(outputs(engine), expected)
    assert "without effect in init_inference: max_out_tokens" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"replace_with_kernel_inject": True}, "the model's own forward computes"),
        ({"tensor_parallel": {"tp_size": 2}}, "start several processes"),
        ({"dtype": torch.int8}, "float32, bfloat16 or float16"),
        ({"kernels": True}, "there is no such argument"),
        ({"config": {"dtype": torch.float16}, "dtype": torch.bfloat16}, "differs"),
        ({"zero": {"stage": 1}}, "write 3"),
    ],
)
def test_what_cannot_be_honoured_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer_client.init_inference(gpt2(), **arguments)


def test_wrong_uses_are_errors_that_say_what_to_do(store: Daemon) -> None:
    model = made(gpt2)
    with opened(copy.deepcopy(model), config_for(store.address, "wrong")) as engine:
        with pytest.raises(PhaseError, match="pass an optimizer"):
            engine.backward(torch.zeros(()))
        with pytest.raises(PhaseError, match="pass an optimizer"):
            engine.step()
        with pytest.raises(RuntimeError, match=r"stay torch\.bfloat16"):
            engine.float()
    with pytest.raises(ConfigError, match="another model"):
        opened(made(llama), config_for(store.address, "wrong"))
    with pytest.raises(ConfigError, match=r"lr_scheduler.*needs an optimizer"):
        opened(made(gpt2), config_for(store.address, "wrong"), lr_scheduler=lambda optimizer: optimizer)
    with pytest.raises(ConfigError, match=r"zero_optimization\.stage 3"):
        opened(made(gpt2), config_for(store.address, "wrong") | {"zero_optimization": {"stage": 2}})
    with torch.device("meta"):
        empty = gpt2()
    with pytest.raises(ConfigError, match="meta device: pass checkpoint="):
        trainer_client.disk_offload(empty, paramserver={"address": store.address})


def test_the_examples_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/inference.md").read_text()
    examples = re.findall(r"^```python\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    assert len(examples) == 2
    for example in examples:
        exec(compile(example, "docs/inference.md", "exec"), {})


class Pooled(nn.Module):
    """A classifier that takes the mean of all positions, padded ones included."""

    def __init__(self, *, nested: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)
        self.head = nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor, padded: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.encoder(inputs, src_key_padding_mask=padded).mean(dim=1))
        return output


@pytest.fixture(params=[True, False], ids=["fast path", "no fast path"])
def fast_path(request: pytest.FixtureRequest) -> Iterator[bool]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(request.param)
    yield request.param
    torch.backends.mha.set_fastpath_enabled(before)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize("nested", [True, False])
def test_the_fast_path_of_torchs_encoder_is_left_where_weights_are_released(
    store: Daemon, fast_path: bool, nested: bool
) -> None:
    """docs/models.md says so, and which of torch's settings give the same logits."""
    inputs = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    padded = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])

    def build() -> nn.Module:
        torch.manual_seed(3)
        return Pooled(nested=nested).eval()

    @torch.no_grad()
    def logits_of(model: Any) -> torch.Tensor:
        logits: torch.Tensor = model.eval()(inputs, padded)
        return logits

    plain, frozen = logits_of(build()), logits_of(build().requires_grad_(False))
    # The pairs of logits and of those to which they should be equal, by whether the encoder finds released weights.
    pairs: dict[bool, list[tuple[torch.Tensor, torch.Tensor]]] = {False: [], True: []}
    job = f"encoder {fast_path} {nested}"
    for stage in (0, 2, 3):
        config = config_for(store.address, f"{job} {stage}") | {
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": stage},
        }
        with trainer_client.initialize(model=build(), config=config)[0] as trainer:
            pairs[stage == 3].append((logits_of(trainer), plain))
    for host_bytes in (None, 0):
        with opened(build(), config_for(store.address, job, host_bytes)) as engine:
            pairs[host_bytes == 0].append((logits_of(engine), frozen))
    released = pairs[True]
    if not fast_path:
        assert all(torch.equal(logits, expected) for logits, expected in (*pairs[False], *released))
        return
    for logits, expected in pairs[False] if nested else (*pairs[False], *released):
        torch.testing.assert_close(logits, expected)
    # The second sample has padded positions, and these are 0 only where the encoder finds the weights.
    for logits, expected in released if nested else ():
        torch.testing.assert_close(logits[0], expected[0])
        assert not torch.allclose(logits[1], expected[1], atol=1e-2)

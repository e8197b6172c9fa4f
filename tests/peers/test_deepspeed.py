"""DeepSpeed's own examples run over this library as they stand, but for where their data and weights come from."""

from __future__ import annotations

import json
import math
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import OPTConfig, OPTForCausalLM

from tests.peers import models
from tests.peers.starts import Way, command, run

pytestmark = pytest.mark.peers

CHAT = "applications/DeepSpeed-Chat"
# The packages that the scripts import and that are not in the lock.
PACKAGES = {"HelloDeepSpeed": ("datasets", "fire", "loguru", "pytz", "sh"), CHAT: ("datasets",)}

# Random images in the place of what torchvision downloads, because the scripts take nothing else from it.
TORCHVISION = """
import sys
import types

import torch


class FakeData(torch.utils.data.Dataset):
    def __init__(self, size=256, image_size=(3, 32, 32), num_classes=10, **_):
        self.size, self.image_size, self.num_classes = size, image_size, num_classes

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index >= self.size:
            raise IndexError(index)
        drawn = torch.Generator().manual_seed(index)
        return torch.rand(self.image_size, generator=drawn), int(torch.randint(self.num_classes, (), generator=drawn))


def CIFAR10(root, train=True, download=False, transform=None):
    return FakeData(128 if train else 32)


def Compose(steps):
    return steps


def ToTensor():
    return None


def Normalize(mean, std):
    return None


def save_image(tensor, path, normalize=False):
    torch.save(tensor, path)


datasets, transforms, utils = (types.ModuleType(f"torchvision.{name}") for name in ("datasets", "transforms", "utils"))
datasets.FakeData, datasets.CIFAR10, utils.save_image = FakeData, CIFAR10, save_image
transforms.Compose, transforms.ToTensor, transforms.Normalize = Compose, ToTensor, Normalize
sys.modules |= {module.__name__: module for module in (datasets, transforms, utils)}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One script: where it is, its arguments, what it is compared with, and how close the losses are to that.

    Attributes:
        folder: the folder of the checkout that the script needs.
        script: the script, within the folder.
        arguments: its arguments; the model and the files of data are named as `prepare` makes them.
        reference: the script in plain PyTorch that has the same losses; None: the script itself, with other arguments.
        reference_arguments: the arguments of the reference.
        tolerance: the largest relative difference of two losses.
        replaced: words of the folder's scripts that name a GPU, or a place that transformers has given up, with those
            that stand there instead.
        draws_images: whether random images are in the place of torchvision, which is not installed.
    """

    folder: str
    script: str
    arguments: Sequence[str]
    reference: str | None = None
    reference_arguments: Sequence[str] = ()
    tolerance: float = 1e-4
    replaced: Mapping[str, str] = field(default_factory=dict)
    draws_images: bool = False


GAN = ("--dataset", "fake", "--imageSize", "64", "--ngf", "4", "--ndf", "4", "--workers", "0", "--batchSize", "64")
GAN_ON_CPU = {
    "torch.cuda.set_device(args.local_rank)": "",
    'torch.device("cuda", args.local_rank)': 'torch.device("cpu")',
    "torch.cuda.synchronize()": "",
    "ngpu = int(args.ngpu)": "ngpu = 0",
}
HELLO = shlex.split(
    "--checkpoint_dir saved --tokenizer model --num_layers 2 --num_heads 2 --ff_dim 32 --h_dim 16 --max_seq_length 32 "
    "--num_iterations 9 --checkpoint_every 4 --dropout 0.0"
)
CHAT_ARGUMENTS = shlex.split(
    "--data_path local/jsonfile --data_split 5,5,0 --model_name_or_path model --per_device_train_batch_size 4 "
    "--per_device_eval_batch_size 4 --max_seq_len 32 --learning_rate 1e-3 --num_train_epochs 2 --dtype bf16 "
    "--gradient_accumulation_steps 1 --deepspeed --output_dir saved --data_output_path prepared --seed 1234"
)
# transformers 5 has moved this function, and a tokenizer of it has one file and no vocabulary of its own.
CHAT_TODAY = {
    "transformers.modeling_utils import no_init_weights": "transformers.initialization import no_init_weights",
    "tokenizer.save_vocabulary(output_dir)": "tokenizer.save_pretrained(output_dir)",
}
# In bf16 a different order of sums rounds a weight the other way, by 0.4 %.
BF16 = 2e-2


def _cases() -> dict[str, Case]:
    cases = {
        "gan": Case(
            folder="training/gan",
            script="gan_deepspeed_train.py",
            arguments=[*GAN, "--deepspeed_config", "gan_deepspeed_config.json"],
            reference="gan_baseline_train.py",
            reference_arguments=GAN,
            replaced=GAN_ON_CPU,
            draws_images=True,
        ),
        "hello": Case(
            folder="training/HelloDeepSpeed",
            script="train_bert_ds.py",
            arguments=HELLO,
            reference="train_bert.py",
            reference_arguments=HELLO,
            tolerance=BF16,
        ),
    }
    cifar = ["--deepspeed", "--epochs", "2", "--log-interval", "4", "--dtype"]
    for dtype, tolerance in (("fp32", 1e-4), ("bf16", BF16), ("fp16", BF16)):
        for stage in ("1", "2", "3"):
            cases[f"cifar {dtype} stage {stage}"] = Case(
                folder="training/cifar",
                script="cifar10_deepspeed.py",
                arguments=[*cifar, dtype, "--stage", stage],
                reference_arguments=[*cifar, dtype, "--stage", "0"],
                tolerance=tolerance,
                draws_images=True,
            )
    for number, name in enumerate(("supervised_finetuning", "reward_model_finetuning"), 1):
        for stage in ("2", "3"):
            cases[f"chat step {number} stage {stage}"] = Case(
                folder=CHAT,
                script=f"training/step{number}_{name}/main.py",
                arguments=[*CHAT_ARGUMENTS, "--zero_stage", stage],
                reference_arguments=[*CHAT_ARGUMENTS, "--zero_stage", "0"],
                tolerance=BF16,
                replaced=CHAT_TODAY,
            )
    return cases


CASES = _cases()


def prepare(directory: Path, checkout: Path, case: Case) -> Path:
    """Copy the folder of a case, replace the words that the case names, and make its data. Return the folder."""
    folder = directory / "example"
    shutil.copytree(checkout / case.folder, folder)
    for path in folder.rglob("*.py") if case.replaced else ():
        text = path.read_text()
        for old, new in case.replaced.items():
            text = text.replace(old, new)
        path.write_text(text)
    if case.draws_images:
        (directory / "torchvision.py").write_text(TORCHVISION)
    for path in folder.glob("*.json"):
        shutil.copy(path, directory)
    shape = OPTConfig(
        vocab_size=models.VOCABULARY, hidden_size=16, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, word_embed_proj_dim=16, dropout=0.0, attention_dropout=0.0, pad_token_id=0,
        bos_token_id=2, eos_token_id=3,
    )  # fmt: skip
    models.save(directory / "model", OPTForCausalLM, shape)
    texts = [{"text": models.sentence(number, 12)} for number in range(64)]
    models.save_data(directory / "wikitext", {"train": texts}, name="wikitext-2-v1")
    for name, count in (("train", 32), ("eval", 8)):
        words = ("prompt", "chosen", "rejected")
        rows = [{word: models.sentence(8 * n + place) for place, word in enumerate(words)} for n in range(count)]
        path = folder / f"data/{name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(map(json.dumps, rows)))
    return folder


def train(directory: Path, checkout: Path, case: Case, script: str, arguments: Sequence[str]) -> list[float]:
    folder = prepare(directory, checkout, case)
    return run(directory, command(Way.LAUNCH), folder / script, *arguments, paths=[directory, folder])


@pytest.mark.parametrize("name", CASES)
def test_the_losses_are_those_of_the_reference(tmp_path: Path, deepspeed_examples: Path, name: str) -> None:
    case = CASES[name]
    wanted = next((packages for folder, packages in PACKAGES.items() if folder in case.folder), ())
    if missing := [package for package in wanted if find_spec(package) is None]:
        pytest.skip(f"{', '.join(missing)} not installed: `make peers` installs them")
    (tmp_path / "reference").mkdir()
    (tmp_path / "ours").mkdir()

    ours = train(tmp_path / "ours", deepspeed_examples, case, case.script, case.arguments)
    reference = case.reference or case.script
    expected = train(tmp_path / "reference", deepspeed_examples, case, reference, case.reference_arguments)

    assert ours == pytest.approx(expected, rel=case.tolerance)
    assert all(map(math.isfinite, ours))

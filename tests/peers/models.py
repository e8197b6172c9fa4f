"""Small models, tokenizers and data sets, made on the fly in directories that are named as those of the hub."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, pre_tokenizers, processors
from tokenizers.models import WordLevel
from transformers import PreTrainedModel, PreTrainedTokenizerFast

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = tuple(
    shlex.split("the a of to in is it on by at cat dog tree house river stone light night bread water runs sees has")
)
VOCABULARY = len(SPECIAL) + len(WORDS)

_CHAT = "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} {% endfor %}"


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of whole words."""
    words = Tokenizer(WordLevel({word: number for number, word in enumerate((*SPECIAL, *WORDS))}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [("[CLS]", SPECIAL.index("[CLS]")), ("[SEP]", SPECIAL.index("[SEP]"))]
    words.post_processor = processors.TemplateProcessing(
        single="$A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=words,
        **dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True)),
        bos_token="[CLS]",
        eos_token="[SEP]",
        model_max_length=64,
    )
    made.chat_template = _CHAT
    return made


def sentence(number: int, words: int = 6) -> str:
    """Return the sentence of this number: random words, which depend on the number only."""
    chosen = torch.randint(len(WORDS), (words,), generator=torch.Generator().manual_seed(number))
    return " ".join(WORDS[index] for index in chosen)


def save(directory: Path, model: type[PreTrainedModel], config: Any) -> Path:
    """Save a model with random weights, which are the same each time, and the tokenizer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model(config).save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory


def save_data(directory: Path, rows: Mapping[str, Iterable[Mapping[str, Any]]], *, name: str = "default") -> Path:
    """Save a data set that `load_dataset(DIRECTORY, NAME)` finds, with these rows in each of its splits."""
    directory.mkdir(parents=True)
    lines = ["---", "configs:", f"- config_name: {name}", "  data_files:"]
    for split, of_split in rows.items():
        (directory / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in of_split))
        lines += [f"  - split: {split}", f"    path: {split}.jsonl"]
    (directory / "README.md").write_text("\n".join([*lines, "---", ""]))
    return directory

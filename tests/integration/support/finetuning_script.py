"""A script with the Trainer of transformers that tunes a pretrained model with new tokens, as its users write it.

`finetuning_script.py DIRECTORY RESULT.json [STATE_DIR]` saves a small GPT-2, names the stage-3 config (with STATE_DIR)
or none in the Trainer's arguments, loads the model, gives it rows for new tokens, and trains it. It does so three times
in one process: the second Trainer begins anew, and the third one resumes from a checkpoint. It writes three lists of
losses.
"""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random sequences, which depend on their number only."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 57, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def config(state_dir: str) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 3},
        "paramserver": {"state_dir": state_dir, "host_budget": "64MiB", "nvme_budget": "1GiB"},
    }


def writable(tensor: torch.Tensor, *, at_stage_3: bool) -> AbstractContextManager[None]:
    if not at_stage_3:
        return nullcontext()
    import deepspeed  # noqa: PLC0415

    context: AbstractContextManager[None] = deepspeed.zero.GatheredParameters([tensor, None], modifier_rank=0)
    return context


def main(directory: Path, result: Path, state_dir: str | None = None) -> None:
    torch.manual_seed(0)
    shape = GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=16, bos_token_id=None, eos_token_id=None,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    GPT2LMHeadModel(shape).save_pretrained(directory / "model")
    runs = [losses_of(directory, state_dir, resume=resume) for resume in (False, False, True)]
    result.write_text(json.dumps(runs))


def losses_of(directory: Path, state_dir: str | None, *, resume: bool) -> list[float]:
    """Train a model of its own with a Trainer of its own, which closes nothing, and return the losses of its steps."""
    arguments = TrainingArguments(
        output_dir=str(directory / "trainer"),
        per_device_train_batch_size=4,
        max_steps=3,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        deepspeed=None if state_dir is None else config(state_dir),
    )
    model: Any = AutoModelForCausalLM.from_pretrained(directory / "model")
    model.resize_token_embeddings(57, mean_resizing=False)
    embedding = model.get_input_embeddings().weight
    with torch.no_grad(), writable(embedding, at_stage_3=state_dir is not None):
        embedding[50:] = embedding[:50].mean(0)
    trainer = Trainer(model=model, args=arguments, train_dataset=Tokens())
    trainer.train(resume_from_checkpoint=str(directory / "trainer/checkpoint-2") if resume else None)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])

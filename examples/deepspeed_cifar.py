"""Image classification as a script of DeepSpeed, with images of CIFAR-10's shape that it makes itself.

    torchrun --nproc-per-node 2 -m trainer_client.as_deepspeed examples/deepspeed_cifar.py \
        --deepspeed --deepspeed_config examples/deepspeed_cifar.json

Without `-m trainer_client.as_deepspeed`, DeepSpeed itself runs it. The config is a file, DeepSpeed makes the data
loader, and the schedule is one of DeepSpeed's.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

CLASSES = 10


def parse_arguments() -> argparse.Namespace:
    """Return the arguments, those of DeepSpeed among them."""
    parser = argparse.ArgumentParser(description="CIFAR")
    parser.add_argument("-e", "--epochs", type=int, default=4)
    parser.add_argument("--samples", type=int, default=1024, help="number of images to train on")
    parser.add_argument("--log-interval", type=int, default=8, help="steps between two lines of the log")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by DeepSpeed's launcher")
    parser.add_argument("--loss_file", type=Path, help="the loss of each step of all ranks, as JSON")
    return deepspeed.add_config_arguments(parser).parse_args()  # type: ignore[no-any-return]


def make_images(samples: int, seed: int) -> TensorDataset:
    """Return images, each a noisy copy of the pattern of its class, with the classes."""
    patterns = torch.randn(CLASSES, 3, 8, 8, generator=torch.Generator().manual_seed(100))
    own = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (samples,), generator=own)
    clean = functional.interpolate(patterns[labels], size=32)
    return TensorDataset(clean / 2 + torch.randn(samples, 3, 32, 32, generator=own), labels)


class Net(nn.Module):
    """Two convolutions and three linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits [samples, classes] of images [samples, 3, 32, 32]."""
        maps = self.pool(functional.relu(self.conv1(images)))
        maps = self.pool(functional.relu(self.conv2(maps)))
        hidden = functional.relu(self.fc1(torch.flatten(maps, 1)))
        logits: torch.Tensor = self.fc3(functional.relu(self.fc2(hidden)))
        return logits


def mean_of_ranks(value: torch.Tensor) -> float:
    """Return the mean of a 0-D tensor over all ranks."""
    total = value.detach().float().clone()
    deepspeed.comm.all_reduce(total)
    return float(total) / int(deepspeed.comm.get_world_size())


def evaluate(engine: Any, images: TensorDataset, dtype: torch.dtype) -> float:
    """Return the share of images whose class the model finds."""
    engine.eval()
    correct = 0
    with torch.no_grad():
        for inputs, labels in DataLoader(images, batch_size=64):
            predicted = engine(inputs.to(engine.device, dtype)).argmax(dim=1)
            correct += int((predicted == labels.to(engine.device)).sum())
    return correct / len(images)


def main() -> None:
    """Train, and test on other images."""
    args = parse_arguments()
    deepspeed.init_distributed()
    torch.manual_seed(42)
    net = Net()
    trained = filter(lambda p: p.requires_grad, net.parameters())
    engine, _, loader, scheduler = deepspeed.initialize(
        args=args, model=net, model_parameters=trained, training_data=make_images(args.samples, seed=1)
    )
    device = get_accelerator().device_name(engine.local_rank)
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
    criterion = nn.CrossEntropyLoss()

    losses, rates = [], []
    for epoch in range(args.epochs):
        engine.train()
        loader.data_sampler.set_epoch(epoch)
        running = 0.0
        for number, (images, labels) in enumerate(loader, start=1):
            loss = criterion(engine(images.to(device, dtype)).float(), labels.to(device))
            engine.backward(loss)
            engine.step()

            losses.append(mean_of_ranks(loss))
            rates.append(scheduler.get_last_lr()[0])
            running += losses[-1]
            if engine.global_rank == 0 and number % args.log_interval == 0:
                print(f"[{epoch + 1}, {number:5d}] loss: {running / args.log_interval:.3f}")
                running = 0.0

    accuracy = evaluate(engine, make_images(256, seed=2), dtype)
    if engine.global_rank == 0:
        print(f"accuracy on 256 other images: {100 * accuracy:.0f} %")
        if args.loss_file is not None:
            args.loss_file.write_text(json.dumps({"losses": losses, "rates": rates, "accuracy": accuracy}))
    engine.destroy()


if __name__ == "__main__":
    main()

"""The figures of the tutorial on a model of 7 B parameters are those that its command prints."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.unit.trainer_client.plan.plans import run

PAGE = (Path(__file__).parents[4] / "docs/tutorials/seven-billion.md").read_text(encoding="utf-8")
GIB = 1 << 30


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the page's command prints with --json."""
    directory = tmp_path_factory.mktemp("tutorial")
    for name, text in re.findall(r"<!-- file: (\S+\.json) -->\n```json\n(.*?)```", PAGE, re.DOTALL):
        (directory / name).write_text(text)
    (command,) = re.findall(r"^paramserver plan (.*?[^\\])$", PAGE, re.DOTALL | re.MULTILINE)
    words = shlex.split(command.replace("\\\n", " "))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        result = run(*words, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_the_table_has_the_planned_bytes_and_seconds(planned: dict[str, Any]) -> None:
    rank, store, step = planned["rank"], planned["store"], planned["step"]
    resources, rates, gradients = step["resources"], planned["rates"], store["gradient_bytes"] / GIB
    written, read = (
        step["traffic"]["nvme_written"] / rates["nvme_write"],
        step["traffic"]["nvme_read"] / rates["nvme_read"],
    )
    live = max(line["nbytes"] for line in rank["lines"]) / GIB
    for row in (
        f"| {rank['bytes'] / GIB:.1f} GiB, {live:.1f} of them activations and gradients | 24 GiB |",
        f"| {planned['node']['host_bytes'] / GIB:.1f} GiB, 32 of them the host budget | 128 GiB |",
        f"| {store['least_host_budget'] / GIB:.2f} GiB; gradients, {gradients:.1f} GiB of them,",
        f"| {store['nvme_bytes'] / GIB:.0f} GiB: two versions of {store['version_bytes'] / GIB:.0f} GiB | 1 TiB |",
        f"| {step['overlapped_seconds']:.1f} s if all overlaps, {step['serial_seconds']:.1f} s if nothing does; NVMe "
        f"takes longest: {written:.1f} s of writes, {read:.1f} s of reads",
        f"| {resources['compute']:.1f} s | |",
        f"{24 - rank['bytes'] / GIB:.1f} GiB of the GPU to spare",
        f'"hidden behind compute from {step["hiding_tokens"]:,} tokens a step on"',
    ):
        assert row in PAGE


def test_the_best_placement_is_the_planned_one(planned: dict[str, Any]) -> None:
    best = planned["best"]
    section = best["config"]["paramserver"]
    assert section["placement"] == {"parameters": "nvme", "optimizer": "host"}
    text = " ".join(PAGE.split())
    assert "parameters on NVMe and optimizer states on the host" in text
    budget = section["host_budget"]
    seconds = f"{best['overlapped_seconds']:.1f} to {best['serial_seconds']:.1f} s a step"
    assert f"{seconds}, with a host budget of {budget}, {int(budget[:-3]) >> 10} GiB of the" in text

"""A daemon has as long to start under each engine, because all of them start it with memory of any size."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from trainer_client.training.run.local_daemon import _START_SECONDS

DEPLOY = Path(__file__).parents[3] / "deploy"


def found(pattern: str, name: str) -> float:
    """Return the number that a file has in the place of the group of a pattern."""
    (number,) = re.findall(pattern, (DEPLOY / name).read_text(), flags=re.MULTILINE)
    return float(number)


def test_every_engine_gives_a_daemon_the_same_time_to_start() -> None:
    manifests = yaml.safe_load_all((DEPLOY / "kubernetes" / "base" / "store.yaml").read_text())
    (probe,) = (
        manifest["spec"]["template"]["spec"]["containers"][0]["startupProbe"]
        for manifest in manifests
        if manifest["kind"] == "DaemonSet"
    )
    seconds = {
        "systemd": 60 * found(r"^TimeoutStartSec=(\d+)min$", "systemd/paramserver@.service"),
        "Kubernetes": probe["periodSeconds"] * probe["failureThreshold"],
        "Slurm": found(r"^start_seconds=(\d+)$", "slurm/paramserver.sbatch"),
        "Ray": found(r"^START_SECONDS = ([\d.]+)$", "ray/train_on_ray.py"),
        "a trainer or `paramserver launch`": _START_SECONDS,
    }
    assert seconds == dict.fromkeys(seconds, 600)

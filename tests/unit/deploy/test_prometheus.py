"""The rules for Prometheus use metrics that exist, and raise an alert for each planted fault and none without one."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.unit.deploy.metric_names import known_names

ROOT = Path(__file__).parents[3]
DIRECTORY = ROOT / "deploy" / "prometheus"
RULES = DIRECTORY / "paramserver.rules.yml"
promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (apt install prometheus)"
)


def run_promtool(*arguments: str, directory: Path) -> None:
    ended = subprocess.run(
        ["promtool", *arguments], cwd=directory, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("path", [RULES, ROOT / "docs" / "metrics.md"], ids=lambda path: path.name)
def test_every_metric_that_a_rule_or_a_query_names_exists(path: Path) -> None:
    text = path.read_text()
    queries = re.findall(r"expr: (?:>-\n)?((?:.|\n)*?)(?=\n +(?:for|labels|- record|- alert|\n))", text) or re.findall(
        r"^\| [^|]*\? \| `(.*)` \|$", text, flags=re.MULTILINE
    )
    named = {name for query in queries for name in re.findall(r"\bparamserver_\w+", query)}

    assert len(queries) >= 7
    assert named - known_names() == set()


def test_every_alert_has_a_severity_and_says_what_to_do() -> None:
    alerts = RULES.read_text().split("- alert: ")[1:]
    planted = (Path(__file__).parent / "alerts.test.yml").read_text()

    assert len(alerts) >= 10
    for alert in alerts:
        name = alert.split("\n", 1)[0]
        assert re.search(r"severity: (warning|critical)", alert) and "summary: " in alert and "action: " in alert
        assert planted.count(name) >= 2, f"{name} is not tested with a planted fault"


@promtool
@pytest.mark.parametrize("arguments", [["check", "config", "prometheus.yml"], ["check", "rules", RULES.name]])
def test_promtool_accepts_the_files(arguments: list[str]) -> None:
    run_promtool(*arguments, directory=DIRECTORY)


@promtool
def test_each_planted_fault_raises_its_alert(tmp_path: Path) -> None:
    shutil.copy(RULES, tmp_path)
    shutil.copy(Path(__file__).parent / "alerts.test.yml", tmp_path)
    run_promtool("test", "rules", "alerts.test.yml", directory=tmp_path)

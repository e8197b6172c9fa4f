"""The dashboard asks for metrics and labels that exist, shows every metric, and its queries are PromQL."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paramserver.metrics import families
from tests.unit.deploy.metric_names import known_names

DASHBOARD = Path(__file__).parents[3] / "deploy" / "grafana" / "paramserver.json"
# Series that prometheus-client has of every process.
OF_PROCESS = {"process_resident_memory_bytes", "process_cpu_seconds_total"}
LABELS = {"instance", "job", "tier", "path", "lender", "method", "code", "operation", "le"}
WIDTH = 24


def board() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return found


def queries() -> Iterator[str]:
    """Yield the queries of all panels and variables."""
    yield from (target["expr"] for panel in board()["panels"] for target in panel.get("targets", []))
    for variable in board()["templating"]["list"]:
        if variable["type"] == "query":
            (query,) = re.findall(r"^label_values\((.*), \w+\)$", variable["query"]["query"])
            yield query


def test_every_query_names_metrics_and_labels_that_exist() -> None:
    without_texts = [re.sub(r'"[^"]*"', '""', query) for query in queries()]
    named = {name for query in without_texts for name in re.findall(r"\b(?:paramserver|process)_\w+", query)}
    matched = {label for query in without_texts for label in re.findall(r"(\w+)(?:=|!=|=~|!~)\"\"", query)}
    grouped = {
        label for query in without_texts for by in re.findall(r"by \(([^)]*)\)", query) for label in by.split(", ")
    }

    assert len(without_texts) > 50
    assert named - known_names() - OF_PROCESS == set()
    assert matched | grouped <= LABELS
    assert {"instance", "job"} <= matched


def test_every_metric_of_a_store_is_shown() -> None:
    shown = " ".join(queries())

    assert [name for name in families.meanings() if not re.search(rf"\b{name}\b", shown)] == []


def test_legends_name_labels_that_their_query_keeps() -> None:
    for panel in board()["panels"]:
        for target in panel.get("targets", []):
            named = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            by = re.findall(r"by \(([^)]*)\)", target["expr"])
            kept = set(by[0].split(", ")) - {"le"} if by else LABELS
            assert named <= kept, target["expr"]


def test_panels_have_their_own_numbers_and_places_and_say_what_they_show() -> None:
    panels = board()["panels"]
    taken = [
        (place["x"] + column, place["y"] + line)
        for place in (panel["gridPos"] for panel in panels)
        for column, line in itertools.product(range(place["w"]), range(place["h"]))
    ]

    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len(set(taken)) == len(taken) and max(x for x, _ in taken) < WIDTH
    for panel in panels:
        if panel["type"] == "row":
            continue
        assert panel["title"] and panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"]["uid"] == "${datasource}"


def test_the_variables_of_the_queries_are_those_of_the_dashboard_or_of_grafana() -> None:
    defined = {variable["name"] for variable in board()["templating"]["list"]}
    used = {name for query in queries() for name in re.findall(r"\$(\w+)", query)}

    assert used <= defined | {"__rate_interval", "__range"}
    assert defined <= used | {"datasource"}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (apt install prometheus)")
def test_promtool_parses_every_query(tmp_path: Path) -> None:
    """Each query becomes a rule, because promtool checks rules; Grafana replaces its variables in the same way."""
    rules = []
    for number, query in enumerate(queries()):
        plain = re.sub(r"\$__(rate_interval|range)", "5m", query).replace("$instance", ".*").replace("$job", ".*")
        rules.append({"record": f"query:{number}", "expr": plain})
    path = tmp_path / "queries.json"
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    checked = subprocess.run(
        ["promtool", "check", "rules", path], capture_output=True, text=True, timeout=60, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr

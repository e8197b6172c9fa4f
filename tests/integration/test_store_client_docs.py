"""The scripts on the page about the store's client do what the page says, and so does its example."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.integration.support.daemon import Daemon

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "store-client.md"
SCRIPTS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
SHOWN_ADDRESS = "unix:/run/paramserver/paramserver.sock"


def run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_its_scripts_run(tmp_path: Path) -> None:
    assert len(SCRIPTS) == 3
    with Daemon(tmp_path / "state", {"host_budget": "64MiB"}) as daemon:
        for number, script in enumerate(SCRIPTS):
            assert SHOWN_ADDRESS in script
            path = tmp_path / f"{number}.py"
            path.write_text(script.replace(SHOWN_ADDRESS, daemon.address))
            printed = run(str(path))
            if number == 0:
                assert "embeddings is at step 1" in printed
                assert "step 1 is there" in printed
        assert daemon.stop() == 0


def test_the_links_of_the_page_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#:]+)\)", PAGE.read_text(encoding="utf-8"))
    assert targets
    assert [target for target in targets if not (PAGE.parent / target).exists()] == []


def test_the_example_finds_better_neighbours_from_step_to_step(tmp_path: Path) -> None:
    printed = run(str(ROOT / "examples" / "store_client.py"), str(tmp_path / "state"))
    assert re.findall(r"writer: +step (\d+) is committed", printed) == ["0", "1", "2", "3", "4"]
    found = [tuple(map(int, line)) for line in re.findall(r"searcher: step (\d+), (\d+) pairs seen: (\d+)%", printed)]
    assert [step for step, _, _ in found] == sorted(step for step, _, _ in found)
    # Everything that a reader sees in one pass belongs to one step.
    assert all(seen == 4000 * (step + 1) for step, seen, _ in found)
    last, _, share = found[-1]
    assert last == 4
    assert share > 50, "by chance it would be one in eight"

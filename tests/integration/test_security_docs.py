"""The commands in docs/security.md do what the page says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from paramserver.security.quotas import JobQuota, Quota, TokenQuota
from tests.integration.support.forked import ROOT
from tests.integration.support.ranks import free_port
from trainer_client.client.transport.channel import wait_until_serving
from trainer_client.client.transport.credentials import Credentials

DOCUMENT = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
SECONDS = 40.0


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory with a short path in which the tests run the commands."""
    directory = Path("/tmp") / f"paramserver-docs-{os.getpid()}"
    directory.mkdir()
    yield directory
    shutil.rmtree(directory)


def test_its_commands_set_up_a_cluster_and_change_it(place: Path) -> None:
    address = f"127.0.0.1:{free_port()}"

    def blocks(language: str) -> list[str]:
        found = re.findall(rf"^```{language}\n(.*?)```", DOCUMENT, flags=re.MULTILINE | re.DOTALL)
        fitted = (text.replace("10.0.0.5:7411", address).replace("10.0.0.5", "127.0.0.1") for text in found)
        return [text.replace("/nvme/paramserver", str(place / "state")) for text in fitted]

    bin_directory = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{bin_directory}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}

    def run(command: list[str]) -> str:
        ended = subprocess.run(
            command, cwd=place, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    prepare, serve, look, change = blocks("sh")
    (config,) = blocks("toml")
    (program,) = blocks("python")
    run(["bash", "-ec", prepare])
    (place / "paramserver.toml").write_text(config)
    with (place / "log").open("w") as log:
        daemon = subprocess.Popen(
            ["bash", "-ec", f"exec {serve}"], cwd=place, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        tls = place / "tls"
        credentials = Credentials(
            tls_ca=tls / "ca.pem", tls_certificate=tls / "operator.pem", tls_key=tls / "operator-key.pem"
        )
        wait_until_serving(address, SECONDS, credentials)
        assert "Tiers of" in run(["bash", "-ec", look])
        assert run([sys.executable, "-c", program]) == "[]\n"
        assert "team-a: job (team-a/*; may delete), expires 2099-12-31" in run(["bash", "-ec", change])
        assert "team-a" not in (place / "tokens.toml").read_text()
        # This command uses the renewed certificates.
        assert "Tiers of" in run(["bash", "-ec", look])
    finally:
        daemon.terminate()
        assert daemon.wait(SECONDS) == 0, (place / "log").read_text()


def test_its_table_lists_the_keys_of_a_quota() -> None:
    of_jobs, of_tokens = DOCUMENT.split("\n## Quotas\n")[1].split("\n## Quotas of tokens\n")
    assert re.findall(r"^\| `(\w+)` \|", of_jobs, flags=re.MULTILINE) == list(Quota.model_fields)
    assert ["name", *re.findall(r"^\| `(\w+)` \|", of_tokens, flags=re.MULTILINE)] == list(TokenQuota.model_fields)
    (config,) = re.findall(r"^```toml\n(.*?)```", DOCUMENT, flags=re.MULTILINE | re.DOTALL)
    for quota in tomllib.loads(config)["quotas"]["job"]:
        JobQuota.model_validate(quota)
    for quota in tomllib.loads(config)["quotas"]["token"]:
        TokenQuota.model_validate(quota)

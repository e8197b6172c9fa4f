"""The manifests are what Kubernetes' API takes, and agree with the daemon, with each other and with docs/deploy.md."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from paramserver.config import DaemonConfig, load_config
from paramserver.contract.address import host_and_port
from paramserver.server import STORE_SERVICE
from tests.unit.deploy.launching import dry_run

ROOT = Path(__file__).parents[3]
DIRECTORY = ROOT / "deploy" / "kubernetes"
BASE = DIRECTORY / "base"
OVERLAYS = ["base", "overlays/tls", "overlays/gpu", "overlays/tls-gpu"]
# gRPC probes and the annotation of the index are in all versions from the first one on.
VERSIONS = ["1.29", "1.35"]
POD_MONITOR = json.loads((ROOT / "tests" / "data" / "podmonitor.schema.json").read_text())
GIB = 1 << 30
Manifest = dict[str, Any]

kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed, which has kustomize")


def manifests(path: Path) -> list[Manifest]:
    return [found for found in yaml.safe_load_all(path.read_text()) if found]


def kustomization(directory: Path) -> Manifest:
    (found,) = manifests(directory / "kustomization.yaml")
    return found


@functools.cache
def built(overlay: str) -> tuple[Manifest, ...]:
    """Return the manifests that `kubectl kustomize` makes."""
    made = subprocess.run(
        ["kubectl", "kustomize", DIRECTORY / overlay], capture_output=True, text=True, timeout=60, check=True
    )
    return tuple(yaml.safe_load_all(made.stdout))


def base() -> list[Manifest]:
    return [found for name in kustomization(BASE)["resources"] for found in manifests(BASE / name)]


def one(found: Iterator[Manifest] | list[Manifest] | tuple[Manifest, ...], kind: str, name: str) -> Manifest:
    (wanted,) = [m for m in found if (m["kind"], m["metadata"]["name"]) == (kind, name)]
    return wanted


def check_schema(manifest: Manifest, version: str) -> None:
    if manifest["kind"] == "PodMonitor":
        jsonschema.validate(manifest, POD_MONITOR)
    else:
        kubernetes_validate.validate(manifest, version, strict=True)


def pod(manifest: Manifest) -> Manifest:
    found: Manifest = manifest["spec"]["template"]["spec"]
    return found


def config_of(directory: Path) -> DaemonConfig:
    return load_config(directory / "paramserver.toml", {})


def memory_bytes(text: str) -> int:
    assert text.endswith("Gi")
    return int(text.removesuffix("Gi")) * GIB


@pytest.mark.parametrize("version", VERSIONS)
def test_every_manifest_of_the_base_fulfils_the_schema_of_the_api(version: str) -> None:
    for manifest in base():
        check_schema(manifest, version)


def test_a_mistyped_field_is_found() -> None:
    """This shows that the check is strict: it refuses fields that the API does not know."""
    job = one(base(), "Job", "trainer")
    pod(job)["containers"][0]["enviroment"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        check_schema(job, VERSIONS[-1])
    monitor = one(base(), "PodMonitor", "store")
    monitor["spec"]["podMetricsEndpoints"][0]["honourLabels"] = True
    with pytest.raises(jsonschema.ValidationError):
        check_schema(monitor, VERSIONS[-1])


@kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_overlay_can_be_built_and_fulfils_the_schema(overlay: str) -> None:
    for manifest in built(overlay):
        check_schema(manifest, VERSIONS[-1])
        assert manifest["kind"] == "Namespace" or manifest["metadata"]["namespace"] == "paramserver"


def test_what_the_kustomizations_name_is_there() -> None:
    """This is the part of a build that needs no kustomize: files exist, and patches have a target in the base."""
    present = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in base()}
    found = sorted(DIRECTORY.rglob("kustomization.yaml"))
    for path in found:
        top, directory = kustomization(path.parent), path.parent
        for named in [*top.get("resources", []), *top.get("components", [])]:
            assert (directory / named).exists(), f"{path}: {named}"
        for generator in top.get("configMapGenerator", []):
            assert all((directory / name).is_file() for name in generator["files"])
        for patch in top.get("patches", []):
            (content,) = manifests(directory / patch["path"])
            target = patch.get("target") or {"kind": content["kind"], "name": content["metadata"]["name"]}
            assert (target["kind"], target["name"]) in present, f"{path}: {patch}"
        # A component patches every kind of file that lies beside it.
        patches = {patch["path"] for patch in top.get("patches", [])}
        assert {name.name for name in directory.glob("*.yaml")} - {"kustomization.yaml"} <= {
            *patches,
            *top.get("resources", []),
        }
    assert len(found) == 6


@pytest.mark.parametrize("directory", [BASE, DIRECTORY / "components" / "tls"], ids=["base", "tls"])
def test_the_daemon_accepts_its_configuration_and_finds_what_it_names(directory: Path) -> None:
    config, store = config_of(directory), pod(one(base(), "DaemonSet", "store"))
    (container,) = store["containers"]
    volumes = {volume["name"]: volume for volume in store["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}

    assert mounts[str(config.state_dir)]["hostPath"] and mounts[str(config.socket_path.parent)]["hostPath"]
    for kind in ("requests", "limits"):
        assert memory_bytes(container["resources"][kind]["memory"]) >= config.host_budget + 2 * GIB
    assert container["args"] == ["serve", "--config", "/etc/paramserver/paramserver.toml"]
    assert mounts["/etc/paramserver"]["configMap"]["name"] == kustomization(BASE)["configMapGenerator"][0]["name"]
    (prepared,) = store["initContainers"]
    assert prepared["args"] == [str(config.socket_path.parent), str(config.state_dir)]


@pytest.mark.parametrize("directory", [BASE, DIRECTORY / "components" / "tls"], ids=["base", "tls"])
def test_probes_and_prometheus_ask_at_the_ports_of_the_configuration(directory: Path) -> None:
    config, (container,) = config_of(directory), pod(one(base(), "DaemonSet", "store"))["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert config.health_listen is not None and config.metrics_listen is not None
    (health, metrics) = (host_and_port(listen)[1] for listen in (config.health_listen, config.metrics_listen))

    assert ports == {"health": health, "metrics": metrics}
    probes = [container[f"{name}Probe"]["grpc"] for name in ("startup", "readiness", "liveness")]
    assert {probe["port"] for probe in probes} == {health}
    assert {probe.get("service") for probe in probes} == {STORE_SERVICE.full_name, None}
    (endpoint,) = one(base(), "PodMonitor", "store")["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] == "metrics" and endpoint["honorLabels"]
    (rule,) = one(base(), "NetworkPolicy", "store")["spec"]["ingress"]
    assert [port["port"] for port in rule["ports"]] == [metrics]


def test_without_tls_no_client_comes_over_tcp() -> None:
    config = config_of(BASE)

    assert (config.listen, config.insecure) == (None, True)
    secure = config_of(DIRECTORY / "components" / "tls")
    assert secure.listen is not None and not secure.insecure and secure.token_file is not None


def test_trainers_are_the_user_of_the_daemon_and_mount_its_socket_at_the_same_path() -> None:
    """The daemon refuses its memory to other users, and names the path of its socket to its clients."""
    store, trainer = pod(one(base(), "DaemonSet", "store")), pod(one(base(), "Job", "trainer"))
    containerfile = (ROOT / "deploy" / "container" / "Containerfile").read_text()

    assert store["securityContext"] == trainer["securityContext"]
    assert f"--uid {store['securityContext']['runAsUser']} " in containerfile
    # A user namespace would show the daemon another user.
    assert all(spec.get("hostUsers", True) for spec in (store, trainer))
    (run,) = [v["hostPath"]["path"] for v in trainer["volumes"] if v["name"] == "run"]
    (mounted,) = [m["mountPath"] for m in trainer["containers"][0]["volumeMounts"] if m["name"] == "run"]
    environment = {entry["name"]: entry.get("value") for entry in trainer["containers"][0]["env"]}
    assert environment["PARAMSERVER_ADDRESS"] == f"unix:{config_of(BASE).socket_path}"
    assert run == mounted == str(config_of(BASE).socket_path.parent)
    assert run in [v["hostPath"]["path"] for v in store["volumes"] if "hostPath" in v]


def test_the_page_asks_for_no_capability_to_lock_memory_because_the_daemon_is_not_root() -> None:
    """The kernel drops the capabilities of a container when it starts a program as another user than root."""
    assert pod(one(base(), "DaemonSet", "store"))["securityContext"]["runAsUser"] != 0
    page = (ROOT / "docs" / "deploy.md").read_text()
    (said,) = (point for point in re.split(r"\n(?=- |\n)", page) if "`lock_memory`" in point)
    assert "`LimitMEMLOCK=`" in said and "`IPC_LOCK` in a manifest counts for root only" in said


def test_the_launcher_accepts_the_arguments_of_the_job_and_its_nodes_meet() -> None:
    job, service = one(base(), "Job", "trainer"), one(base(), "Service", "trainer")
    (container,) = pod(job)["containers"]
    (index,) = [entry for entry in container["env"] if entry["name"] == "NODE_RANK"]

    assert "job-completion-index" in index["valueFrom"]["fieldRef"]["fieldPath"]
    command = dry_run([text.replace("$(NODE_RANK)", "1") for text in container["args"]])
    assert f"--nnodes {job['spec']['completions']} --node-rank 1 " in command
    assert job["spec"]["parallelism"] == job["spec"]["completions"]
    # An indexed job names the pods by their index, and a headless service gives the names addresses.
    (host,) = re.findall(r"--master-addr (\S+)", command)
    assert host == f"{job['metadata']['name']}-0.{pod(job)['subdomain']}"
    assert service["metadata"]["name"] == pod(job)["subdomain"] and service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()


def test_selectors_select_the_pods_that_they_are_meant_for() -> None:
    labels = {
        name: one(base(), kind, name)["spec"]["template"]["metadata"]["labels"]
        for kind, name in (("DaemonSet", "store"), ("Job", "trainer"))
    }
    selectors = {
        "store": [
            one(base(), "DaemonSet", "store")["spec"]["selector"]["matchLabels"],
            one(base(), "NetworkPolicy", "store")["spec"]["podSelector"]["matchLabels"],
            one(base(), "PodMonitor", "store")["spec"]["selector"]["matchLabels"],
        ],
        "trainer": [one(base(), "NetworkPolicy", "trainer")["spec"]["podSelector"]["matchLabels"]],
    }
    for name, meant in selectors.items():
        (other,) = labels.keys() - {name}
        for selector in meant:
            assert selector.items() <= labels[name].items()
            assert not selector.items() <= labels[other].items()


def secret_files(manifest: Manifest) -> dict[str, set[str]]:
    """Return the names of the files that containers and Prometheus read from each secret."""
    text = json.dumps(manifest)
    if manifest["kind"] == "PodMonitor":
        found: dict[str, set[str]] = {}
        for key, name in re.findall(r'{"key": "([^"]+)", "name": "([^"]+)"}', text):
            found.setdefault(name, set()).add(key)
        return found
    spec = pod(manifest)
    config = (DIRECTORY / "components" / "tls" / "paramserver.toml").read_text() if "daemon" not in text else ""
    secrets = {v["name"]: v["secret"]["secretName"] for v in spec["volumes"] if "secret" in v}
    return {
        secrets[mount["name"]]: set(re.findall(rf"{mount['mountPath']}/([\w.-]+)", text + config))
        for mount in spec["containers"][0]["volumeMounts"]
        if mount["name"] in secrets
    }


@kubectl
def test_the_commands_of_the_page_make_the_secrets_that_the_manifests_mount(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "deploy.md").read_text()
    (commands,) = re.findall(r"```sh\n(paramserver certs tls.*?)```", page, flags=re.DOTALL)
    program = tmp_path / "paramserver"
    program.write_text(f"#!/bin/sh\nexec '{sys.executable}' -m paramserver \"$@\"\n")
    program.chmod(0o755)
    # Without these options, kubectl would talk to a cluster.
    dry = commands.replace("create secret generic", "create secret generic --dry-run=client --output=json")
    made = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", dry],
        cwd=tmp_path,
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    decoder, at, keys = json.JSONDecoder(), made.stdout.find("{"), {}
    while at >= 0:
        secret, end = decoder.raw_decode(made.stdout, at)
        keys[secret["metadata"]["name"]] = set(secret["data"])
        assert secret["metadata"]["namespace"] == "paramserver"
        at = made.stdout.find("{", end)

    manifests_with_secrets = [m for m in built("overlays/tls") if m["kind"] in ("DaemonSet", "Job", "PodMonitor")]
    wanted = {name: files for m in manifests_with_secrets for name, files in secret_files(m).items()}
    assert len(wanted) == 4
    assert {name: files - keys.get(name, set()) for name, files in wanted.items()} == {name: set() for name in wanted}

"""The daemon's configuration is checked as a whole, and the error names each wrong key with the allowed values."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paramserver.config import ENVIRONMENT_PREFIX, DaemonConfig, load_config
from paramserver.contract.sockets import MAX_NAME_BYTES
from paramserver.errors import ConfigError

MIB = 1 << 20
ROOT = Path(__file__).parents[3]


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "paramserver.toml"
    path.write_text(text)
    return path


def test_a_file_gives_what_it_says_and_defaults_for_the_rest(tmp_path: Path) -> None:
    path = written(
        tmp_path, 'state_dir = "/data"\nhost_budget = "256MiB"\nnvme_budget = 8589934592\noptimizer_threads = 3\n'
    )
    config = load_config(path, {})
    assert (config.host_budget, config.nvme_budget, config.optimizer_threads) == (256 * MIB, 8 << 30, 3)
    assert config.socket_path == Path("/data/paramserver.sock")
    assert config.arena_socket_path == Path("/data/paramserver.sock.arena")
    assert (config.listen, config.insecure, config.log_level) == (None, False, "info")
    assert (config.huge_pages, config.lock_memory, config.admission_timeout_seconds) == (False, False, 60.0)


def test_flags_go_before_the_file_and_absent_ones_do_not(tmp_path: Path) -> None:
    path = written(tmp_path, 'state_dir = "/data"\nhost_budget = "1GiB"\nlog_format = "json"\n')
    config = load_config(path, {"host_budget": "2MiB", "state_dir": None, "log_format": None, "socket": Path("/run/s")})
    assert (config.host_budget, config.state_dir, config.log_format) == (2 * MIB, Path("/data"), "json")
    assert config.socket_path == Path("/run/s")


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"host_buget": 1}, "unknown key 'host_buget'; did you mean 'host_budget'?"),
        ({"colour": "red"}, "unknown key 'colour'; known keys: state_dir, host_budget, nvme_budget"),
        ({"state_dir": None}, "'state_dir' is missing; set it in the config file or with --state-dir"),
        ({"host_budget": "much"}, "host_budget = 'much'"),
        ({"host_budget": "256QiB"}, "host_budget = '256QiB'"),
        ({"host_budget": 1000}, "host_budget = 1000: Input should be greater than or equal to 1048576"),
        ({"nvme_budget": "-5GiB"}, "nvme_budget = '-5GiB'"),
        ({"scrub_bandwidth": "1,5MiB"}, "scrub_bandwidth = '1,5MiB': write a number of bytes"),
        ({"lend_budget": True}, "lend_budget = True: write a number of bytes"),
        ({"state_dir": "~/store"}, "state_dir = '~/store': only a shell replaces ~ by a home directory"),
        ({"nvme_dirs": ["/a", "~b"]}, "nvme_dirs.1 = '~b': only a shell replaces ~"),
        ({"log_level": "loud"}, "log_level = 'loud': Input should be 'debug', 'info', 'warning' or 'error'"),
        ({"io_read_threads": 0}, "io_read_threads = 0"),
        ({"optimizer_threads": 65}, "optimizer_threads = 65"),
        ({"huge_pages": 3}, "huge_pages = 3"),
        ({"lock_memory": "perhaps"}, "lock_memory = 'perhaps'"),
        (
            {"admission_timeout_seconds": 0.05},
            "admission_timeout_seconds = 0.05: Input should be greater than",
        ),
        ({"admission_timeout_seconds": float("inf")}, "admission_timeout_seconds = inf"),
        ({"heartbeat_timeout_seconds": 0.1}, "heartbeat_timeout_seconds = 0.1"),
        ({"heartbeat_timeout_seconds": float("nan")}, "heartbeat_timeout_seconds = nan"),
    ],
)
def test_a_bad_key_or_value_is_refused_by_its_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, {"state_dir": "/data"} | values if values != {"state_dir": None} else {})
    assert named in str(caught.value)


def test_all_that_is_wrong_is_told_at_once_with_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, 'host_budget = "x"\nnvme_budget = "y"\nzzz = 1\n')
    with pytest.raises(ConfigError) as caught:
        load_config(path, {})
    lines = str(caught.value).splitlines()
    assert len(lines) == 4 and all(line.startswith(f"bad configuration (file {path}): ") for line in lines)


@pytest.mark.parametrize(
    ("text", "named"), [("a = ", "is not valid TOML"), (None, "No such file"), (b"\xff\xfe", "is not valid TOML")]
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, text: str | bytes | None, named: str) -> None:
    path = tmp_path / "broken.toml"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=f"{path}.*{named}"):
        load_config(path, {})


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "127.9.9.9:5000", "[::1]:5000", "localhost:1"])
def test_loopback_needs_nothing(listen: str) -> None:
    assert load_config(None, {"state_dir": "/d", "listen": listen}).listen == listen


@pytest.mark.parametrize("listen", ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "example.org:1", "localhost.evil.org:1", ":1"])
def test_an_address_that_others_can_reach_must_be_asked_for(listen: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, {"state_dir": "/d", "listen": listen})
    assert f"listen: {listen} can be reached from other machines" in str(caught.value)
    assert "--insecure" in str(caught.value)
    assert load_config(None, {"state_dir": "/d", "listen": listen, "insecure": True}).listen == listen


@pytest.mark.parametrize("key", ["listen", "metrics_listen", "health_listen"])
@pytest.mark.parametrize("address", ["7411", "node7", "0.0.0.0", "127.0.0.1", "[::1]", "node7:grpc", "node7:65536"])
def test_an_address_without_a_port_is_refused_by_its_key(key: str, address: str) -> None:
    """gRPC would listen at the port of HTTPS, 443."""
    with pytest.raises(ConfigError, match=re.escape(f"{key}: {address!r} is not HOST:PORT")):
        load_config(None, {"state_dir": "/d", "insecure": True, key: address})


TLS = {"tls_certificate": "/c", "tls_key": "/k", "tls_client_ca": "/a"}


def test_tls_allows_tcp_beyond_loopback() -> None:
    config = load_config(None, {"state_dir": "/d", "listen": "0.0.0.0:1"} | TLS)
    assert (config.tls_certificate, config.tls_key, config.tls_client_ca) == (Path("/c"), Path("/k"), Path("/a"))


@pytest.mark.parametrize("missing", TLS)
def test_tls_needs_all_of_its_files(missing: str) -> None:
    values = {"state_dir": "/d", "listen": "127.0.0.1:1"} | TLS
    del values[missing]
    with pytest.raises(
        ConfigError, match=f"{missing}: missing; TLS needs all of tls_certificate, tls_key, tls_client_ca"
    ):
        load_config(None, values)


def test_tls_without_tcp_and_tls_that_is_insecure_are_refused() -> None:
    with pytest.raises(ConfigError, match="tls_certificate: TLS is for TCP, and neither `listen`"):
        load_config(None, {"state_dir": "/d"} | TLS)
    load_config(None, {"state_dir": "/d", "metrics_listen": "0.0.0.0:1"} | TLS)
    with pytest.raises(ConfigError, match="insecure: true, beside tls_certificate"):
        load_config(None, {"state_dir": "/d", "listen": "0.0.0.0:1", "insecure": True} | TLS)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("0.0.0.0:9464", "metrics_listen: 0.0.0.0:9464 can be reached from other machines"),
        ("9464", "'9464' is not HOST:PORT"),
        ("127.0.0.1:65536", "'127.0.0.1:65536' is not HOST:PORT"),
    ],
)
def test_metrics_that_other_machines_could_read_and_bad_addresses_are_refused(address: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, {"state_dir": "/d", "metrics_listen": address})
    load_config(None, {"state_dir": "/d", "metrics_listen": "[::1]:0"})


@pytest.mark.parametrize("name", ["", "node:9464", "http://node", "node/metrics", "a..b", " node"])
def test_names_of_the_metrics_are_names_of_hosts(name: str) -> None:
    address = {"state_dir": "/d", "metrics_listen": "127.0.0.1:9464"}
    with pytest.raises(ConfigError, match=r"metrics_names: .* is not the name of a host"):
        load_config(None, address | {"metrics_names": [name]})
    with pytest.raises(ConfigError, match="metrics_names: they are names of `metrics_listen`"):
        load_config(None, {"state_dir": "/d", "metrics_names": ["node"]})
    assert load_config(None, address | {"metrics_names": ["node"]}).metrics_names == ("node",)


def test_variables_go_before_the_file_and_after_flags(tmp_path: Path) -> None:
    path = written(tmp_path, 'state_dir = "/d"\nhost_budget = "1GiB"\nio_read_threads = 2\n')
    environment = {
        "PARAMSERVER_SERVE_HOST_BUDGET": "2GiB",
        "PARAMSERVER_SERVE_NVME_BUDGET": "3GiB",
        "PARAMSERVER_SERVE_NVME_DIRS": "/a:/b c",
        "PARAMSERVER_SERVE_HUGE_PAGES": "true",
        "PARAMSERVER_SERVE_IO_READ_THREADS": "5",
        "PARAMSERVER_ADDRESS": "unix:/elsewhere",
    }
    config = load_config(path, {"nvme_budget": "4GiB"}, environment)

    assert (config.host_budget, config.nvme_budget, config.io_read_threads) == (2 << 30, 4 << 30, 5)
    assert config.nvme_dirs == (Path("/a"), Path("/b c")) and config.huge_pages


# A value of each key, in the file and in a variable.
EVERY_KEY = {
    "state_dir": ('"/d"', "/d"),
    "host_budget": ('"2GiB"', "2GiB"),
    "nvme_budget": ("3000000000", "3000000000"),
    "nvme_dirs": ('["/a", "/b c"]', "/a:/b c"),
    "scrub_bandwidth": ("0", "0"),
    "device_timeout_seconds": ("2.5", "2.5"),
    "socket": ('"/run/s"', "/run/s"),
    "listen": ('"10.0.0.5:7411"', "10.0.0.5:7411"),
    "insecure": ("false", "false"),
    "tls_certificate": ('"/c"', "/c"),
    "tls_key": ('"/k"', "/k"),
    "tls_client_ca": ('"/a"', "/a"),
    "token_file": ('"/t"', "/t"),
    "quotas": (
        '{default = {sessions = 8}, job = [{pattern = "a-*", host_bytes = "1GiB"}], token = [{name = "b", jobs = 2}]}',
    )
    * 2,
    "lend_budget": ('"1GiB"', "1GiB"),
    "lend_per_borrower": ('"64MiB"', "64MiB"),
    "remote": ('{lenders = ["127.0.0.1:7070", "unix:/s"], budget = "2GiB", use = "always"}',) * 2,
    "metrics_listen": ('"[::]:9464"', "[::]:9464"),
    "metrics_jobs": ("7", "7"),
    "metrics_names": ('["node7", "a.example"]', "node7:a.example"),
    "page": ("false", "false"),
    "audit_log": ('"/d/audit"', "/d/audit"),
    "audit_log_bytes": ('"1MiB"', "1MiB"),
    "otlp_endpoint": ('"http://127.0.0.1:4317"', "http://127.0.0.1:4317"),
    "health_listen": ('"0.0.0.0:7412"', "0.0.0.0:7412"),
    "log_level": ('"debug"', "debug"),
    "log_format": ('"json"', "json"),
    "io_read_threads": ("5", "5"),
    "io_write_threads": ("6", "6"),
    "optimizer_threads": ("3", "3"),
    "worker_nice": ("4", "4"),
    "numa_node": ("1", "1"),
    "huge_pages": ("true", "true"),
    "lock_memory": ("true", "true"),
    "admission_timeout_seconds": ("7.5", "7.5"),
    "heartbeat_timeout_seconds": ("20", "20"),
    "session_grace_seconds": ("3", "3"),
    "late_copy_seconds": ("0", "0"),
    "max_sessions": ("500", "500"),
    "reserved_sessions": ("9", "9"),
    "max_sessions_per_identity": ("11", "11"),
    "max_sessions_per_address": ("12", "12"),
    "connection_idle_seconds": ("13", "13"),
    "stream_budget": ('"32MiB"', "32MiB"),
    "stream_window": ('"2MiB"', "2MiB"),
    "stream_stall_seconds": ("14", "14"),
}
# It excludes huge_pages, so it has a test of its own.
ARENA_FILE = ('"/dev/shm/arena"', "/dev/shm/arena")


def test_every_key_has_a_variable_that_means_what_the_file_means(tmp_path: Path) -> None:
    assert {*EVERY_KEY, "arena_file"} == set(DaemonConfig.model_fields)
    others = {key: value for key, value in EVERY_KEY.items() if key != "huge_pages"} | {"arena_file": ARENA_FILE}
    for chosen in (EVERY_KEY, others):
        by_file = load_config(written(tmp_path, "".join(f"{key} = {value[0]}\n" for key, value in chosen.items())), {})
        by_variables = load_config(
            None, {}, {f"{ENVIRONMENT_PREFIX}{key.upper()}": value[1] for key, value in chosen.items()}
        )

        assert by_variables == by_file
        assert set(by_variables.model_fields_set) == set(chosen)
    assert by_variables.quotas.token[0].jobs == 2


def test_the_health_service_may_be_open_to_others_because_it_has_no_secret() -> None:
    assert load_config(None, {"state_dir": "/d", "health_listen": "0.0.0.0:7412"}).health_listen == "0.0.0.0:7412"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("HOST_BUDGT", "1GiB", "PARAMSERVER_SERVE_HOST_BUDGT: .*did you mean PARAMSERVER_SERVE_HOST_BUDGET"),
        ("QUOTAS", "64", "PARAMSERVER_SERVE_QUOTAS: write an inline table of TOML"),
        ("QUOTAS", "{default = 64", "PARAMSERVER_SERVE_QUOTAS: write an inline table of TOML.*is not: "),
        ("REMOTE", "node7:7070", "PARAMSERVER_SERVE_REMOTE: write an inline table of TOML, such as {lenders"),
        ("QUOTAS", "{}\nother = 1", "PARAMSERVER_SERVE_QUOTAS: write an inline table of TOML"),
        ("QUOTAS", "{default = {sesions = 64}}", "unknown key 'quotas.default.sesions'"),
        ("HEALTH_LISTEN", "7412", "'7412' is not HOST:PORT"),
        ("HOST_BUDGET", "much", "host_budget = 'much'"),
    ],
)
def test_a_variable_that_cannot_be_used_is_named(name: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, {"state_dir": "/d"}, {f"PARAMSERVER_SERVE_{name}": value})


def test_quotas_are_read_from_tables(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        'state_dir = "/d"\n[quotas.default]\nsessions = 8\n[[quotas.job]]\npattern = "a-*"\nhost_bytes = "1GiB"\n',
    )
    quotas = load_config(path, {}).quotas
    assert quotas.default.sessions == 8 and [(j.pattern, j.host_bytes) for j in quotas.job] == [("a-*", 1 << 30)]


@pytest.mark.parametrize(
    ("quotas", "named"),
    [
        ({"default": {"host_bytes": 1}}, "quotas.default.host_bytes = 1"),
        ({"default": {"host_bytes": "1,5GiB"}}, "quotas.default.host_bytes = '1,5GiB': write a number"),
        ({"default": {"weight": 0}}, "quotas.default.weight = 0"),
        ({"default": {"weight": float("nan")}}, "quotas.default.weight = nan"),
        ({"default": {"sessions": 0}}, "quotas.default.sessions = 0"),
        ({"default": {"sesions": 1}}, "unknown key 'quotas.default.sesions'"),
        ({"job": [{"sessions": 1}]}, "'quotas.job.0.pattern' is missing"),
        ({"jobs": []}, "unknown key 'quotas.jobs'; remove it"),
    ],
)
def test_a_bad_quota_is_refused_by_its_key(quotas: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, {"state_dir": "/d", "quotas": quotas})
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        (
            {"lend_budget": "2GiB", "host_budget": "1GiB"},
            "lend_budget: 2.0 GiB is more than host_budget, 1.0 GiB",
        ),
        ({"remote": {"lenders": ["10.0.0.7:7070"]}}, "cross the network in the clear to 10.0.0.7:7070"),
        ({"remote": {"lenders": ["node7"]}}, "'node7' is not HOST:PORT"),
        ({"remote": {"lenders": ["127.0.0.1:1"] * 2}}, "an address occurs twice"),
        ({"remote": {"tls_ca": "/a"}}, "tls_certificate, tls_key: missing"),
        ({"remote": {"use": "never"}}, "remote.use = 'never'"),
        ({"remote": {"timeout_seconds": 0}}, "remote.timeout_seconds = 0"),
        ({"remote": {"lender": []}}, "unknown key 'remote.lender'"),
    ],
)
def test_bad_keys_of_lenders_and_borrowers_are_refused_by_their_names(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, {"state_dir": "/d", **values})
    assert named in str(caught.value)


def test_the_token_of_a_borrower_is_read_from_its_file_and_never_shown(tmp_path: Path) -> None:
    path = tmp_path / "token"
    section = load_config(None, {"state_dir": "/d", "remote": {"token_file": str(path)}}).remote
    path.write_text("secret\n")
    assert section.read_token() == "secret" and section.read_tls() is None
    path.write_text("two words")
    with pytest.raises(ValueError, match="must hold one token") as caught:
        section.read_token()
    assert "two words" not in str(caught.value)


def test_a_socket_may_be_at_a_long_path_and_its_name_only_as_long_as_the_kernel_allows_there() -> None:
    deep = "/" + "/".join(["d" * 200] * 5)
    assert load_config(None, {"state_dir": deep}).arena_socket_path == Path(f"{deep}/paramserver.sock.arena")
    longest = "s" * (MAX_NAME_BYTES - len(".arena"))
    assert load_config(None, {"state_dir": "/d", "socket": f"{deep}/{longest}"})
    with pytest.raises(ConfigError, match=f"last part may have {MAX_NAME_BYTES} bytes, not {MAX_NAME_BYTES + 1}"):
        load_config(None, {"state_dir": "/d", "socket": f"{deep}/{longest}s"})
    # The kernel accepts a short path directly.
    assert load_config(None, {"state_dir": "/d", "socket": "/" + "s" * 100})
    with pytest.raises(ConfigError, match=r"/\\udcff/paramserver.sock.arena' is not UTF-8"):
        load_config(None, {"state_dir": "/\udcff"})


def test_every_key_says_what_it_is() -> None:
    documented = {name for name, field in DaemonConfig.model_fields.items() if field.description}
    assert set(DaemonConfig.model_fields) - documented == {"log_level", "log_format"}


@pytest.mark.parametrize(
    ("key", "variable", "text"),
    [
        ("nvme_dirs", "", "nvme_dirs = ['']: give it a value"),
        ("nvme_dirs", "/a::/b", "nvme_dirs = ['/a', '', '/b']: give it a value"),
        ("token_file", "", "token_file = '': give it a value"),
        ("audit_log", "", "audit_log = '': give it a value"),
    ],
)
def test_an_empty_value_is_not_the_working_directory(tmp_path: Path, key: str, variable: str, text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"bad configuration: {text}")):
        load_config(None, {"state_dir": "/d"}, {f"PARAMSERVER_SERVE_{key.upper()}": variable})
    path = written(tmp_path, 'state_dir = ""\n')
    with pytest.raises(ConfigError, match=re.escape(f"bad configuration (file {path}): state_dir = ''")):
        load_config(path, {})


def test_a_file_is_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    path = tmp_path / "paramserver.toml"
    path.write_text('state_dir = "/d"\nquotas = {job = [{pattern = "f\xfcr-*", sessions = 1}]}\n', encoding="utf-8")
    program = (
        "import pathlib, sys; from paramserver.config import load_config; "
        "print(ascii(load_config(pathlib.Path(sys.argv[1]), {}).quotas.job[0].pattern))"
    )
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(ROOT)}

    ended = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert (ended.stdout, ended.stderr) == ("'f\\xfcr-*'\n", "")

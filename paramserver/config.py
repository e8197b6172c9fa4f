"""The daemon's configuration: a TOML file, variables and flags, checked as a whole before anything starts."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError, model_validator

from paramserver.contract.address import (
    check_collector,
    crosses_a_network_in_the_clear,
    host_and_port,
    is_loopback,
    is_socket,
    socket_path,
)
from paramserver.contract.channel import TlsFiles
from paramserver.contract.chunks import MAX_CHUNK_BYTES
from paramserver.contract.documents import parse_toml
from paramserver.contract.optimizer_threads import MOST_BY_DEFAULT
from paramserver.contract.places import Place
from paramserver.contract.sizes import Size, shown_size
from paramserver.contract.sockets import check_path
from paramserver.contract.token_files import token_in
from paramserver.errors import ConfigError
from paramserver.security.quotas import QuotasSection

# The environment variable of a configuration key has this prefix, followed by the key in capitals.
ENVIRONMENT_PREFIX = "PARAMSERVER_SERVE_"
# The configuration keys whose value is a list of paths or names. Their environment variables separate the list's
# entries by colons.
_LISTS = ("nvme_dirs", "metrics_names")
_HOST_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
# The configuration keys whose value is a table. Each has an example: the table as an inline table of TOML, which is the
# form that the key's environment variable takes.
_TABLES = {
    "quotas": '{default = {sessions = 64}, job = [{pattern = "a-*"}]}',
    "remote": '{lenders = ["127.0.0.1:7070"], budget = "64GiB"}',
}

_MAX_LENDERS = 64
# The smallest `stream_budget` that can be configured. Its one half has room for the first small chunks of some hundred
# transfers, and its other half for large chunks of 1 MiB.
_MIN_TRANSFER_BUDGET_BYTES = 4 << 20


class RemoteSection(BaseModel):
    """The section `remote` of the configuration: the daemons of which this one borrows host memory."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lenders: Annotated[tuple[str, ...], Field(max_length=_MAX_LENDERS)] = ()
    budget: Annotated[Size, Field(ge=1 << 20)] = ByteSize(1 << 30)
    use: Literal["faster", "always"] = "faster"
    timeout_seconds: Annotated[float, Field(ge=0.05, le=60.0)] = 2.0
    retry_seconds: Annotated[float, Field(ge=0.1, le=3600.0)] = 10.0
    token_file: Path | None = None
    tls_ca: Path | None = None
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    insecure: bool = False

    @model_validator(mode="after")
    def _check_lenders(self) -> RemoteSection:
        tls = {key: getattr(self, key) for key in ("tls_ca", "tls_certificate", "tls_key")}
        missing = [key for key, path in tls.items() if path is None]
        if 0 < len(missing) < len(tls):
            raise ValueError(f"{', '.join(missing)}: missing; TLS needs all of {', '.join(tls)}")
        for address in self.lenders:
            if is_socket(address):
                socket_path(address)
                continue
            host_and_port(address)
            if missing and not self.insecure and not is_loopback(address):
                raise ValueError(
                    f"lenders: tensors would cross the network in the clear to {address}; set tls_ca, tls_certificate "
                    "and tls_key, or `insecure = true` on a trusted network"
                )
        if len(set(self.lenders)) < len(self.lenders):
            raise ValueError("lenders: an address occurs twice; name each lender once")
        return self

    def read_token(self) -> str | None:
        """Return the token in `token_file`; None if none is configured. It raises OSError and ValueError."""
        if self.token_file is None:
            return None
        token = token_in(self.token_file.read_bytes())
        if token is None:
            raise ValueError(
                f"remote.token_file {self.token_file} must hold one token, as `paramserver tokens add --borrow` "
                "prints it"
            )
        return token

    def read_tls(self) -> TlsFiles | None:
        """Return the contents of the three TLS files; None without TLS. It raises OSError and ValueError."""
        if self.tls_ca is None or self.tls_key is None or self.tls_certificate is None:
            return None
        return TlsFiles.read(self.tls_ca, self.tls_key, self.tls_certificate)


class DaemonConfig(BaseModel):
    """The configuration of one store daemon. Sizes are bytes or strings like "256MiB"."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    state_dir: Place = Field(description="directory for the catalog, the data file, the lock and the socket")
    host_budget: Size = Field(
        default=ByteSize(1 << 30), ge=1 << 20, description="bytes of shared memory behind the host tier, taken at start"
    )
    nvme_budget: Size = Field(
        default=ByteSize(64 << 30), ge=1 << 20, description="most bytes of the data files on the nvme tier"
    )
    nvme_dirs: tuple[Place, ...] = Field(
        default=(), description="directories of the data files, best one on each device; default: the state directory"
    )
    scrub_bandwidth: Size = Field(
        default=ByteSize(16 << 20), ge=0, description="bytes per second that background verification may read; 0: none"
    )
    device_timeout_seconds: float = Field(
        default=30.0, ge=0.1, le=3600.0, description="silence after which a device counts as stuck"
    )
    socket: Place | None = Field(
        default=None, description="UNIX socket; default: paramserver.sock in the state directory"
    )
    listen: str | None = Field(default=None, description="HOST:PORT to listen on over TCP besides the UNIX socket")
    insecure: bool = Field(
        default=False, description="allow TCP that is neither encrypted nor authenticated beyond loopback"
    )
    tls_certificate: Path | None = Field(default=None, description="PEM file: certificate (and chain) for `listen`")
    tls_key: Path | None = Field(default=None, description="PEM file: its private key, without a password")
    tls_client_ca: Path | None = Field(
        default=None, description="PEM file: authorities that sign clients' certificates"
    )
    token_file: Path | None = Field(
        default=None, description="TOML file of tokens (`paramserver tokens`); with it every call needs one"
    )
    quotas: QuotasSection = Field(
        default=QuotasSection(), description="limits of jobs, and of tokens over all their jobs"
    )
    lend_budget: Size = Field(
        default=ByteSize(0), ge=0, description="most bytes of host_budget that other daemons may borrow; 0: none"
    )
    lend_per_borrower: Size | None = Field(
        default=None, ge=1 << 20, description="most bytes that one borrower may have of them; default: all"
    )
    remote: RemoteSection = Field(default=RemoteSection(), description="daemons whose host memory this one borrows")
    metrics_listen: str | None = Field(
        default=None, description="HOST:PORT of the HTTP endpoint with /metrics for Prometheus and the page"
    )
    metrics_names: tuple[str, ...] = Field(
        default=(),
        description="names of hosts under which `metrics_listen` answers besides those of loopback; default: no others "
        "on loopback, every name elsewhere",
    )
    page: bool = Field(default=True, description="whether `metrics_listen` also serves the page for people, at /")
    metrics_jobs: int = Field(
        default=100,
        ge=0,
        le=10_000,
        description="most jobs with metrics of their own: those in use first, then the newest commits",
    )
    otlp_endpoint: str | None = Field(
        default=None,
        description="http://HOST:4317 or https://HOST:4317 of an OpenTelemetry collector, which gets the spans of the "
        "steps that trainers have traced; needs the extra `telemetry`",
    )
    health_listen: str | None = Field(
        default=None,
        description="HOST:PORT of a second gRPC endpoint, without TLS, which has the health service and nothing else",
    )
    audit_log: Place | None = Field(
        default=None,
        description="file with a line of JSON for each call that destroys something; default: audit.jsonl in the state "
        "directory",
    )
    audit_log_bytes: Size = Field(
        default=ByteSize(16 << 20),
        ge=64 << 10,
        description="most bytes of that file and its predecessor, and of the two of tokens of jobs",
    )
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["console", "json"] = "console"
    io_read_threads: int = Field(default=4, ge=1, le=64, description="threads that read from nvme")
    io_write_threads: int = Field(default=2, ge=1, le=64, description="threads that write to nvme")
    optimizer_threads: int | None = Field(
        default=None,
        ge=1,
        le=64,
        description="threads that run optimizer kernels; default: half of the processors that the daemon may use, at "
        f"most {MOST_BY_DEFAULT}",
    )
    worker_nice: int = Field(
        default=0, ge=0, le=19, description="niceness of these threads: how far they yield to processes that compute"
    )
    numa_node: int | None = Field(
        default=None, ge=0, le=1023, description="NUMA node on whose cores and memory the daemon stays; default: any"
    )
    huge_pages: bool = Field(
        default=False,
        description="shared memory in pages of 2 MiB (vm.nr_hugepages) where there are enough",
    )
    lock_memory: bool = Field(
        default=False,
        description="never swap shared memory out, where RLIMIT_MEMLOCK allows that",
    )
    admission_timeout_seconds: float = Field(
        default=60.0,
        ge=0.1,
        le=86_400.0,
        description="time that a request waits for room in host memory, then fails",
    )
    heartbeat_timeout_seconds: float = Field(
        default=15.0, ge=1.0, le=600.0, description="silence after which a client's session is void"
    )
    session_grace_seconds: float = Field(
        default=2.0,
        ge=0.0,
        le=600.0,
        description="how long a session outlives its broken stream",
    )
    late_copy_seconds: float = Field(
        default=5.0,
        ge=0.0,
        le=600.0,
        description="how long memory that a trainer's GPU was writing stays unused after the trainer was killed",
    )
    # Each session takes 16 bytes of the arena's header. The upper limit of `max_sessions` keeps the header a small part
    # of the smallest host_budget.
    max_sessions: int = Field(default=4096, ge=1, le=16_384, description="most sessions at once")
    reserved_sessions: int | None = Field(
        default=None, ge=0, description="sessions kept free for operators, and as many for clients of this node"
    )
    max_sessions_per_identity: int | None = Field(
        default=None, ge=1, description="most sessions of one token of role job, or of one certificate without tokens"
    )
    max_sessions_per_address: int | None = Field(
        default=None, ge=1, description="most sessions from one address of another machine"
    )
    connection_idle_seconds: float = Field(
        default=30.0, ge=0.1, le=3600.0, description="time after which a connection without a call is closed"
    )
    arena_file: Place | None = Field(
        default=None, description="name of the shared memory, on a tmpfs, for clients in other containers"
    )

    stream_budget: Size = Field(
        default=ByteSize(64 << 20),
        ge=_MIN_TRANSFER_BUDGET_BYTES,
        description="most bytes of chunks that are on their way to and from clients at once",
    )
    stream_window: Size = Field(
        default=ByteSize(8 << 20),
        ge=MAX_CHUNK_BYTES,
        description="most bytes that one writing client may have under way",
    )
    stream_stall_seconds: float = Field(
        default=10.0, ge=0.1, le=3600.0, description="time after which a transfer that does not move is ended"
    )

    @model_validator(mode="after")
    def _check_lending(self) -> DaemonConfig:
        if self.lend_budget > self.host_budget:
            raise ValueError(
                f"lend_budget: {shown_size(self.lend_budget)} is more than host_budget, "
                f"{shown_size(self.host_budget)}, of which it is a part; lower it, or raise host_budget"
            )
        return self

    @model_validator(mode="after")
    def _check_addresses(self) -> DaemonConfig:
        check_path(self.arena_socket_path)
        for key in ("listen", "metrics_listen", "health_listen"):
            if (address := getattr(self, key)) is not None:
                # gRPC listens at all addresses of the machine if an address has no host, so `listen` may leave out the
                # host. gRPC listens at port 443 if an address has no port, which operators do not expect, so an address
                # without a port is refused.
                all_hosts = key == "listen" and address.startswith(":")
                try:
                    host_and_port(f"[::]{address}" if all_hosts else address)
                except ValueError as error:
                    raise ValueError(f"{key}: {error}") from None
        if self.arena_file is not None and self.huge_pages:
            raise ValueError(
                f"huge_pages: memory with a name (arena_file = {self.arena_file}) is in ordinary pages; leave out "
                "huge_pages or arena_file"
            )
        return self

    @model_validator(mode="after")
    def _check_security(self) -> DaemonConfig:
        tls = {key: getattr(self, key) for key in ("tls_certificate", "tls_key", "tls_client_ca")}
        missing = [key for key, path in tls.items() if path is None]
        if 0 < len(missing) < len(tls):
            raise ValueError(f"{', '.join(missing)}: missing; TLS needs all of {', '.join(tls)}")
        if not missing and self.listen is None and self.metrics_listen is None:
            raise ValueError(
                "tls_certificate: TLS is for TCP, and neither `listen` (--listen) nor `metrics_listen` "
                "(--metrics-listen) is set"
            )
        if not missing and self.insecure:
            raise ValueError("insecure: true, beside tls_certificate; remove one of them")
        if self.listen is not None and missing and not self.insecure and not is_loopback(self.listen):
            raise ValueError(
                f"listen: {self.listen} can be reached from other machines, and connections would be neither encrypted "
                "nor authenticated; set tls_certificate, tls_key and tls_client_ca (`paramserver certs` makes them), "
                "listen on 127.0.0.1, or set `insecure = true` (--insecure) on a trusted network"
            )
        if self.metrics_listen is not None and missing and not self.insecure and not is_loopback(self.metrics_listen):
            raise ValueError(
                f"metrics_listen: {self.metrics_listen} can be reached from other machines, and would show the "
                "names of jobs to all of them; set tls_certificate, tls_key and tls_client_ca (`paramserver "
                "certs` makes them), listen on 127.0.0.1, or set `insecure = true` (--insecure) on a trusted "
                "network"
            )
        return self

    @model_validator(mode="after")
    def _check_names(self) -> DaemonConfig:
        for name in self.metrics_names:
            if not _HOST_NAME.fullmatch(name):
                raise ValueError(
                    f"metrics_names: {name!r} is not the name of a host; write it without a scheme and without a port, "
                    "such as node7.example"
                )
        if self.metrics_names and self.metrics_listen is None:
            raise ValueError("metrics_names: they are names of `metrics_listen` (--metrics-listen), which is not set")
        return self

    @model_validator(mode="after")
    def _check_collector(self) -> DaemonConfig:
        if self.otlp_endpoint is None:
            return self
        check_collector(self.otlp_endpoint)
        if crosses_a_network_in_the_clear(self.otlp_endpoint) and not self.insecure:
            raise ValueError(
                f"otlp_endpoint: the names of jobs and tensors would cross a network in the clear to "
                f"{self.otlp_endpoint}; use https://, a collector on this machine, or set `insecure = true` "
                "(--insecure) on a trusted network"
            )
        return self

    @model_validator(mode="after")
    def _check_sessions(self) -> DaemonConfig:
        if 2 * self.sessions_reserved >= self.max_sessions:
            raise ValueError(
                f"reserved_sessions: {self.sessions_reserved}, twice, leaves no session of max_sessions = "
                f"{self.max_sessions} for clients of other nodes; lower it, or raise max_sessions"
            )
        return self

    @property
    def sessions_reserved(self) -> int:
        """The number of sessions kept free for operators; as many again are kept free for clients of this node."""
        return self.max_sessions // 64 if self.reserved_sessions is None else self.reserved_sessions

    @property
    def socket_path(self) -> Path:
        """The absolute path of the UNIX socket on which the gRPC server listens."""
        return (self.socket or self.state_dir / "paramserver.sock").absolute()

    @property
    def audit_path(self) -> Path:
        """The absolute path of the audit log."""
        return (self.audit_log or self.state_dir / "audit.jsonl").absolute()

    @property
    def jobs_audit_path(self) -> Path:
        """The absolute path of the audit log for calls with tokens of jobs."""
        path = self.audit_path
        return path.with_name(f"{path.stem}.jobs{path.suffix}")

    @property
    def arena_socket_path(self) -> Path:
        """The path of the UNIX socket from which clients of this node get the arena's file descriptor."""
        return self.socket_path.with_name(self.socket_path.name + ".arena")


def load_config(
    path: Path | None, flags: Mapping[str, Any], environment: Mapping[str, str] | None = None
) -> DaemonConfig:
    """Return the configuration of a file, in which variables and then flags override keys.

    Args:
        path: the TOML file, or None if there is none.
        flags: values by key; a key whose value is None is not set.
        environment: environment variables, of which those with ENVIRONMENT_PREFIX are read. None if none are read.

    Raises:
        ConfigError: the message names the key, its value and what is allowed.
    """
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = parse_toml(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read config file {path}: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"config file {path} is not valid TOML: {error}") from error
    values |= _of_environment(environment or {})
    where = f" (file {path})" if path is not None else ""
    # A configuration value is empty if a shell or a container sets the key's variable from another one that is not set.
    # An empty path would mean the working directory, so empty values are refused.
    if empty := [key for key, value in values.items() if value == "" or (isinstance(value, list) and "" in value)]:
        text = "give it a value, or leave it out"
        raise ConfigError("\n".join(f"bad configuration{where}: {key} = {values[key]!r}: {text}" for key in empty))
    values |= {key: value for key, value in flags.items() if value is not None}
    try:
        return DaemonConfig.model_validate(values)
    except ValidationError as error:
        lines = [_explain(tuple(map(str, e["loc"])), e["type"], e["msg"], e.get("input")) for e in error.errors()]
        raise ConfigError("\n".join(f"bad configuration{where}: {line}" for line in lines)) from error


def _of_environment(environment: Mapping[str, str]) -> Mapping[str, Any]:
    """Return the values by key that the variables of an environment set. It can raise ConfigError."""
    values: dict[str, Any] = {}
    for name in sorted(environment):
        if not name.startswith(ENVIRONMENT_PREFIX):
            continue
        key = name.removeprefix(ENVIRONMENT_PREFIX).lower()
        if key not in DaemonConfig.model_fields:
            close = difflib.get_close_matches(key, DaemonConfig.model_fields, n=1)
            hint = f"did you mean {ENVIRONMENT_PREFIX}{close[0].upper()}?" if close else "unset it"
            raise ConfigError(f"{name}: there is no key {key!r}; {hint}")
        if key in _TABLES:
            values[key] = _inline_table(name, environment[name], _TABLES[key])
        else:
            values[key] = environment[name].split(os.pathsep) if key in _LISTS else environment[name]
    return values


def _inline_table(name: str, text: str, example: str) -> Mapping[str, Any]:
    """Return the table that a variable holds. It can raise ConfigError."""
    wanted = f"write an inline table of TOML, such as {example}"
    try:
        values = parse_toml(f"table = {text}")
    except ValueError as error:
        raise ConfigError(f"{name}: {wanted}; {text!r} is not: {error}") from error
    table = values.pop("table")
    if values or not isinstance(table, dict):
        raise ConfigError(f"{name}: {wanted}; {text!r} is not")
    return table


def _explain(location: tuple[str, ...], kind: str, message: str, value: object) -> str:
    key = ".".join(location)
    is_nested = len(location) > 1
    known = [] if is_nested else list(DaemonConfig.model_fields)
    if kind == "extra_forbidden":
        close = difflib.get_close_matches(key, known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(known)}" if known else "remove it"
        return f"unknown key {key!r}; {hint}"
    if kind == "missing":
        return f"{key!r} is missing; set it in the config file" + (
            "" if is_nested else f" or with --{key.replace('_', '-')}"
        )
    if not key:
        return message.removeprefix("Value error, ")
    return f"{key} = {value!r}: {message}"

"""The daemon's life: opens the engine, serves until a signal or the end of standard input, closes all in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import platform
import secrets
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2
from prometheus_client import (
    GC_COLLECTOR,
    PLATFORM_COLLECTOR,
    PROCESS_COLLECTOR,
    CollectorRegistry,
    disable_created_metrics,
)

from paramserver import __version__
from paramserver.build import read_build
from paramserver.config import DaemonConfig
from paramserver.contract.capabilities import CAPABILITIES
from paramserver.contract.disk_room import too_large
from paramserver.contract.limits import GRADIENTS_AT_ONCE, UNITS_MAPPED_AT_ONCE
from paramserver.contract.open_files import raise_limit
from paramserver.contract.optimizer_threads import by_default
from paramserver.contract.otlp import DISABLED_VARIABLE, OtlpError, SpanSender, is_disabled
from paramserver.dataplane.arena_socket import ArenaSocket
from paramserver.dataplane.chunk_budget import ChunkBudget
from paramserver.dataplane.lending import Lending
from paramserver.dataplane.read_write import ReadWrite
from paramserver.errors import ConfigError
from paramserver.events import EventKind, EventLog
from paramserver.lenders import lenders_of
from paramserver.listening import listen, make_server, start
from paramserver.metrics.collector import StoreCollector
from paramserver.metrics.durations import Durations
from paramserver.metrics.endpoint import MetricsEndpoint
from paramserver.page.data import PageData
from paramserver.page.history import INTERVAL_SECONDS, History
from paramserver.page.steps import StepLog
from paramserver.process import numa
from paramserver.process.audit_log import AuditLog
from paramserver.process.background import repeat
from paramserver.process.loop_watch import LoopWatch, StallLog
from paramserver.process.manager import tell_manager
from paramserver.process.socket_file import clear_socket
from paramserver.rpc.checked_server import CheckedServer, NoteCall
from paramserver.rpc.rights import Right
from paramserver.security.gate import Gate
from paramserver.security.quotas import Quotas
from paramserver.security.tls import CertificateFiles, server_credentials
from paramserver.security.tokens import TokenFile
from paramserver.services.access import Access, OnSession, answer_once
from paramserver.services.audit import Audit
from paramserver.services.configuration import Configuration
from paramserver.services.operations import AdminParts
from paramserver.services.parameter_store import ParameterStore
from paramserver.services.store_admin import StoreAdmin
from paramserver.services.store_view import StoreView
from paramserver.services.telemetry import Telemetry
from paramserver.services.tracing import Traces
from paramserver.sessions.drain import Drain
from paramserver.sessions.notices import describe_waits
from paramserver.sessions.seats import SeatLimits
from paramserver.sessions.service import SessionService
from paramserver.sessions.sessions import SessionLimits, Sessions
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import store_admin_pb2
from storage.base.config import EngineConfig
from storage.base.shard import TierName
from storage.engine import Engine
from storage.tiers.arena import PIECE_BYTES, SETTLED_BYTE
from storage.tiers.contract import CopyTier
from storage.tiers.remote import RemoteTier

log = logging.getLogger(__name__)

STOP_GRACE_SECONDS = 5.0
# When the daemon is stopped, it waits at most this long until no commit is under way. A commit takes seconds, unless a
# device hangs.
STOP_COMMIT_SECONDS = 30.0
# A client sends this number of heartbeats in heartbeat_timeout_seconds. Its session ends if none comes for that time.
HEARTBEATS_OF_A_TIMEOUT = 5
STORE_SERVICE = pb.DESCRIPTOR.services_by_name["ParameterStore"]
ADMIN_SERVICE = store_admin_pb2.DESCRIPTOR.services_by_name["StoreAdmin"]
HEALTH_SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"]
REFLECTION_SERVICE = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]


async def serve(config: DaemonConfig, read_again: Callable[[], DaemonConfig], *, exit_with_stdin: bool) -> None:
    """Run a store daemon until SIGTERM, SIGINT, or, with `exit_with_stdin`, the end of standard input.

    `read_again` reads the configuration anew, for operators who change it; it raises ConfigError.

    Raises:
        ConfigError: a certificate, the token file, the NUMA node or the standard input cannot be used.
        StorageError: the daemon cannot start with this state directory, these budgets or this limit of open files.
    """
    stop = _stop_event(exit_with_stdin=exit_with_stdin)
    raise_limit()
    # Certificates and tokens are read before the daemon makes any file, so that a daemon with an unusable configuration
    # ends without changes to its directories.
    credentials, tokens = _read_access(config)
    # The umask gives the sockets and files that the daemon makes a mode that admits the daemon's user only.
    os.umask(0o077)
    if config.numa_node is not None:
        numa.stay_on(config.numa_node)
    quotas = Quotas(config.quotas)
    events = EventLog()
    engine = await Engine.open(_engine_config(config, quotas, events), copies=_copy_tiers(config, events))
    async with contextlib.AsyncExitStack() as cleanup:
        cleanup.push_async_callback(engine.close)
        _tell_of_full_disks(config, engine, events)
        configuration = Configuration(
            config,
            partial(_read_usable, read_again),
            quotas,
            lambda changed: engine.admission.check_budgets(changed.host_budget, changed.nvme_budget),
            lambda changed: engine.lent.resize(changed.lend_budget, changed.lend_per_borrower),
        )
        await _serve(config, configuration, engine, quotas, events, credentials, tokens, stop, cleanup)
    log.info("stopped")


def _stop_event(*, exit_with_stdin: bool) -> asyncio.Event:
    """Return the event that the signals set, and, with `exit_with_stdin`, the end of standard input sets, too."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if exit_with_stdin:
        try:
            loop.add_reader(sys.stdin.fileno(), _on_stdin, loop, stop)
        except PermissionError as error:
            raise ConfigError(
                "--exit-with-stdin: standard input is closed, a file or /dev/null, whose end cannot be waited for; "
                "give the daemon a pipe"
            ) from error
    return stop


def _engine_config(config: DaemonConfig, quotas: Quotas, events: EventLog) -> EngineConfig:
    return EngineConfig(
        state_dir=config.state_dir,
        host_budget_bytes=config.host_budget,
        nvme_budget_bytes=config.nvme_budget,
        nvme_dirs=config.nvme_dirs,
        scrub_bytes_per_second=config.scrub_bandwidth,
        device_timeout_seconds=config.device_timeout_seconds,
        io_read_threads=config.io_read_threads,
        io_write_threads=config.io_write_threads,
        optimizer_threads=config.optimizer_threads or by_default(len(os.sched_getaffinity(0))),
        worker_nice=config.worker_nice,
        admission_timeout_seconds=config.admission_timeout_seconds,
        arena_slots=config.max_sessions,
        arena_file=config.arena_file.absolute() if config.arena_file else None,
        huge_pages=config.huge_pages,
        lock_memory=config.lock_memory,
        weight_of=lambda job: quotas.of(job).weight,
        on_damage=lambda error: events.add(EventKind.DAMAGE, TierName.NVME, str(error), once=True),
        units_of_a_rank_alone=UNITS_MAPPED_AT_ONCE,
        gradients_of_a_rank=GRADIENTS_AT_ONCE,
        lend_bytes=config.lend_budget,
        lend_bytes_per_borrower=config.lend_per_borrower,
    )


def _copy_tiers(config: DaemonConfig, events: EventLog) -> list[CopyTier[Any]]:
    """Return the tiers with copies of what is on NVMe, fastest first. The configuration says which there are."""
    section = config.remote
    if not section.lenders:
        return []
    remote = RemoteTier(
        lenders_of(section, config.state_dir, platform.node()),
        budget_bytes=section.budget,
        timeout_seconds=section.timeout_seconds,
        retry_seconds=section.retry_seconds,
        is_always_used=section.use == "always",
        on_event=lambda address, text: events.add(EventKind.TIER, TierName.REMOTE, f"{address}: {text}"),
    )
    return [remote]


async def _serve(
    config: DaemonConfig,
    configuration: Configuration,
    engine: Engine,
    quotas: Quotas,
    events: EventLog,
    credentials: grpc.ServerCredentials | None,
    tokens: TokenFile | None,
    stop: asyncio.Event,
    cleanup: contextlib.AsyncExitStack,
) -> None:
    for path in (config.socket_path, config.arena_socket_path):
        clear_socket(path)
    arena_socket = ArenaSocket(config.arena_socket_path, engine.host.arena.fd)
    cleanup.push_async_callback(arena_socket.close)
    watch = cleanup.enter_context(LoopWatch(asyncio.get_running_loop(), StallLog()))
    chunk_budget = ChunkBudget(
        config.stream_budget, stall_seconds=config.stream_stall_seconds, weight_of=engine.config.weight_of
    )
    traces = Traces(engine.tracer)

    sessions = _make_sessions(config, engine, quotas, events, chunk_budget, traces)
    cleanup.push_async_callback(sessions.close)
    welcome = _welcome(config, engine)
    gate = Gate(tokens)
    drain = Drain(engine, sessions)
    session_service = SessionService(engine, sessions, gate, quotas, welcome, events, drain)
    cleanup.callback(session_service.close)
    if tokens is not None:
        cleanup.callback(asyncio.ensure_future(tokens.follow()).cancel)
    server = make_server(config)
    access = Access(gate, sessions, _send_spans(config, engine, welcome.epoch, cleanup))
    streams = ReadWrite(engine, chunk_budget, config.stream_window)
    lending = Lending(engine.lent, chunk_budget, gate, drain.check_open)
    health_service = health.aio.HealthServicer()
    view = StoreView(engine, sessions, chunk_budget, watch, welcome.epoch, config.state_dir)
    note_call = _serve_metrics(config, engine, sessions, view, watch, events, gate, cleanup)
    checked = CheckedServer(server, access.admission, lambda: describe_waits(engine), note_call, answer_once)
    checked.add(
        STORE_SERVICE, ParameterStore(engine, sessions, session_service, streams, lending, access, quotas, traces)
    )
    parts = AdminParts(
        # `read_build` reads all files of the code, so a thread calls it. On the event loop it would stall all calls.
        build=await asyncio.to_thread(read_build),
        engine=engine,
        sessions=sessions,
        view=view,
        gate=gate,
        quotas=quotas,
        events=events,
        audit=Audit(*_audit_logs(config), events),
        drain=drain,
        tell_ready=partial(_tell_ready, health_service),
        configuration=configuration,
    )
    checked.add(ADMIN_SERVICE, StoreAdmin(parts))
    _add_library_services(checked, health_service)
    listen(server, config, credentials, cleanup)
    await start(server, config.health_listen, health_service, cleanup)
    try:
        await _tell_started(health_service)
        events.add(EventKind.DAEMON, "daemon", f"version {__version__} serves {config.state_dir.absolute()}")
        log.info("serving on %s%s", config.socket_path, f" and {config.listen}" if config.listen else "")
        await stop.wait()
        await _prepare_stop(health_service, session_service)
    finally:
        session_service.announce_stop()
        lending.close()
        await server.stop(STOP_GRACE_SECONDS)


def _add_library_services(checked: CheckedServer, health_service: health.aio.HealthServicer) -> None:
    """Add the services that gRPC's libraries define: health, and the reflection of all services."""
    services = (STORE_SERVICE, ADMIN_SERVICE, HEALTH_SERVICE, REFLECTION_SERVICE)
    checked.add(HEALTH_SERVICE, health_service, library_right=Right.NOTHING)
    # The reflection service tells callers which methods the daemon has, so it answers only callers with a token.
    described = reflection.aio.ReflectionServicer([service.full_name for service in services])
    checked.add(REFLECTION_SERVICE, described, library_right=Right.TOKEN)


async def _prepare_stop(health_service: health.aio.HealthServicer, session_service: SessionService) -> None:
    """Tell the service manager and health probes that the daemon stops, and wait until no commit is under way."""
    log.info("stopping")
    tell_manager("STOPPING=1")
    await health_service.enter_graceful_shutdown()
    await session_service.prepare_stop(STOP_COMMIT_SECONDS)


def _make_sessions(
    config: DaemonConfig, engine: Engine, quotas: Quotas, events: EventLog, chunk_budget: ChunkBudget, traces: Traces
) -> Sessions:
    def end_session(session_id: str) -> None:
        chunk_budget.end_session(session_id)
        traces.end_session(session_id)

    return Sessions(
        engine,
        SessionLimits(
            heartbeat_timeout_seconds=config.heartbeat_timeout_seconds,
            grace_seconds=config.session_grace_seconds,
            late_copy_seconds=config.late_copy_seconds,
            seats=SeatLimits(
                total=config.max_sessions,
                reserved=config.sessions_reserved,
                per_identity=config.max_sessions_per_identity,
                per_address=config.max_sessions_per_address,
            ),
        ),
        quotas,
        events,
        on_end=end_session,
    )


def _send_spans(
    config: DaemonConfig, engine: Engine, epoch: str, cleanup: contextlib.AsyncExitStack
) -> OnSession | None:
    """Begin to send the spans of traced steps to the collector. `cleanup` ends that.

    Return the function that notes to which step a call belongs; None if the configuration names no collector, or the
    environment turns OpenTelemetry off.

    Raises:
        ConfigError: the packages that this needs are not installed.
    """
    if config.otlp_endpoint is None:
        return None
    if is_disabled():
        log.info("no spans go to %s, because $%s is true", config.otlp_endpoint, DISABLED_VARIABLE)
        return None
    attributes = {"service.name": "paramserver", "service.version": __version__, "service.instance.id": epoch}
    try:
        sender = SpanSender(config.otlp_endpoint, attributes)
    except OtlpError as error:
        raise ConfigError(f"otlp_endpoint = {config.otlp_endpoint}: {error}") from error
    cleanup.push_async_callback(asyncio.to_thread, sender.close)
    telemetry = Telemetry(sender)
    engine.tracer.listen(telemetry.note_span)
    log.info("spans of traced steps go to %s", config.otlp_endpoint)
    return telemetry.note_call


def _audit_logs(config: DaemonConfig) -> tuple[AuditLog, AuditLog]:
    """Return the audit logs for operators and for tokens of jobs, once their files are there.

    Without a `token_file` all callers are operators, so the log for tokens of jobs gets no file.

    Raises:
        ConfigError: a file cannot be written.
    """
    of_operators = AuditLog(config.audit_path, config.audit_log_bytes)
    of_jobs = AuditLog(config.jobs_audit_path, config.audit_log_bytes)
    for audit_log in [of_operators] if config.token_file is None else [of_operators, of_jobs]:
        try:
            audit_log.check()
        except OSError as error:
            text = f"audit_log = {config.audit_path}: {audit_log.path.name} cannot be written: {error.strerror}"
            raise ConfigError(text) from error
    return of_operators, of_jobs


async def _tell_started(health_service: health.aio.HealthServicer) -> None:
    """Tell clients of the health service, and the service manager, that the daemon serves."""
    for service in ("", ADMIN_SERVICE.full_name):
        await health_service.set(service, health_pb2.HealthCheckResponse.SERVING)
    await _tell_ready(health_service, True)
    tell_manager("READY=1")


async def _tell_ready(health_service: health.aio.HealthServicer, is_ready: bool) -> None:
    """Tell clients of the health service whether the daemon accepts sessions."""
    answer = health_pb2.HealthCheckResponse
    await health_service.set(STORE_SERVICE.full_name, answer.SERVING if is_ready else answer.NOT_SERVING)


def _serve_metrics(
    config: DaemonConfig,
    engine: Engine,
    sessions: Sessions,
    view: StoreView,
    watch: LoopWatch,
    events: EventLog,
    gate: Gate,
    cleanup: contextlib.AsyncExitStack,
) -> NoteCall | None:
    """Begin to serve the metrics and the page. `cleanup` ends that.

    Return the function that counts calls; None if `metrics_listen` is not set.
    """
    if config.metrics_listen is None:
        return None
    # By default, prometheus_client adds the time at which each series was made to the text of a scrape. Nothing here
    # uses that time, and it would be a twelfth of the text, so it is left out.
    disable_created_metrics()  # type: ignore[no-untyped-call]  # the library declares no types for it
    registry = CollectorRegistry()
    for collector in (PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR):
        registry.register(collector)
    registry.register(StoreCollector(view, asyncio.get_running_loop(), __version__, config.metrics_jobs))
    durations = Durations(registry)
    engine.tracer.listen(durations.note_span)
    page = _watch_for_page(config, engine, sessions, view, watch, events, cleanup) if config.page else None
    endpoint = MetricsEndpoint(
        config.metrics_listen, registry, gate, _certificate_files(config), page, config.metrics_names
    )
    cleanup.push_async_callback(asyncio.to_thread, endpoint.close)
    url = f"{'https' if config.tls_certificate else 'http'}://{endpoint.address}"
    log.info("metrics at %s/metrics%s", url, f", page at {url}/" if page else "")
    return durations.note_call


def _watch_for_page(
    config: DaemonConfig,
    engine: Engine,
    sessions: Sessions,
    view: StoreView,
    watch: LoopWatch,
    events: EventLog,
    cleanup: contextlib.AsyncExitStack,
) -> PageData:
    """Keep the history that the page shows, until `cleanup`, and return the object that gives the page its figures."""

    def newest_step(name: str) -> tuple[int, float] | None:
        job = engine.jobs.by_name.get(name)
        return None if job is None or job.newest is None else (job.newest, job.retained[job.newest].committed_at)

    steps = StepLog(newest_step)
    engine.tracer.listen(steps.note_span)
    history = History(engine, sessions, watch, steps)
    sampling = asyncio.ensure_future(repeat("a sample for the page", INTERVAL_SECONDS, history.take))
    cleanup.callback(sampling.cancel)
    return PageData(
        engine=engine,
        sessions=sessions,
        view=view,
        watch=watch,
        events=events,
        steps=steps,
        history=history,
        version=__version__,
        address=f"unix:{config.socket_path.absolute()}",
        heartbeat_seconds=config.heartbeat_timeout_seconds / HEARTBEATS_OF_A_TIMEOUT,
    )


def _read_access(config: DaemonConfig) -> tuple[grpc.ServerCredentials | None, TokenFile | None]:
    """Read the certificates and the tokens that a configuration names. Raise ConfigError if they cannot be used."""
    files = _certificate_files(config)
    credentials = None if files is None else server_credentials(files)
    return credentials, None if config.token_file is None else TokenFile(config.token_file)


def _read_usable(read_again: Callable[[], DaemonConfig]) -> DaemonConfig:
    """Return the configuration as it is now. Raise ConfigError if a daemon could not start with it."""
    config = read_again()
    _read_access(config)
    return config


def _certificate_files(config: DaemonConfig) -> CertificateFiles | None:
    if config.tls_certificate is None or config.tls_key is None or config.tls_client_ca is None:
        return None
    return CertificateFiles(certificate=config.tls_certificate, key=config.tls_key, client_ca=config.tls_client_ca)


def _tell_of_full_disks(config: DaemonConfig, engine: Engine, events: EventLog) -> None:
    """Log a warning where the disks have no room for `nvme_budget`; operators find it among the events, too."""
    if (text := too_large("nvme_budget", config.nvme_budget, (file.path for file in engine.nvme.files))) is not None:
        log.warning("%s", text)
        events.add(EventKind.TIER, TierName.NVME, text)


def _welcome(config: DaemonConfig, engine: Engine) -> pb.SessionResponse.Welcome:
    timeout = int(config.heartbeat_timeout_seconds * 1000)
    return pb.SessionResponse.Welcome(
        epoch=secrets.token_hex(16),
        heartbeat_interval_millis=timeout // HEARTBEATS_OF_A_TIMEOUT,
        heartbeat_timeout_millis=timeout,
        grace_millis=int(config.session_grace_seconds * 1000),
        arena=pb.Arena(
            socket_path=str(config.arena_socket_path),
            nonce=engine.host.arena.nonce,
            size_bytes=engine.host.arena.size_bytes,
            file_path=str(engine.host.arena.path or ""),
            settled_offset=SETTLED_BYTE,
            piece_bytes=PIECE_BYTES,
        ),
        version=__version__,
        patience_millis=int(1000 * longest_wait_seconds(config)),
        capabilities=CAPABILITIES,
    )


def longest_wait_seconds(config: DaemonConfig) -> float:
    """Return how long one call may wait in the daemon: for its job's quota, then for room, then for a device."""
    return 2 * config.admission_timeout_seconds + config.device_timeout_seconds


def _on_stdin(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    if not os.read(sys.stdin.fileno(), 4096):
        loop.remove_reader(sys.stdin.fileno())
        stop.set()

"""Mutual TLS for the TCP address: reads and checks certificate files, and loads them again when they change.

This module owns the credentials of the server. It must never serve with less protection than was configured. If the
files cannot be used at the start, the daemon does not start. If changed files cannot be used later, the last good
contents stay in use.
"""

from __future__ import annotations

import datetime
import logging
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from paramserver.errors import ConfigError
from paramserver.security.files import Fingerprint, fingerprint

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateFiles:
    """PEM files: the server's certificate (with its chain), its key, and the authorities that sign clients."""

    certificate: Path
    key: Path
    client_ca: Path

    def read(self) -> grpc.ServerCertificateConfiguration:
        """Read and check the files, and return gRPC's configuration for them.

        Raises:
            ConfigError: a file cannot be used; the message names its key in the configuration and what is wrong.
        """
        chain_pem, key_pem, authorities_pem = (
            _read("tls_certificate", self.certificate),
            _read("tls_key", self.key),
            _read("tls_client_ca", self.client_ca),
        )
        chain = _certificates("tls_certificate", self.certificate, chain_pem)
        for authority in _certificates("tls_client_ca", self.client_ca, authorities_pem):
            _check_dates("tls_client_ca", self.client_ca, authority)
        _check_dates("tls_certificate", self.certificate, chain[0])
        try:
            key = serialization.load_pem_private_key(key_pem, password=None)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"tls_key: {self.key} is not a PEM private key without a password") from error
        if key.public_key() != chain[0].public_key():
            raise ConfigError(
                f"tls_key: {self.key} is not the key of the first certificate in tls_certificate {self.certificate}; "
                "give the two that belong together"
            )
        return grpc.ssl_server_certificate_configuration([(key_pem, chain_pem)], authorities_pem)

    def fingerprints(self) -> tuple[Fingerprint | None, ...]:
        """Return a value that changes when one of the files does."""
        return tuple(map(fingerprint, (self.certificate, self.key, self.client_ca)))


def server_credentials(files: CertificateFiles) -> grpc.ServerCredentials:
    """Return credentials that demand a certificate of every client, and that follow changes of the files.

    Raises:
        ConfigError: see CertificateFiles.read.
    """
    # The fingerprints of the certificate files are taken before the files are read. So if a file changes between the
    # two, the next connection finds a changed fingerprint and reads the files again.
    seen = files.fingerprints()
    return grpc.dynamic_ssl_server_credentials(
        files.read(),
        _Reload(files, seen),  # type: ignore[arg-type]  # the type stubs lack that the function may return None
        require_client_authentication=True,
    )


class HttpsContext:
    """The TLS context of an HTTP server: it demands a certificate of every client, and follows changes of the files."""

    def __init__(self, files: CertificateFiles) -> None:
        """Read the files. It can raise ConfigError; see CertificateFiles.read."""
        files.read()
        self._files = files
        self._seen = files.fingerprints()
        self._context = self._load()
        self._lock = threading.Lock()

    def current(self) -> ssl.SSLContext:
        """Return the context of the files as they are now, or of the last good ones. It may be called on any thread."""
        with self._lock:
            now = self._files.fingerprints()
            if now != self._seen:
                try:
                    self._files.read()
                    self._context, self._seen = self._load(), now
                except (ConfigError, OSError):
                    # The error is logged for debugging only, because `_Reload` logs its reason when a gRPC client
                    # connects. The certificate files are read again at the next connection, when they may be complete.
                    log.debug("changed certificates cannot be used for HTTPS yet", exc_info=True)
            return self._context

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self._files.certificate, self._files.key)
        context.load_verify_locations(self._files.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
        return context


class _Reload:
    """A callable that returns the new configuration if the certificate files have changed, or else None.

    gRPC calls it before each handshake, on one of its own threads.
    """

    def __init__(self, files: CertificateFiles, seen: tuple[Fingerprint | None, ...]) -> None:
        self._files = files
        self._seen = seen
        # The last logged message about changed certificate files that cannot be used, so that each message is logged
        # once.
        self._problem = ""

    def __call__(self) -> grpc.ServerCertificateConfiguration | None:
        now = self._files.fingerprints()
        if now == self._seen:
            return None
        try:
            changed = self._files.read()
        except ConfigError as error:
            # `_seen` keeps the fingerprints from before the change, so the certificate files are read again at the next
            # connection, when they may be complete.
            if self._problem != (problem := str(error)):
                log.error("changed certificates cannot be used, the ones before stay in use: %s", problem)
                self._problem = problem
            return None
        self._seen, self._problem = now, ""
        log.info("changed certificates are in use for new connections")
        return changed


def _read(field: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{field}: cannot read {path}: {error.strerror}") from error


def _certificates(field: str, path: Path, pem: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise ConfigError(f"{field}: {path} holds no PEM certificate: {error}") from error


def _check_dates(field: str, path: Path, certificate: x509.Certificate) -> None:
    now = datetime.datetime.now(datetime.UTC)
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if not begin <= now <= end:
        raise ConfigError(
            f"{field}: {path} is valid from {begin:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M} UTC, which is not now; "
            "renew it, or correct this machine's clock"
        )

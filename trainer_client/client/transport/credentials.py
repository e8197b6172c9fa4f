"""The credentials of a client: a token, and for TCP a certificate.

Their files are read each time a channel is opened. This module must never put a token into a message, a log or a
`repr`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from paramserver.contract.address import is_loopback, is_socket
from paramserver.contract.bearer import TraceParent
from paramserver.contract.channel import Options, TlsFiles, channel_to
from paramserver.contract.token_files import token_in
from trainer_client.errors import ConfigError, StoreUnavailableError

TOKEN_FILE_VARIABLE = "PARAMSERVER_TOKEN_FILE"
TLS_CA_VARIABLE = "PARAMSERVER_TLS_CA"
TLS_CERTIFICATE_VARIABLE = "PARAMSERVER_TLS_CERTIFICATE"
TLS_KEY_VARIABLE = "PARAMSERVER_TLS_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """The token and the TLS files with which a client connects to the daemon.

    Attributes:
        token: the token itself. At most one of `token` and `token_file` is given.
        token_file: a file that holds the token and nothing else.
        tls_ca: PEM file of the authorities that sign the daemon's certificate. If given, TCP connections are encrypted,
            and the next two files are required. A UNIX socket is protected by its file mode instead and ignores them.
        tls_certificate: PEM file of this client's certificate.
        tls_key: PEM file of the private key of that certificate.
        insecure: allows to send a token over the network unencrypted.

    Raises:
        ConfigError: a token and a token file are both given, or only some of the TLS files.
    """

    token: str | None = field(default=None, repr=False)
    token_file: Path | None = None
    tls_ca: Path | None = None
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        if self.token is not None and self.token_file is not None:
            raise ConfigError(f"a token and token_file {self.token_file} are both given: choose one")
        tls = (self.tls_ca, self.tls_certificate, self.tls_key)
        if any(tls) and not all(tls):
            given = ", ".join(str(path) for path in tls if path is not None)
            raise ConfigError(f"TLS needs the authority, the certificate and its key; only {given} is given")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Credentials:
        """Return the credentials that $PARAMSERVER_TOKEN_FILE and $PARAMSERVER_TLS_CA, _CERTIFICATE and _KEY name."""

        def path(variable: str) -> Path | None:
            return Path(environ[variable]) if environ.get(variable) else None

        return cls(
            token_file=path(TOKEN_FILE_VARIABLE),
            tls_ca=path(TLS_CA_VARIABLE),
            tls_certificate=path(TLS_CERTIFICATE_VARIABLE),
            tls_key=path(TLS_KEY_VARIABLE),
        )

    def read_token(self) -> str | None:
        """Return the token, read from its file if one is given; None if these credentials have no token.

        Raises:
            ConfigError: the file cannot be read, or it or `token` holds no token.
        """
        if self.token_file is not None:
            given, holder = _read(self.token_file), f"token file {self.token_file}"
        elif self.token is not None:
            given, holder = self.token.encode(errors="replace"), "Credentials(token=...)"
        else:
            return None
        token = token_in(given)
        # The error message does not show the given token, because the user may have given a private key or a password
        # by mistake.
        if token is None or (self.token_file is None and token != self.token):
            raise ConfigError(f"{holder} must hold one token and nothing else, as `paramserver tokens add` prints it")
        return token

    def connect(self, address: str, options: Options, trace: TraceParent | None = None) -> grpc.Channel:
        """Return a channel to `address` that uses these credentials; the caller has checked the address.

        Raises:
            ConfigError: a file cannot be read or is empty, or the token would cross the network unencrypted.
            StoreUnavailableError: the socket's path is too long for the kernel, and its directory does not exist.
        """
        token, tls = self.read_token(), None
        if self.tls_ca and self.tls_certificate and self.tls_key and not is_socket(address):
            try:
                tls = TlsFiles.read(self.tls_ca, self.tls_key, self.tls_certificate)
            except OSError as error:
                raise ConfigError(f"{error.filename} cannot be read: {error.strerror}") from None
            except ValueError as error:
                raise ConfigError(f"paramserver.tls: {error}") from None
        elif token is not None and not self.insecure and not is_socket(address) and not is_loopback(address):
            raise ConfigError(
                f"a token for {address} would cross the network in the clear: set paramserver.tls, or "
                "paramserver.insecure to true on a network that you trust"
            )
        try:
            return channel_to(address, options=options, tls=tls, token=token, trace=trace)
        except OSError as error:
            raise StoreUnavailableError(
                grpc.StatusCode.UNAVAILABLE, f"the directory of {address} cannot be used: {error.strerror}"
            ) from None


NO_CREDENTIALS = Credentials()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None

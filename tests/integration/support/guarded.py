"""A daemon that requires certificates and tokens, and clients with good and bad ones, for tests."""

from __future__ import annotations

import datetime
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from paramserver.security.certificates import make_certificates
from paramserver.security.principals import Role
from paramserver.security.tokens import add_token
from tests.integration.support.daemon import CHANNEL_OPTIONS, Daemon
from tests.integration.support.ranks import free_port
from trainer_client.client.transport.credentials import Credentials

LOG_SECONDS = 10.0
# The daemons that may borrow memory: each has a token and a certificate of this name.
BORROWERS = ("node3", "node4")


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarded:
    """A daemon with TLS on TCP and a token file.

    Attributes:
        address: the TCP address.
        tokens: the tokens in the file, by name.
    """

    daemon: Daemon
    address: str
    directory: Path
    tokens: Mapping[str, str]

    @property
    def token_file(self) -> Path:
        """The path of the daemon's token file."""
        return self.directory / "tokens.toml"

    @property
    def certificates(self) -> Path:
        """The directory of ca.pem, server.pem, client.pem and a certificate for each of BORROWERS."""
        return self.directory / "tls"

    def credentials(self, name: str | None, **changes: Any) -> Credentials:
        """Return the credentials of a token's holder; `changes` replace fields."""
        fields: dict[str, Any] = {
            "token": None if name is None else self.tokens[name],
            "tls_ca": self.certificates / "ca.pem",
            "tls_certificate": self.certificates / "client.pem",
            "tls_key": self.certificates / "client-key.pem",
        }
        return Credentials(**(fields | changes))

    def channel(self, name: str | None, *, tcp: bool = True, **changes: Any) -> grpc.Channel:
        """Return a channel to the daemon with the credentials of a token's holder."""
        address = self.address if tcp else self.daemon.address
        return self.credentials(name, **changes).connect(address, CHANNEL_OPTIONS)

    def wait_for_log(self, text: str, since: int = 0) -> str:
        """Wait for a line with `text` in the log, from character `since` on, and return the line."""
        deadline = time.monotonic() + LOG_SECONDS
        while True:
            log = re.sub(r"\x1b\[[0-9;]*m", "", self.daemon.log[since:])
            if found := [line for line in log.splitlines() if text in line]:
                return found[0]
            assert time.monotonic() < deadline, f"no {text!r} in the log:\n{log}"
            time.sleep(0.05)


@contextmanager
def guarded_daemon(**config: Any) -> Iterator[Guarded]:
    """Run a guarded daemon whose directory other users can access."""
    directory = Path(tempfile.mkdtemp(prefix="paramserver-"))
    try:
        directory.chmod(0o755)
        certificates, token_file = directory / "tls", directory / "tokens.toml"
        make_certificates(certificates, ["127.0.0.1"], ["client", *BORROWERS], 1)
        past = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=1)
        tokens = {
            "operator": add_token(token_file, "operator", Role.ADMIN),
            "alice": add_token(token_file, "alice", Role.JOB, ["alice-*"]),
            "bob": add_token(token_file, "bob", Role.JOB, ["bob", "shared/*"]),
            "late": add_token(token_file, "late", Role.ADMIN, expires=past),
            **{name: add_token(token_file, name, Role.BORROWER) for name in BORROWERS},
        }
        address = f"127.0.0.1:{free_port()}"
        settings = {
            "socket": str(directory / "paramserver.sock"),
            "listen": address,
            "tls_certificate": str(certificates / "server.pem"),
            "tls_key": str(certificates / "server-key.pem"),
            "tls_client_ca": str(certificates / "ca.pem"),
            "token_file": str(token_file),
            "heartbeat_timeout_seconds": 2.0,
        }
        with Daemon(directory / "state", settings | config, wait=False) as daemon:
            daemon.socket = directory / "paramserver.sock"
            daemon.address = f"unix:{daemon.socket}"
            daemon.wait_until_serving()
            yield Guarded(daemon=daemon, address=address, directory=directory, tokens=tokens)
            assert daemon.stop() == 0
            assert "Traceback" not in daemon.log
    finally:
        shutil.rmtree(directory)


def expired_certificate(authority: Path, into: Path) -> tuple[Path, Path]:
    """Make an expired client certificate that the authority has signed; return the paths of certificate and key."""
    now = datetime.datetime.now(datetime.UTC)
    issuer = x509.load_pem_x509_certificate((authority / "ca.pem").read_bytes())
    issuer_key = serialization.load_pem_private_key((authority / "ca-key.pem").read_bytes(), password=None)
    assert isinstance(issuer_key, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "late")]))
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=2))
        .not_valid_after(now - datetime.timedelta(days=1))
        .sign(issuer_key, hashes.SHA256())
    )
    paths = into / "expired.pem", into / "expired-key.pem"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return paths

"""A certificate authority and certificates signed by it, for tests and for small clusters without a PKI.

This module owns the names of the files that it writes. It must never replace an existing authority, because the
certificates that it has signed would become invalid.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from paramserver.errors import ConfigError
from paramserver.security.files import replace_file

AUTHORITY_DAYS = 3650
# A new certificate is valid from this long before the moment of its signing, because the clocks of a cluster's machines
# differ a little.
CLOCK_SKEW = datetime.timedelta(minutes=5)
# The names that a client's certificate can have. They are restricted, because the client's name becomes a file name.
_CLIENT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TAKEN = ("ca", "server")
# The end of the name of a private key's file, before the suffix ".pem".
_KEY = "-key"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A certificate and its private key, as `make_certificates` makes them or reads those of the authority."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def make_certificates(directory: Path, hosts: Sequence[str], clients: Sequence[str], days: int) -> list[Path]:
    """Write `server.pem` and one `NAME.pem` for each client to `directory`, and return the paths that were written.

    Each certificate has a key file `NAME-key.pem` (mode 0600), and is signed by `ca.pem`, which is made if it does not
    exist.

    Args:
        directory: is made if it does not exist.
        hosts: the names and addresses in the server's certificate.
        clients: the names of the clients' certificates.
        days: how long the certificates are valid.

    Raises:
        ConfigError: a name is not allowed, or the existing authority cannot be used.
        OSError: a file cannot be written.
    """
    for client in clients:
        # The certificate of a client named "ca-key" would replace the key of the authority, so that name is refused.
        if not _CLIENT_NAME.fullmatch(client) or client in _TAKEN or client.endswith(_KEY):
            raise ConfigError(
                f"client name {client!r}: write letters, digits, '.', '_' and '-', 64 at most, and not "
                f"{' or '.join(_TAKEN)}, nor {_KEY} at the end"
            )
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    written: list[Path] = []
    authority_paths = (directory / "ca.pem", directory / "ca-key.pem")
    if any(path.exists() for path in authority_paths):
        authority = _load_authority(*authority_paths)
    else:
        authority = _make_authority()
        written += _write(directory, "ca", authority)
    server = _sign(authority, "paramserver", days, ExtendedKeyUsageOID.SERVER_AUTH, hosts)
    written += _write(directory, "server", server)
    for client in clients:
        written += _write(directory, client, _sign(authority, client, days, ExtendedKeyUsageOID.CLIENT_AUTH, ()))
    return written


def _make_authority() -> Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(f"paramserver test authority {os.urandom(4).hex()}")
    certificate = (
        _builder(name, name, key, AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return Pair(certificate=certificate, key=key)


def _load_authority(certificate_path: Path, key_path: Path) -> Pair:
    try:
        certificate = x509.load_pem_x509_certificate(certificate_path.read_bytes())
        key = serialization.load_pem_private_key(key_path.read_bytes(), password=None)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the authority {certificate_path} with {key_path} cannot be used: {error}; restore both files, or remove "
            "both to make a new authority, and sign everything anew"
        ) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or certificate.public_key() != key.public_key():
        raise ConfigError(f"{key_path} is not the key of {certificate_path}: restore the one that is")
    return Pair(certificate=certificate, key=key)


def _sign(authority: Pair, name: str, days: int, purpose: x509.ObjectIdentifier, hosts: Sequence[str]) -> Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = authority.certificate.subject
    builder = (
        _builder(_name(name), issuer, key, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()), critical=False)
    )
    if hosts:
        builder = builder.add_extension(x509.SubjectAlternativeName(list(map(_general_name, hosts))), critical=False)
    return Pair(certificate=builder.sign(authority.key, hashes.SHA256()), key=key)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise ConfigError(f"host {host!r} is neither an address nor a name: {error}") from error


def _write(directory: Path, name: str, pair: Pair) -> list[Path]:
    """Write the key, then the certificate, and return both paths.

    A daemon that reads both files in between finds a pair that does not match, and keeps the pair that it has.
    """
    key_path, certificate_path = directory / f"{name}{_KEY}.pem", directory / f"{name}.pem"
    key = pair.key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    replace_file(key_path, key, mode=0o600)
    replace_file(certificate_path, pair.certificate.public_bytes(serialization.Encoding.PEM), mode=0o644)
    return [certificate_path, key_path]

"""Certificates are made as they should be, and unusable ones are refused by key, file and reason."""

from __future__ import annotations

import datetime
import stat
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from typer.testing import CliRunner

from paramserver.cli import app
from paramserver.errors import ConfigError
from paramserver.security.certificates import make_certificates
from paramserver.security.tls import CertificateFiles
from tests.integration.support.guarded import expired_certificate


def files(directory: Path, **changes: Any) -> CertificateFiles:
    fields: dict[str, Any] = {
        "certificate": directory / "server.pem",
        "key": directory / "server-key.pem",
        "client_ca": directory / "ca.pem",
    }
    return CertificateFiles(**(fields | changes))


def load(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_certificates_are_for_their_hosts_purpose_and_days_and_keys_for_their_user(tmp_path: Path) -> None:
    written = make_certificates(tmp_path / "tls", ["store.example", "10.1.2.3", "::1"], ["rank-0", "rank-1"], 30)
    names = [path.name for path in written]
    assert names[:4] == ["ca.pem", "ca-key.pem", "server.pem", "server-key.pem"] and names[-1] == "rank-1-key.pem"
    assert {path: stat.S_IMODE(path.stat().st_mode) for path in written} == {
        path: 0o600 if path.name.endswith("-key.pem") else 0o644 for path in written
    }
    server, client = load(tmp_path / "tls" / "server.pem"), load(tmp_path / "tls" / "rank-1.pem")
    hosts = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert hosts.get_values_for_type(x509.DNSName) == ["store.example"]
    assert [str(address) for address in hosts.get_values_for_type(x509.IPAddress)] == ["10.1.2.3", "::1"]
    for certificate, purpose in ((server, ExtendedKeyUsageOID.SERVER_AUTH), (client, ExtendedKeyUsageOID.CLIENT_AUTH)):
        assert list(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == [purpose]
        lasts = certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
        assert datetime.timedelta(days=29) < lasts <= datetime.timedelta(days=30)
        certificate.verify_directly_issued_by(load(tmp_path / "tls" / "ca.pem"))
    assert files(tmp_path / "tls").read()


def test_an_authority_that_is_there_signs_the_next_ones(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["localhost"], ["a"], 1)
    authority = (tmp_path / "ca.pem").read_bytes()
    again = make_certificates(tmp_path, ["localhost"], ["b"], 1)
    assert (tmp_path / "ca.pem").read_bytes() == authority
    assert [path.name for path in again] == ["server.pem", "server-key.pem", "b.pem", "b-key.pem"]
    for name in ("a", "b", "server"):
        load(tmp_path / f"{name}.pem").verify_directly_issued_by(load(tmp_path / "ca.pem"))
    (tmp_path / "ca-key.pem").unlink()
    with pytest.raises(ConfigError, match=r"the authority .*ca.pem with .*ca-key.pem cannot be used: .*No such file"):
        make_certificates(tmp_path, ["localhost"], ["c"], 1)
    assert (tmp_path / "ca.pem").read_bytes() == authority


def test_a_key_of_another_authority_is_refused(tmp_path: Path) -> None:
    make_certificates(tmp_path / "one", ["localhost"], ["a"], 1)
    make_certificates(tmp_path / "two", ["localhost"], ["a"], 1)
    (tmp_path / "one" / "ca-key.pem").write_bytes((tmp_path / "two" / "ca-key.pem").read_bytes())
    with pytest.raises(ConfigError, match=r"ca-key.pem is not the key of .*ca.pem"):
        make_certificates(tmp_path / "one", ["localhost"], ["a"], 1)


@pytest.mark.parametrize(
    "client", ["", "../x", "a/b", "ca", "server", "ca-key", "server-key", "a-key", ".hidden", "x" * 65]
)
def test_client_names_that_are_no_file_names_are_refused(tmp_path: Path, client: str) -> None:
    with pytest.raises(ConfigError, match="client name"):
        make_certificates(tmp_path / "tls", ["localhost"], [client], 1)
    assert not (tmp_path / "tls").exists()


def test_a_host_that_no_certificate_can_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"host 'ünïcode\.example' is neither an address nor a name"):
        make_certificates(tmp_path, ["ünïcode.example"], ["client"], 1)


def test_unusable_files_are_refused_by_key_file_and_reason(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["localhost"], ["client"], 1)
    expired, expired_key = expired_certificate(tmp_path, tmp_path)
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    wrong: list[tuple[dict[str, Path], str]] = [
        ({"certificate": tmp_path / "none"}, r"tls_certificate: cannot read .*none: No such file"),
        ({"key": tmp_path / "none"}, r"tls_key: cannot read .*none: No such file"),
        ({"client_ca": tmp_path}, r"tls_client_ca: cannot read .*: Is a directory"),
        ({"certificate": garbage}, r"tls_certificate: .*garbage.pem holds no PEM certificate"),
        ({"client_ca": garbage}, r"tls_client_ca: .*garbage.pem holds no PEM certificate"),
        ({"key": garbage}, r"tls_key: .*garbage.pem is not a PEM private key without a password"),
        ({"key": tmp_path / "client-key.pem"}, r"tls_key: .*client-key.pem is not the key of .*server.pem"),
        (
            {"certificate": expired, "key": expired_key},
            r"tls_certificate: .*expired.pem is valid from .* which is not now",
        ),
        ({"client_ca": expired}, r"tls_client_ca: .*expired.pem is valid from"),
    ]
    for changes, named in wrong:
        with pytest.raises(ConfigError, match=named):
            files(tmp_path, **changes).read()


def test_the_command_makes_what_a_daemon_needs(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["certs", str(tmp_path / "tls"), "--host", "10.0.0.1", "--client", "node-1"])
    assert result.exit_code == 0
    assert result.output.splitlines()[-1] == str(tmp_path / "tls" / "node-1-key.pem")
    assert files(tmp_path / "tls").read()
    bad = CliRunner().invoke(app, ["certs", str(tmp_path / "tls"), "--client", "a/b"])
    assert bad.exit_code == 2 and "client name 'a/b'" in bad.output
    help_text = CliRunner().invoke(app, ["certs", "--help"]).output
    assert "for tests and for small private clusters" in " ".join(help_text.split())

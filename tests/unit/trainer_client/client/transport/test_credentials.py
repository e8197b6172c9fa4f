"""Credentials are checked before anything is sent, and are never printed; the config's go before the environment's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainer_client.client.transport.channel import open_channel
from trainer_client.client.transport.credentials import Credentials
from trainer_client.config.loading import load_config
from trainer_client.errors import ConfigError

OFFLOAD = {"device": "cpu"}
ENVIRON = {
    "PARAMSERVER_TOKEN_FILE": "/env/token",
    "PARAMSERVER_TLS_CA": "/env/ca",
    "PARAMSERVER_TLS_CERTIFICATE": "/env/certificate",
    "PARAMSERVER_TLS_KEY": "/env/key",
}


def config(**section: Any) -> dict[str, Any]:
    zero = {"stage": 3, "offload_param": OFFLOAD, "offload_optimizer": OFFLOAD}
    return {"train_batch_size": 1, "zero_optimization": zero, "paramserver": section}


@pytest.mark.parametrize("address", ["10.0.0.1:1", "store.example:1", "localhost.example:1", "[2001:db8::1]:1"])
def test_a_token_does_not_cross_a_network_in_the_clear(address: str) -> None:
    with pytest.raises(ConfigError, match="would cross the network in the clear") as caught:
        open_channel(address, Credentials(token="s3cret"))
    assert "s3cret" not in str(caught.value) and "s3cret" not in repr(Credentials(token="s3cret"))
    open_channel(address, Credentials(token="s3cret", insecure=True)).close()
    open_channel(address).close()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "localhost:1", "[::1]:1", "unix:/run/s"])
def test_what_stays_on_this_machine_may_be_in_the_clear(address: str) -> None:
    open_channel(address, Credentials(token="s3cret")).close()


@pytest.mark.parametrize("given", ["tls_ca", "tls_certificate", "tls_key"])
def test_half_of_tls_is_refused(given: str) -> None:
    fields: dict[str, Any] = {given: Path("/x")}
    with pytest.raises(ConfigError, match="TLS needs the authority, the certificate and its key; only /x is given"):
        Credentials(**fields)


def test_a_token_is_read_when_a_channel_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "token"
    credentials = Credentials(token_file=path)
    with pytest.raises(ConfigError, match=f"{path} cannot be read: No such file"):
        open_channel("unix:/run/s", credentials)
    path.write_text(" t0ken-_A\n")
    assert credentials.read_token() == "t0ken-_A"
    for content in ("", "two words", "line\nline", "\N{SNOWMAN}", "\x00"):
        path.write_text(content)
        with pytest.raises(ConfigError, match=f"token file {path} must hold one token"):
            credentials.read_token()
    with pytest.raises(ConfigError, match="are both given"):
        Credentials(token="x", token_file=path)


@pytest.mark.parametrize("token", ["", "a-token\n", "two words", "\N{SNOWMAN}"])
def test_a_token_that_no_call_can_carry_is_refused_before_the_first_call(token: str) -> None:
    with pytest.raises(ConfigError, match=r"Credentials\(token=\.\.\.\) must hold one token") as caught:
        open_channel("unix:/run/s", Credentials(token=token))
    assert not token.strip() or token.strip() not in str(caught.value)


def test_files_of_tls_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    credentials = Credentials(tls_ca=tmp_path / "ca", tls_certificate=tmp_path / "c", tls_key=tmp_path / "k")
    with pytest.raises(ConfigError, match=f"{tmp_path}/ca cannot be read"):
        open_channel("store.example:1", credentials)
    for name in ("ca", "c", "k"):
        (tmp_path / name).write_bytes(b"" if name == "k" else b"PEM")
    with pytest.raises(ConfigError, match=f"paramserver.tls: {tmp_path}/k is empty"):
        open_channel("store.example:1", credentials)
    # The file mode of a UNIX socket protects it, so the TLS files are not read.
    open_channel("unix:/run/s", credentials).close()


def test_the_config_goes_before_the_environment() -> None:
    tls = {"ca": "/a", "certificate": "/c", "key": "/k"}
    written = load_config(config(address="unix:/s", token_file="/t", tls=tls), ENVIRON).credentials(ENVIRON)
    assert (written.token_file, written.tls_ca, written.tls_key) == (Path("/t"), Path("/a"), Path("/k"))
    inherited = load_config(config(address="unix:/s"), ENVIRON).credentials(ENVIRON)
    assert inherited == Credentials.from_environment(ENVIRON)
    assert inherited.tls_certificate == Path("/env/certificate")
    assert load_config(config(address="unix:/s"), {}).credentials({}) == Credentials()


def test_half_of_tls_is_refused_with_the_config() -> None:
    with pytest.raises(ConfigError, match="TLS needs the authority"):
        load_config(config(address="unix:/s", tls={"ca": "/a"}), {})


@pytest.mark.parametrize("section", [{"token_file": "/t"}, {"tls": {"ca": "/a"}}, {"insecure": True}])
def test_credentials_for_the_jobs_own_daemon_are_refused(section: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"paramserver.{next(iter(section))}: the job starts a daemon of its own"):
        load_config(config(**section), ENVIRON)
    load_config(config(), ENVIRON)

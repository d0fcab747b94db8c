"""TLS: the server speaks it, says what is wrong with a certificate, and its own commands trust it."""

import ssl
import subprocess
from pathlib import Path

import httpx2
import pytest

from tests.support.server import cli, serving


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a self-signed certificate for localhost, and its key."""
    directory = tmp_path_factory.mktemp("tls")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-keyout", directory / "key.pem", "-out", directory / "cert.pem", "-days", "2"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"),
        ],
        check=True,
        capture_output=True,
    )
    return directory


def options(directory: Path) -> tuple[str, ...]:
    return "--tls-cert", str(directory / "cert.pem"), "--tls-key", str(directory / "key.pem")


def test_it_speaks_tls_and_nothing_else(tmp_path: Path, certificate: Path) -> None:
    trusted = ssl.create_default_context(cafile=str(certificate / "cert.pem"))
    with serving(tmp_path / "state", "--host", "localhost", *options(certificate)) as server:
        assert server.url.startswith("https://localhost:")
        with server.client(verify=trusted) as client:
            assert client.get("/deployments").status_code == 200
        with pytest.raises(httpx2.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx2.get(f"{server.url}/health", trust_env=False)
        with pytest.raises(httpx2.TransportError):
            httpx2.get(f"{server.url.replace('https', 'http')}/health", trust_env=False)
        assert cli("prune", "--state-dir", tmp_path / "state").stdout == "no run ended more than 7d ago\n"


def test_beyond_loopback_with_tls_there_is_nothing_to_warn_of(tmp_path: Path, certificate: Path) -> None:
    with serving(
        tmp_path / "s", "--host", "0.0.0.0", *options(certificate), env={"BASILICA_API_KEY": "a-key-long-enough"}
    ) as server:
        assert cli("prune", "--state-dir", tmp_path / "s").returncode == 0
    assert "unencrypted" not in server.stderr


def test_what_is_wrong_with_a_certificate_is_said_before_anything_is_served(tmp_path: Path, certificate: Path) -> None:
    cert, key = str(certificate / "cert.pem"), str(certificate / "key.pem")
    locked = tmp_path / "locked.pem"
    subprocess.run(
        ["openssl", "ec", "-in", key, "-aes256", "-passout", "pass:secret", "-out", locked],
        check=True,
        capture_output=True,
    )
    for given in (
        ["--tls-cert", cert],
        ["--tls-key", key],
        ["--tls-cert", "/no/such/cert", "--tls-key", key],
        ["--tls-cert", cert, "--tls-key", cert],
        ["--tls-cert", key, "--tls-key", cert],
        ["--tls-cert", cert, "--tls-key", str(locked)],
    ):
        done = cli("serve", "--port", "0", "--state-dir", tmp_path / "state", *given)
        assert done.returncode == 1, done.stderr
        assert done.stderr.startswith("basilica: "), done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
        assert "--tls-cert" in done.stderr
        assert done.stdout == ""

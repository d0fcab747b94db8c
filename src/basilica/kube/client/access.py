"""How a cluster is reached: from inside, by the pod's service account; from outside, by a kubeconfig."""

import os
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from basilica.version import pip_install

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TOKEN_READ_EVERY_S = 60.0  # it is replaced well before it expires


class ConfigurationError(Exception):
    """There is no telling which cluster is meant, or how to reach it; the text says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    url: str
    token: str | Callable[[], str] | None = None
    verify: bool | ssl.SSLContext = True
    proxy: str | None = None
    namespace: str = "default"


class TokenFile:
    """A token that is replaced on disk now and then."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._token, self._read_at = "", float("-inf")

    def __call__(self) -> str:
        if time.monotonic() - self._read_at >= TOKEN_READ_EVERY_S:
            self._token, self._read_at = self._path.read_text().strip(), time.monotonic()
        return self._token


def in_cluster(account: Path = ACCOUNT) -> Access | None:
    """As a pod reaches its own cluster; None if this process is not in a pod with a service account."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not (account / "token").exists():
        return None
    namespace = account / "namespace"
    return Access(
        url=f"https://{f'[{host}]' if ':' in host else host}:{port}",
        token=TokenFile(account / "token"),
        verify=ssl.create_default_context(cafile=str(account / "ca.crt")),
        namespace=namespace.read_text().strip() if namespace.exists() else "default",
    )


def kubeconfig_access(path: str | None = None, context: str | None = None) -> Access:
    """As kubectl reaches the cluster of that context, credential plugins included."""
    try:
        from kubernetes import config  # noqa: PLC0415 - needed only outside of a cluster
        from kubernetes.client import Configuration  # noqa: PLC0415
    except ImportError:
        raise ConfigurationError(f"a kubeconfig is read with: {pip_install('kubernetes')}") from None
    found = Configuration()
    try:
        config.load_kube_config(config_file=path, context=context, client_configuration=found)
        contexts, active = config.list_kube_config_contexts(config_file=path)
    except (config.ConfigException, OSError) as error:
        raise ConfigurationError(
            f"no cluster to talk to: {error}. Name a kubeconfig, or run inside a cluster with a service account"
        ) from error
    chosen = next((each for each in contexts if each["name"] == context), active)
    return Access(
        url=found.host,
        token=_token_of(found),
        verify=_verification(found),
        proxy=found.proxy or None,
        namespace=chosen["context"].get("namespace") or "default",
    )


def _token_of(found: Any) -> Callable[[], str] | None:
    if "authorization" not in found.api_key and found.refresh_api_key_hook is None:
        return None

    def token() -> str:
        word = found.get_api_key_with_prefix("authorization") or ""
        return str(word).removeprefix("Bearer ")

    return token


def _verification(found: Any) -> bool | ssl.SSLContext:
    if found.host.startswith("http://"):
        return True
    verification = ssl.create_default_context(cafile=found.ssl_ca_cert or None)
    if not found.verify_ssl:
        verification.check_hostname = False
        verification.verify_mode = ssl.CERT_NONE
    if found.cert_file:
        verification.load_cert_chain(found.cert_file, found.key_file or None)
    return verification

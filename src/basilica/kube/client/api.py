"""A thin client of the Kubernetes API: objects in and out as plain JSON, one coroutine a call.

Paths are the API's own (`/api/v1/namespaces/u-ada/pods`). What the server refuses and what cannot be reached are both
an `ApiError`; the second has status 0. The official client is needed only to read a kubeconfig.
"""

import asyncio
import json
import random
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Literal, Self

import httpx2

from basilica.kube.client.access import Access, in_cluster, kubeconfig_access
from basilica.kube.client.websocket import Opening, WebSocket

Json = dict[str, Any]
Propagation = Literal["Background", "Foreground", "Orphan"]

UNREACHABLE = 0
ATTEMPTS = 5
FIRST_DELAY_S, LONGEST_DELAY_S = 0.1, 10.0
CONNECT_S, ANSWER_S = 10.0, 30.0
SILENCE_S = 150.0  # a watch gets a bookmark each minute: one that says nothing for so long is dead
PAGE = 500
_UNWELL = frozenset({500, 502, 503, 504})
_ONLY_METADATA = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
_PATCHES = {
    "merge": "application/merge-patch+json",
    "apply": "application/apply-patch+yaml",
    "strategic": "application/strategic-merge-patch+json",
}


class ApiError(Exception):
    """The API said no, or (status 0) said nothing. `retry_after`: seconds, where the server asked to wait."""

    def __init__(self, status: int, reason: str, message: str, retry_after: float | None = None) -> None:
        super().__init__(status, reason, message)
        self.status, self.reason, self.message, self.retry_after = status, reason, message, retry_after

    def __str__(self) -> str:
        return f"{self.message} ({self.status} {self.reason})" if self.status else self.message

    @property
    def transient(self) -> bool:
        """Whether it may go well the next time: throttled, unwell or out of reach."""
        return self.status in (UNREACHABLE, 429) or self.status in _UNWELL


class KubeApi:
    """One cluster. `token` is the word itself, or a function that gives the one that holds now."""

    def __init__(
        self,
        base_url: str,
        *,
        token: str | Callable[[], str] | None = None,
        verify: bool | ssl.SSLContext = True,
        headers: Mapping[str, str] | None = None,
        proxy: str | None = None,
        namespace: str = "default",
    ) -> None:
        self._token, self.namespace = token, namespace
        self._http = httpx2.AsyncClient(
            base_url=base_url,
            verify=verify,
            headers={"User-Agent": "basilica", "Accept": "application/json", **(headers or {})},
            timeout=httpx2.Timeout(ANSWER_S, connect=CONNECT_S),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=32),
            proxy=proxy,
            trust_env=False,
        )

    @classmethod
    def connect(cls, kubeconfig: str | None = None, context: str | None = None) -> Self:
        """The cluster that this process runs in, else the one of the kubeconfig. `ConfigurationError` without either.

        A kubeconfig or a context that is named goes first.
        """
        inside = in_cluster() if kubeconfig is None and context is None else None
        return cls._of(inside or kubeconfig_access(kubeconfig, context))

    @classmethod
    def _of(cls, access: Access) -> Self:
        return cls(access.url, token=access.token, verify=access.verify, proxy=access.proxy, namespace=access.namespace)

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # -- objects

    async def get(self, path: str) -> Json:
        return await self._call("GET", path, idempotent=True)

    async def list(
        self,
        path: str,
        *,
        label_selector: str = "",
        field_selector: str = "",
        limit: int = PAGE,
        only_metadata: bool = False,
    ) -> tuple[list[Json], str]:
        """All objects, page by page, and the version to watch from. `only_metadata`: without what they hold."""
        query = _query(labelSelector=label_selector, fieldSelector=field_selector, limit=str(limit))
        found: list[Json] = []
        while True:
            accept = _ONLY_METADATA if only_metadata else ""
            page = await self._call("GET", path, query=query, accept=accept, idempotent=True)
            kind, version = str(page.get("kind", "")).removesuffix("List"), page.get("apiVersion")
            found += [{"kind": kind, "apiVersion": version, **item} for item in page.get("items") or ()]
            metadata = page.get("metadata") or {}
            if not metadata.get("continue"):
                return found, str(metadata.get("resourceVersion", ""))
            query["continue"] = str(metadata["continue"])

    async def create(self, path: str, body: Json) -> Json:
        """Not tried again when the answer is lost: the next try would say 409 `AlreadyExists`."""
        return await self._call("POST", path, body)

    async def apply(self, path: str, body: Json, *, manager: str = "basilica", force: bool = False) -> Json:
        """Server-side apply: these fields are the manager's; of what others own nothing is touched, or it is a 409."""
        query = {"fieldManager": manager} | ({"force": "true"} if force else {})
        return await self._call("PATCH", path, body, query=query, media=_PATCHES["apply"], idempotent=True)

    async def merge_patch(self, path: str, body: Json) -> Json:
        """Change these fields. With a `metadata.resourceVersion` in the body: only if it is still that, else 409."""
        versioned = "resourceVersion" in (body.get("metadata") or {})
        return await self._call("PATCH", path, body, media=_PATCHES["merge"], idempotent=not versioned)

    async def remove_finalizer(self, path: str, uid: str, finalizer: str) -> None:
        """Take it off an object of one of Kubernetes' own kinds, whatever others do to it meanwhile.

        An object that is gone, or is another one by now, has it no more.
        """
        body = {"metadata": {"uid": uid, "$deleteFromPrimitiveList/finalizers": [finalizer]}}
        try:
            await self._call("PATCH", path, body, media=_PATCHES["strategic"], idempotent=True)
        except ApiError as error:
            if error.status not in (404, 409):
                raise

    async def replace(self, path: str, body: Json) -> Json:
        return await self._call("PUT", path, body)

    async def delete(
        self,
        path: str,
        *,
        propagation: Propagation = "Background",
        grace: int | None = None,
        uid: str | None = None,
        resource_version: str | None = None,
    ) -> bool:
        """False if there is none. Another uid or version than that: 409."""
        preconditions = _query(uid=uid or "", resourceVersion=resource_version or "")
        body: Json = {"propagationPolicy": propagation}
        body |= {} if grace is None else {"gracePeriodSeconds": grace}
        body |= {"preconditions": preconditions} if preconditions else {}
        try:
            await self._call("DELETE", path, body, idempotent=True)
        except ApiError as error:
            if error.status != 404:
                raise
            return False
        return True

    async def delete_collection(self, path: str, *, label_selector: str, field_selector: str = "") -> None:
        """Delete all objects under a path that the selectors name, in one request."""
        query = _query(labelSelector=label_selector, fieldSelector=field_selector)
        try:
            await self._call("DELETE", path, {"propagationPolicy": "Background"}, query=query, idempotent=True)
        except ApiError as error:
            if error.status != 404:
                raise

    # -- streams

    async def watch(
        self,
        path: str,
        *,
        resource_version: str = "",
        label_selector: str = "",
        field_selector: str = "",
        on_open: Callable[[], None] = lambda: None,
    ) -> AsyncGenerator[tuple[str, Json], None]:
        """Changes after a version as (type, object), bookmarks too. Its end is the server's; begin again from the last.

        A version that is too old: `ApiError` 410, also where the server says so in the stream. `on_open` is called when
        the server has begun to answer.
        """
        query = _query(labelSelector=label_selector, fieldSelector=field_selector, resourceVersion=resource_version)
        query |= {"watch": "true", "allowWatchBookmarks": "true"}
        rest = b""
        async for piece in self._stream(path, query, SILENCE_S, on_open):
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if not line.strip():
                    continue
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise _refusal(int(event["object"].get("code") or 500), event["object"], None)
                yield event["type"], event["object"]

    async def logs(
        self,
        path: str,
        *,
        container: str = "",
        follow: bool = False,
        tail_lines: int | None = None,
        since_time: str = "",
        previous: bool = False,
        timestamps: bool = False,
    ) -> AsyncGenerator[bytes, None]:
        """What a pod's container wrote, in pieces; `path` is the pod's."""
        query = _query(container=container, sinceTime=since_time)
        query |= {} if tail_lines is None else {"tailLines": str(tail_lines)}
        flags = {"follow": follow, "previous": previous, "timestamps": timestamps}
        query |= {name: "true" for name, wanted in flags.items() if wanted}
        async for piece in self._stream(f"{path}/log", query, None if follow else ANSWER_S):
            yield piece

    async def _stream(
        self, path: str, query: dict[str, str], silence: float | None, on_open: Callable[[], None] = lambda: None
    ) -> AsyncGenerator[bytes, None]:
        timeout = httpx2.Timeout(silence, connect=CONNECT_S, pool=CONNECT_S)
        headers = await self._authorization()
        try:
            async with self._http.stream("GET", path, params=query, headers=headers, timeout=timeout) as answer:
                if answer.status_code >= 400:
                    await answer.aread()
                    raise _refused(answer)
                on_open()
                async for piece in answer.aiter_bytes():
                    yield piece
        except httpx2.TransportError as error:
            raise _unreachable(path, error) from error

    @asynccontextmanager
    async def websocket(
        self, path: str, query: Sequence[tuple[str, str]], protocols: Sequence[str]
    ) -> AsyncIterator[WebSocket]:
        """A WebSocket with one of these protocols, closed at the end. Never tried again: the server may have begun.

        `WebSocketError` from a server that agrees and then speaks something else.
        """
        opening = Opening(protocols)
        headers = await self._authorization() | opening.headers
        try:
            async with asyncio.timeout(ANSWER_S):
                request = self._http.build_request("GET", path, params=list(query), headers=headers)
                answer = await self._http.send(request, stream=True)
        except (httpx2.TransportError, TimeoutError) as error:
            raise _unreachable(path, error) from error
        try:
            if answer.status_code != httpx2.codes.SWITCHING_PROTOCOLS:
                raise await _refused_in_time(answer, path)
            opening.check(answer.headers)
            socket = WebSocket(answer.extensions["network_stream"])
            try:
                yield socket
            finally:
                await socket.say_goodbye()
        finally:
            await answer.aclose()

    # -- one call

    async def _call(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        *,
        query: dict[str, str] | None = None,
        media: str = "application/json",
        accept: str = "",
        idempotent: bool = False,
    ) -> Json:
        """What was refused for being too much, or never arrived, is tried again; the rest only where it is the same."""
        content = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        headers = ({} if content is None else {"Content-Type": media}) | ({"Accept": accept} if accept else {})
        for attempt in range(ATTEMPTS):
            try:
                return await self._once(method, path, content, query or {}, headers)
            except _NeverArrivedError as error:
                failure = error.reported
            except ApiError as error:
                failure = error
                if not (error.status == 429 or (idempotent and error.transient)):
                    raise
            if attempt == ATTEMPTS - 1:
                raise failure
            await asyncio.sleep(delay(attempt, failure.retry_after))
        raise AssertionError("unreachable")

    async def _once(
        self, method: str, path: str, content: bytes | None, query: dict[str, str], headers: dict[str, str]
    ) -> Json:
        headers = await self._authorization() | headers
        try:
            answer = await self._http.request(method, path, content=content, params=query, headers=headers)
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout) as error:
            raise _NeverArrivedError(_unreachable(path, error)) from error
        except httpx2.TransportError as error:
            raise _unreachable(path, error) from error
        if answer.status_code >= 400:
            raise _refused(answer)
        found: Json = answer.json()
        return found

    async def _authorization(self) -> dict[str, str]:
        if self._token is None:
            return {}
        token = self._token if isinstance(self._token, str) else await asyncio.to_thread(self._token)
        return {"Authorization": f"Bearer {token}"} if token else {}


class _NeverArrivedError(Exception):
    """No connection came about, so the server has done nothing."""

    def __init__(self, reported: ApiError) -> None:
        super().__init__(reported)
        self.reported = reported


def delay(attempt: int, retry_after: float | None = None) -> float:
    """How long to wait before the next try: what the server asked for, else doubling, each client differently."""
    grown = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0**attempt) * random.uniform(0.5, 1.0)
    return max(grown, retry_after or 0.0)


def _query(**given: str) -> dict[str, str]:
    return {name: value for name, value in given.items() if value}


def _unreachable(path: str, error: Exception) -> ApiError:
    what = str(error) or type(error).__name__
    return ApiError(UNREACHABLE, "Unreachable", f"the Kubernetes API gave no answer for {path}: {what}")


async def _refused_in_time(answer: httpx2.Response, path: str) -> ApiError:
    try:
        async with asyncio.timeout(ANSWER_S):
            await answer.aread()
    except (httpx2.TransportError, TimeoutError) as error:
        return _unreachable(path, error)
    return _refused(answer)


def _refused(answer: httpx2.Response) -> ApiError:
    try:
        body = answer.json()
    except ValueError:
        body = None
    waited = answer.headers.get("Retry-After", "")
    found = body if isinstance(body, dict) else {"message": answer.text[:500]}
    return _refusal(answer.status_code, found, float(waited) if waited.isdecimal() else None)


def _refusal(status: int, body: Json, retry_after: float | None) -> ApiError:
    message = str(body.get("message") or f"the Kubernetes API answered {status}")
    if retry_after is None:
        asked = (body.get("details") or {}).get("retryAfterSeconds")
        retry_after = None if asked is None else float(asked)
    return ApiError(status, str(body.get("reason") or "Unknown"), message, retry_after)

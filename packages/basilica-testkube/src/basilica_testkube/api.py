"""Requests to answers. The only module that knows verbs and HTTP at once."""

import asyncio
import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import yaml

from basilica_testkube.discovery import discover
from basilica_testkube.errors import ApiError, bad_request, conflict, method_not_allowed, no_such_path, not_found
from basilica_testkube.execs import serve_exec
from basilica_testkube.http import Hangup, Reply, Request, Upgrade
from basilica_testkube.kinds import NAMESPACES, PODS
from basilica_testkube.kubelet import Kubelet
from basilica_testkube.logs import serve_log
from basilica_testkube.options import DeleteOptions, Options, Target
from basilica_testkube.rbac import Action, Roles, refused
from basilica_testkube.registry import Registry
from basilica_testkube.routes import Route, route
from basilica_testkube.scaling import scale_of, scaled
from basilica_testkube.selectors import selector
from basilica_testkube.store import encode
from basilica_testkube.timing import Timing
from basilica_testkube.traffic import Fault, Requests
from basilica_testkube.values import Json, is_deleting, key_of, meta
from basilica_testkube.watching import Listings

log = logging.getLogger(__name__)


class Api:
    """Answers HTTP requests from the registry."""

    def __init__(
        self, registry: Registry, kubelet: Kubelet, timing: Timing, users: Mapping[str, str] | None = None
    ) -> None:
        self._registry, self._kubelet, self._timing = registry, kubelet, timing
        self.users = users or {}  # by their tokens
        self.listings = Listings(registry.store)
        self.requests = Requests()
        self.faults: list[Fault] = []

    async def answer(self, request: Request) -> Reply | Upgrade:
        try:
            return await self._answer(request)
        except ApiError as error:
            return _refusal(error)
        except Exception as error:
            if isinstance(error, Hangup):
                raise
            log.exception("%s %s failed", request.method, request.path)
            return _refusal(ApiError(500, "InternalError", f"this server has a bug: {error!r}"))

    async def _answer(self, request: Request) -> Reply | Upgrade:
        if request.path in ("/healthz", "/livez", "/readyz"):
            return Reply(200, b"ok", {"Content-Type": "text/plain"})
        if request.method == "GET":
            found = discover(request.path, self._registry.kinds, self._registry.version)
            if found is not None:
                self.requests.note("get", "discovery")
                return Reply(200, encode(found))
        asked = route(request, self._registry.kinds)
        self.requests.note(asked.verb, asked.resource)
        self._authorize(request, asked)
        fault = next((fault for fault in self.faults if fault.strikes(asked.verb, asked.resource)), None)
        if fault is not None:
            return _struck(fault)
        if (
            asked.kind.namespaced
            and asked.verb in ("create", "get", "update", "patch", "delete")
            and not asked.namespace
        ):
            raise no_such_path() if asked.verb == "get" else method_not_allowed()
        self._registry.warnings = []
        reply = await self._serve(asked, request)
        if self._registry.warnings:
            reply.headers["Warning"] = ", ".join(f'299 - "{_quoted(text)}"' for text in self._registry.warnings)
            self._registry.warnings = []
        return reply

    def _authorize(self, request: Request, asked: Route) -> None:
        """Hold those that have a name here to their roles; anybody else is an administrator."""
        user = self.users.get(request.headers.get("authorization", "").removeprefix("Bearer "))
        if user is None:
            return
        kinds = ("ClusterRole", "Role", "ClusterRoleBinding", "RoleBinding")
        found = [kind for kind in self._registry.kinds.all() if kind.kind in kinds and kind.group.startswith("rbac.")]
        roles = Roles.of({"kind": kind.kind, **obj} for kind in found for obj in self._registry.store.items(kind))
        action = Action(
            verb=asked.verb,
            group=asked.kind.group,
            resource=asked.resource,
            namespace=asked.namespace or (asked.name if asked.kind == NAMESPACES else ""),
            name=asked.name,
        )
        if not roles.allow(user, action):
            raise refused(user, action)
        binds = asked.verb in ("create", "update", "patch") and asked.kind.kind.endswith("RoleBinding")
        if binds and not roles.may_bind(user, {**_body(request), "metadata": {"namespace": asked.namespace}}):
            raise refused(user, replace(action, verb="bind"))

    async def _serve(self, asked: Route, request: Request) -> Reply | Upgrade:
        if asked.subresource not in ("", "status"):
            return self._subresource(asked, request)
        registry, query = self._registry, request.query
        target = Target(asked.kind, asked.namespace, asked.name, asked.subresource)
        options = _options(query)
        match asked.verb:
            case "get":
                return Reply(200, encode(registry.get(asked.kind, asked.namespace, asked.name)))
            case "list":
                wanted = request.headers.get("accept", "")
                return self.listings.page(asked, query, only_metadata="as=PartialObjectMetadataList" in wanted)
            case "watch":
                return self.listings.watch(asked, query)
            case "create" if not asked.name:
                return Reply(201, encode(registry.create(asked.kind, asked.namespace, _body(request), options)))
            case "update" | "patch" if not asked.name:
                raise method_not_allowed()
            case "update":
                return Reply(200, encode(registry.update(target, _body(request), options)))
            case "patch":
                there = registry.store.get(asked.kind, asked.namespace, asked.name) is not None
                done = registry.patch(target, _body(request), request.media, options)
                return Reply(200 if there else 201, encode(done))
            case "delete":
                return await self._delete(asked, _delete_options(request))
            case "deletecollection":
                return self._delete_all(asked, request)
            case _:
                raise method_not_allowed()

    async def _delete(self, asked: Route, options: DeleteOptions) -> Reply:
        """Deletion reads first and writes then. Who comes second in between finds another state than it read."""
        registry, (kind, name) = self._registry, (asked.kind, asked.name)
        seen = registry.get(kind, asked.namespace, name)
        registry.check_preconditions(kind, seen, options)
        await asyncio.sleep(self._timing.storage)
        found = registry.store.get(kind, asked.namespace, name)
        if found is None or meta(found)["uid"] != meta(seen)["uid"]:
            why = "StorageError: invalid object, Code: 4, AdditionalErrorMsg: Precondition failed: UID in precondition:"
            raise conflict(kind, name, f"{why} {meta(seen)['uid']}, UID in object meta: ")
        last = registry.delete(kind, asked.namespace, name, options)
        if registry.store.get(kind, asked.namespace, name) is not None and is_deleting(last):
            return Reply(200, encode(last))
        if kind == PODS:
            return Reply(200, encode(last))
        details = {"name": name, "kind": kind.plural, "uid": meta(last)["uid"]} | (
            {"group": kind.group} if kind.group else {}
        )
        done = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}
        return Reply(200, encode(done))

    def _delete_all(self, asked: Route, request: Request) -> Reply:
        registry, query = self._registry, request.query
        match = selector(asked.kind, query.get("labelSelector", ""), query.get("fieldSelector", ""))
        found = [obj for obj in registry.store.items(asked.kind, asked.namespace) if match is None or match(obj)]
        options = _delete_options(request)
        for obj in found:
            registry.delete(asked.kind, *key_of(obj), options)
        listed = {
            "kind": f"{asked.kind.kind}List",
            "apiVersion": asked.kind.api_version,
            "metadata": {},
            "items": found,
        }
        return Reply(200, encode(listed))

    def _scale(self, asked: Route, request: Request) -> Reply:
        obj = self._registry.get(asked.kind, asked.namespace, asked.name)
        if asked.verb in ("update", "patch"):
            obj = scaled(self._registry, Target(asked.kind, asked.namespace, asked.name), _body(request))
        elif asked.verb != "get":
            raise method_not_allowed()
        return Reply(200, encode(scale_of(asked.kind, obj)))

    def _subresource(self, asked: Route, request: Request) -> Reply | Upgrade:
        if asked.kind == NAMESPACES and asked.subresource == "finalize" and asked.verb == "update":
            wanted = (_body(request).get("spec") or {}).get("finalizers") or []
            namespace = self._registry.get(NAMESPACES, "", asked.name)
            finalize = partial(_set_finalizers, wanted)
            done = self._registry.change(NAMESPACES, namespace, finalize, whole=True)
            return Reply(200, encode(done))
        if asked.subresource == "scale" and asked.kind.scale is not None:
            return self._scale(asked, request)
        if asked.kind != PODS:
            raise no_such_path()
        pod = self._registry.get(PODS, asked.namespace, asked.name)
        if asked.subresource == "log" and asked.verb == "get":
            return serve_log(self._kubelet, pod, request.query)
        if asked.subresource == "exec" and asked.verb in ("get", "create"):
            return serve_exec(self._kubelet, pod, request)
        if asked.subresource == "eviction" and asked.verb == "create":
            body = _body(request)
            grace = (body.get("deleteOptions") or {}).get("gracePeriodSeconds")
            self._kubelet.evict_by_api(pod, grace)
            return Reply(201, encode({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}))
        raise not_found(PODS, asked.name)


def _refusal(error: ApiError) -> Reply:
    after = (error.details or {}).get("retryAfterSeconds")
    return Reply(error.code, encode(error.body), {} if after is None else {"Retry-After": str(after)})


def _struck(fault: Fault) -> Reply:
    fault.times -= 1
    reasons = {
        429: "TooManyRequests",
        410: "Expired",
        409: "Conflict",
        403: "Forbidden",
        404: "NotFound",
        503: "ServiceUnavailable",
    }
    if fault.status == 0:
        raise Hangup
    details = None if fault.retry_after is None else {"retryAfterSeconds": fault.retry_after}
    return _refusal(ApiError(fault.status, reasons.get(fault.status, "InternalError"), "the test said so", details))


def _body(request: Request) -> Any:
    try:
        with suppress(ValueError):
            return json.loads(request.body)  # also where it may be YAML: most send this, which is read more quickly
        return yaml.safe_load(request.body) if "yaml" in request.media else json.loads(request.body)
    except (ValueError, yaml.YAMLError) as error:
        raise bad_request(f"the object provided is unrecognized (must be of type JSON): {error}") from None


def _options(query: dict[str, str]) -> Options:
    return Options(
        field_validation=query.get("fieldValidation") or "Warn",
        field_manager=query.get("fieldManager", ""),
        force=query.get("force", "").lower() in ("1", "true"),
    )


def _delete_options(request: Request) -> DeleteOptions:
    """Options come in the body or the query, as clients please."""
    body: Json = _body(request) if request.body else {}
    query, wanted = request.query, (body or {}).get("preconditions") or {}
    grace = (body or {}).get("gracePeriodSeconds", query.get("gracePeriodSeconds"))
    propagation = (body or {}).get("propagationPolicy", query.get("propagationPolicy"))
    if propagation not in (None, "Background", "Foreground", "Orphan"):
        raise bad_request(f"propagationPolicy: Unsupported value: {propagation!r}")
    return DeleteOptions(
        grace=None if grace is None else int(grace),
        propagation=propagation,
        uid=wanted.get("uid"),
        resource_version=wanted.get("resourceVersion"),
    )


def _set_finalizers(finalizers: list[str], namespace: Json) -> None:
    namespace["spec"]["finalizers"] = finalizers


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')

"""What the control plane may do, and where: by the manifests alone, and on a cluster that enforces them."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest

from basilica.controller.step import run_of
from basilica.core.deployment import Deployment
from basilica.core.events import Event
from basilica.core.names import instance_name
from basilica.core.spec import DeploymentSpec, Shell, Wanted
from basilica.core.status import DeploymentStatus
from basilica.core.world import WorldSize
from basilica.kube.client.api import ApiError, KubeApi
from basilica.kube.client.namespaces import goes_anyway, in_namespace, make_namespace
from basilica.kube.manifests.control_plane import manifests
from basilica.kube.manifests.roles import API, OPERATOR, bindings
from basilica.machine.clocks import WallClock
from basilica.operator.election import Election
from basilica.operator.operator import Operator
from basilica.operator.rights import NamespaceRights
from basilica.ports import Exited
from basilica.runtimes.kubernetes.runtime import KubernetesRuntime
from basilica.stores.kubernetes import KubernetesStore, Refusals
from basilica_testkube import KubeServer
from basilica_testkube.rbac import Action, Roles
from tests.kube_runtime.plane import SETTINGS

HOME = "basilica-system"
EVERYTHING = manifests(namespace=HOME, image="basilica", with_api=True)
BOUND = Roles.of([*EVERYTHING, *bindings("u-ann", HOME).values()])
USERS = {name: f"system:serviceaccount:{HOME}:{name}" for name in (OPERATOR, API)}
PATIENCE_S = 100.0
RBAC = "rbac.authorization.k8s.io"


def may(who: str, verb: str, resource: str, namespace: str, group: str = "") -> bool:
    action = Action(verb=verb, group=group, resource=resource, namespace=namespace)
    return BOUND.allow(USERS[who], action)


@pytest.mark.parametrize("namespace", ["kube-system", "default", "u-bob", "", "elsewhere"])
@pytest.mark.parametrize(
    ("resource", "group", "verbs"),
    [
        ("secrets", "", ("get", "list", "watch", "create", "patch", "delete")),
        ("pods", "", ("get", "create", "patch", "delete", "deletecollection")),
        ("pods/exec", "", ("get", "create")),
        ("pods/log", "", ("get",)),
        ("configmaps", "", ("create", "patch", "delete")),
        ("serviceaccounts", "", ("get", "create", "patch", "delete")),
        ("services", "", ("create", "patch", "delete")),
        ("jobs", "batch", ("get", "create", "patch", "delete")),
        ("deployments", "apps", ("get", "list", "create", "patch", "delete")),
        ("networkpolicies", "networking.k8s.io", ("get", "create", "patch", "delete")),
        ("clusterroles", RBAC, ("create", "patch", "escalate")),
        ("clusterrolebindings", RBAC, ("create", "patch", "delete")),
        ("nodes", "", ("patch", "delete", "create")),
        ("namespaces", "", ("delete", "patch")),
    ],
)
def test_nothing_is_touched_outside_of_our_namespaces(
    namespace: str, resource: str, group: str, verbs: tuple[str, ...]
) -> None:
    for verb in verbs:
        for who in (OPERATOR, API):
            assert not may(who, verb, resource, namespace, group), (who, verb)


@pytest.mark.parametrize(
    ("who", "verb", "resource", "group"),
    [
        (OPERATOR, "create", "pods", ""),
        (OPERATOR, "deletecollection", "pods", ""),
        (OPERATOR, "create", "deployments", "apps"),
        (OPERATOR, "create", "secrets", ""),
        (API, "create", "userdeployments", "basilica.dev"),
        (API, "get", "pods/exec", ""),
        (API, "get", "secrets", ""),
        (API, "get", "pods/log", ""),
    ],
)
def test_in_ours_it_is_done(who: str, verb: str, resource: str, group: str) -> None:
    assert may(who, verb, resource, "u-ann", group)
    other = API if who == OPERATOR else OPERATOR
    if verb != "get" or resource.startswith("pods/"):
        assert not may(other, verb, resource, "u-ann", group) or resource == "secrets"


def test_nobody_gives_away_more_than_the_two_roles() -> None:
    [binding, _] = bindings("u-bob", HOME).values()
    assert BOUND.may_bind(USERS[OPERATOR], binding)
    assert not BOUND.may_bind(USERS[API], binding)
    admin = {**binding, "roleRef": {"kind": "ClusterRole", "name": "cluster-admin", "apiGroup": RBAC}}
    rules = [{"apiGroups": [""], "resources": ["secrets"], "verbs": ["list"]}]
    roles = Roles.of([*EVERYTHING, {"kind": "ClusterRole", "metadata": {"name": "cluster-admin"}, "rules": rules}])
    assert not roles.may_bind(USERS[OPERATOR], admin)


def test_the_policy_holds_bindings_to_namespaces_with_our_label() -> None:
    [policy] = [m for m in EVERYTHING if m["kind"] == "ValidatingAdmissionPolicy"]
    [binding] = [m for m in EVERYTHING if m["kind"] == "ValidatingAdmissionPolicyBinding"]
    assert binding["spec"] == {"policyName": policy["metadata"]["name"], "validationActions": ["Deny"]}
    [condition] = policy["spec"]["matchConditions"]
    assert condition["expression"] == f"request.userInfo.username == '{USERS[OPERATOR]}'"
    expressions = " ".join(each["expression"] for each in policy["spec"]["validations"])
    assert "namespaceObject.metadata.labels['app.kubernetes.io/managed-by'] == 'basilica'" in expressions
    assert f"object.subjects.all(s, s.kind == 'ServiceAccount' && s.namespace == '{HOME}')" in expressions
    assert policy["spec"]["failurePolicy"] == "Fail"


# ---- on a cluster that enforces it -----------------------------------------------------------------------------------


def installed(kube: KubeServer) -> None:
    for manifest in EVERYTHING:
        if manifest["kind"] != "Deployment":
            kube.create(manifest, HOME)


def a_run(script: str) -> Deployment:
    name = "train"
    return Deployment(
        instance=instance_name(name, "0001"),
        user="ann",
        namespace="u-ann",
        spec=DeploymentSpec(name=name, program=Shell(script), world=WorldSize(1, 2, 2), secrets={"TOKEN": "hush"}),
        status=DeploymentStatus(created_at=time.time()),
        version=0,
    )


async def until(store: KubernetesStore, instance: str, done: Any) -> Deployment:
    async with asyncio.timeout(PATIENCE_S):
        found = await store.get(instance)
        while not done(found):
            found = await store.wait_change(instance, found.version, PATIENCE_S) or found
        return found


@asynccontextmanager
async def operating(kube: KubeServer, ours: KubeApi) -> AsyncIterator[None]:
    """An operator at work, with the rights of its account."""
    store = KubernetesStore(ours)
    await store.open()
    operator = Operator(
        store,
        lambda: KubernetesRuntime(KubeApi(kube.url, token=OPERATOR), SETTINGS),
        WallClock(),
        Election(ours, namespace=HOME, identity="one", duration=30.0),
        refusals=Refusals(store),
        beside=(NamespaceRights(ours, HOME).keep,),
    )
    stop = asyncio.Event()
    working = asyncio.create_task(operator.run(stop))
    try:
        yield
    finally:
        stop.set()
        await asyncio.wait_for(working, PATIENCE_S)
        await store.close()


async def until_gone(kube: KubeServer, kind: str, name: str, namespace: str = "") -> None:
    async with asyncio.timeout(PATIENCE_S):
        while kube.get(kind, name, namespace) is not None:
            await asyncio.sleep(0.05)


def test_a_whole_life_of_a_run_needs_no_more_than_the_manifests_give() -> None:
    async def story(kube: KubeServer) -> None:
        async with KubeApi(kube.url, token=OPERATOR) as ours, KubeApi(kube.url, token=API) as theirs:
            apis = KubernetesStore(theirs)
            await apis.open()
            reading = KubernetesRuntime(KubeApi(kube.url, token=API), SETTINGS)
            await reading.start(lambda _: None)
            try:
                async with operating(kube, ours):
                    assert not await reading.has_archive("ann", "ab" * 32)
                    assert await apis.usage("ann") == []
                    made = await apis.create(a_run("echo up; exec sleep 1000"), [Event("Created", "it was created")])
                    up = await until(apis, made.instance, lambda d: d.status.ready == 2)
                    assert "up" in (await reading.tail(run_of(up), 0, None)).lines
                    said = [chunk async for chunk in reading.execute(run_of(up), 0, ["true"])]
                    assert Exited(0) in said
                    await apis.change_spec(made.instance, lambda d: d.spec.ended_by(Wanted.CANCEL))
                    await until(apis, made.instance, lambda d: d.status.settled)
                    await apis.change_spec(made.instance, lambda d: d.spec.ended_by(Wanted.DELETE))
                    await until_gone(kube, "userdeployments", made.instance, "u-ann")
                    for api in (ours, theirs):
                        with pytest.raises(ApiError, match=r'^secrets "any" is forbidden: User .* cannot get resource'):
                            await api.get("/api/v1/namespaces/kube-system/secrets/any")
                    with pytest.raises(ApiError, match="cannot patch resource"):
                        await theirs.apply(*next(iter(bindings("kube-system", HOME).items())))
            finally:
                await reading.close()
                await apis.close()

    with KubeServer(users=USERS) as kube:
        installed(kube)
        asyncio.run(story(kube))


@pytest.mark.parametrize("ended", [False, True])
def test_a_namespace_that_takes_our_rights_along_goes_with_its_run(ended: bool) -> None:
    """Kubernetes deletes the bindings in it as it deletes the run, which is let go of without them."""

    async def story(kube: KubeServer) -> None:
        async with KubeApi(kube.url, token=OPERATOR) as ours, KubeApi(kube.url, token=API) as theirs:
            apis = KubernetesStore(theirs)
            await apis.open()
            try:
                async with operating(kube, ours):
                    made = await apis.create(a_run("true" if ended else "exec sleep 1000"), [])
                    await until(apis, made.instance, lambda d: d.status.settled if ended else d.status.ready == 2)
                    await asyncio.to_thread(httpx2.delete, f"{kube.url}/api/v1/namespaces/u-ann")
                    await until_gone(kube, "namespaces", "u-ann")
            finally:
                await apis.close()

    with KubeServer(users=USERS) as kube:
        installed(kube)
        asyncio.run(story(kube))


def test_a_run_is_not_taken_for_removed_where_only_rights_are_missing() -> None:
    async def story(kube: KubeServer) -> None:
        async with KubeApi(kube.url, token=OPERATOR) as ours:
            lacking = ApiError(403, "Forbidden", "pods is forbidden: User cannot deletecollection resource")
            namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "u-ann"}}
            assert await goes_anyway(ours, "u-ann", lacking)
            assert not await goes_anyway(ours, "u-ann", ApiError(403, "Forbidden", "exceeded quota"))
            kube.create(namespace, "")
            assert not await goes_anyway(ours, "u-ann", lacking)

    with KubeServer(processes=False, users=USERS) as kube:
        installed(kube)
        asyncio.run(story(kube))


def test_who_has_no_rights_waits_for_the_operator_and_then_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("basilica.kube.client.namespaces.RIGHTS_WITHIN_S", 0.5)

    async def story(kube: KubeServer) -> None:
        body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x"}}
        async with KubeApi(kube.url, token=API) as api, KubeApi(kube.url, token=OPERATOR) as ours:

            async def write() -> dict[str, Any]:
                return await api.create("/api/v1/namespaces/u-ann/configmaps", body)

            with pytest.raises(ApiError, match=r"^configmaps is forbidden: User .* cannot create resource"):
                await in_namespace(api, "u-ann", write)
            assert kube.get("namespaces", "u-ann", "") is not None
            keeping = asyncio.create_task(NamespaceRights(ours, HOME).keep())
            try:
                async with asyncio.timeout(PATIENCE_S):
                    while len(kube.objects("rolebindings", "u-ann")) < 2:
                        await asyncio.sleep(0.02)
                assert (await in_namespace(api, "u-ann", write))["metadata"]["name"] == "x"
                await make_namespace(api, "u-ann")
            finally:
                keeping.cancel()
                await asyncio.gather(keeping, return_exceptions=True)

    with KubeServer(processes=False, users=USERS) as kube:
        installed(kube)
        asyncio.run(story(kube))

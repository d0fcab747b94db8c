"""Role bindings in users' namespaces, which runs there need before anything else."""

import asyncio
import logging

from basilica.kube.client.api import ApiError, KubeApi
from basilica.kube.client.informer import Informer
from basilica.kube.manifests.roles import MANAGED, bindings
from basilica.kube.manifests.userdeployment import Json

log = logging.getLogger("basilica.operator")

AGAIN_S = 5.0


class NamespaceRights:
    """Follows the namespaces that have our label. A bound namespace costs nothing more."""

    def __init__(self, api: KubeApi, home: str) -> None:
        self._api, self._home = api, home
        self._due: asyncio.Queue[str] = asyncio.Queue()
        self._bound: dict[str, str] = {}  # name to uid: a namespace that was deleted and created again is another
        self._namespaces = Informer(api, "/api/v1/namespaces", label_selector=MANAGED, on_change=self._changed)

    def _changed(self, namespace: Json) -> None:
        metadata = namespace["metadata"]
        name, uid = metadata["name"], metadata["uid"]
        if self._namespaces.get("", name) is None or "deletionTimestamp" in metadata:
            self._bound.pop(name, None)
        elif self._bound.get(name) != uid:
            self._bound[name] = uid
            self._due.put_nowait(name)

    async def keep(self) -> None:
        """Bind the roles in every namespace, until cancelled."""
        self._namespaces.start()
        try:
            while True:
                await self._bind(await self._due.get())
        finally:
            await self._namespaces.close()

    async def _bind(self, namespace: str) -> None:
        try:
            for path, body in bindings(namespace, self._home).items():
                await self._api.apply(path, body, force=True)
        except ApiError as error:
            if error.status == 404 or self._namespaces.get("", namespace) is None:
                return  # the namespace is gone
            log.warning("no rights could be given in %s, again in %g s: %s", namespace, AGAIN_S, error)
            asyncio.get_running_loop().call_later(AGAIN_S, self._due.put_nowait, namespace)

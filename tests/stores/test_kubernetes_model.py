"""The store on custom resources against the plain one, whatever the API server does meanwhile."""

from dataclasses import replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from basilica.core.errors import BasilicaError
from basilica.core.events import RecordedEvent
from basilica.kube.client.api import KubeApi
from basilica.kube.manifests.crd import definition
from basilica.ports import Deployment, UsageRow
from basilica.stores.kubernetes import KubernetesStore
from basilica_testkube import KubeServer
from tests.stores.model import StoreMachine
from tests.support.exploring import examples


class KubernetesMachine(StoreMachine):
    store: KubernetesStore

    @initialize()
    def begin(self) -> None:
        self.kube = KubeServer(processes=False).start()
        self.kube.create(definition())
        self.loop.run(self.open())

    async def open(self) -> None:
        self.api = KubeApi(self.kube.url)
        self.store = KubernetesStore(self.api, now=lambda: self.time)
        await self.store.open()

    async def close(self) -> None:
        await self.store.close()
        await self.api.close()

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "kube"):
            self.kube.close()

    def comparable(self, result: Any) -> Any:
        """Versions are the API server's, and so are the words of some refusals."""
        if isinstance(result, BasilicaError):
            return type(result)
        if isinstance(result, Deployment):
            return replace(result, version=0, owner=None)
        if isinstance(result, RecordedEvent):
            return replace(result, version=0)
        if isinstance(result, list) and result and isinstance(result[0], UsageRow):
            return sorted(result, key=lambda row: row.instance)  # of one moment, the deleted ones are in no order
        return [self.comparable(item) for item in result] if isinstance(result, list) else result

    @rule(how=st.sampled_from(["cut", "gone", "forgotten"]))
    def something_breaks(self, how: str) -> None:
        if how == "gone":
            self.kube.expire_watches()
            return
        if how == "forgotten":
            self.kube.compact()
        self.kube.cut_watches()


TestKubernetesMachine = KubernetesMachine.TestCase
TestKubernetesMachine.settings = settings(max_examples=examples(12), stateful_step_count=30)

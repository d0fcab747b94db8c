"""A cache of decoded runs in memory: those read last, as many as fit."""

from collections import OrderedDict
from itertools import chain

from basilica.core.spec import Exec, Shell
from basilica.ports import Deployment

CACHE_CHARACTERS = 32 << 20


class DeploymentCache:
    """The newest known state of each run in it, so that a hit needs no read of the file.

    A state that was read from the file must be put in at once: between a read and a later `put` the run could have been
    deleted, and it would never leave.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._weight = 0
        self._entries: OrderedDict[str, tuple[Deployment, int]] = OrderedDict()

    def get(self, instance: str) -> Deployment | None:
        entry = self._entries.get(instance)
        if entry is None:
            return None
        self._entries.move_to_end(instance)
        return entry[0]

    def put(self, deployment: Deployment) -> None:
        """Store it, unless a newer state is here: the file may be read before an earlier commit was announced."""
        held = self._entries.get(deployment.instance)
        if held is not None and held[0].version > deployment.version:
            return
        self.drop(deployment.instance)
        weight = weigh(deployment)
        self._entries[deployment.instance] = (deployment, weight)
        self._weight += weight
        while self._weight > self._capacity:
            _, (_, lightened) = self._entries.popitem(last=False)
            self._weight -= lightened

    def drop(self, instance: str) -> None:
        entry = self._entries.pop(instance, None)
        if entry is not None:
            self._weight -= entry[1]

    def __len__(self) -> int:
        return len(self._entries)


def weigh(deployment: Deployment) -> int:
    """Return about how many characters a run has: exact for parts that users can make large, a guess for the rest."""
    spec, status = deployment.spec, deployment.status
    match spec.program:
        case Shell(script, args):
            program = len(script) + sum(map(len, args))
        case Exec(argv):
            program = sum(map(len, argv))
    variables = chain.from_iterable(
        chain(names, names.values()) for names in (spec.env, spec.secrets, spec.nccl_env) if names
    )
    tails = chain.from_iterable((*e.log_tail, e.traceback) for e in chain(status.exits, status.failures))
    entries = len(status.ranks) + len(status.exits) + len(status.failures) + len(status.history) + 10
    return program + sum(map(len, variables)) + sum(map(len, tails)) + 200 * entries

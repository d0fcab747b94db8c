"""The network between ranks: letting hosts through the gate, and saying so in the run's rendezvous."""

from dataclasses import replace

from basilica.core import mesh
from basilica.core.actions import Announce
from basilica.core.events import Reason
from basilica.core.phase import RankPhase
from basilica.core.steps.turn import Turn


def open_the_gate(turn: Turn) -> None:
    """Tell the ranks how many they are, and let each host go when it reaches the others, or at the limit."""
    if turn.seen.mesh is None:
        return
    before = turn.status.mesh
    after, wake_at = mesh.turn(before, turn.seen.mesh, turn.now)
    if wake_at is not None:
        turn.wakes.append(wake_at)
    turn.status = replace(turn.status, mesh=after)
    if turn.seen.rendezvous is not None:
        turn.status = replace(turn.status, rendezvous_endpoint=turn.seen.rendezvous.endpoint)
    _tell_of_the_mesh(turn, before, after)
    _announce(turn, after)


def _tell_of_the_mesh(turn: Turn, before: mesh.MeshStatus | None, after: mesh.MeshStatus) -> None:
    if after.degraded:
        turn.condition("DegradedMesh", True, "HostsUnreachable", after.problem())
    elif after.ready:
        turn.condition("DegradedMesh", False, "HostsReachable")
    if after.ready and (before is None or not before.ready):
        several = len(after.hosts) > 1
        turn.say(Reason.MESH_READY, "every host reaches every other" if several else "all ranks are on one host")
    elif after.degraded and (before is None or before.released != after.released):
        turn.say(Reason.DEGRADED_MESH, after.goes_on(), warning=True)


def _announce(turn: Turn, gate: mesh.MeshStatus) -> None:
    admitted = turn.status.admitted
    inside = [rank for rank in turn.wanted() if admitted is None or rank.rank < admitted]
    taking_part = sum(rank.phase is not RankPhase.LOST for rank in inside)
    wanted = mesh.Announcement(taking_part, gate.released, admitted, turn.status.notice)
    if turn.seen.rendezvous is None or turn.seen.rendezvous.says != wanted:
        turn.actions.append(Announce(wanted))

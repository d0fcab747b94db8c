"""The gate: which hosts may go, and over what."""

from hypothesis import given
from hypothesis import strategies as st

from basilica.core import mesh
from basilica.core.mesh import EVERYONE, NO_ANSWER_YET, Gate, MeshStatus, Pair, SeenMesh, failing_pairs

from .story import Story, spec_of, up

HOSTS = ("a", "b", "c")
WELL = {host: dict.fromkeys(HOSTS, "") for host in HOSTS}


def gates(status: MeshStatus) -> dict[str, str]:
    return {host.host: host.gate.value for host in status.hosts}


def look(reports: dict[str, dict[str, str]], hosts: tuple[str, ...] = HOSTS) -> SeenMesh:
    return SeenMesh(hosts=hosts, failing=failing_pairs(hosts, reports), limit_seconds=30.0)


def test_one_host_is_ready_at_once() -> None:
    status, wake = mesh.turn(None, look({}, ("a",)), 0.0)
    assert (gates(status), wake, status.transport) == ({"a": "ready"}, None, "direct-mesh")


def test_nobody_goes_before_everybody_has_told() -> None:
    status, wake = mesh.turn(None, look({"a": WELL["a"], "b": WELL["b"]}), 100.0)
    assert gates(status) == {"a": "waiting", "b": "waiting", "c": "waiting"}
    assert status.failing == (Pair("c", EVERYONE, NO_ANSWER_YET),)
    assert wake == 130.0
    assert status.released == ()


def test_a_host_goes_when_all_its_pairs_answer_whatever_the_others_do() -> None:
    """Host a reaches all and is reached; b and c do not reach each other in one direction."""
    status, _ = mesh.turn(None, look({**WELL, "b": {"a": "", "c": "refused"}}), 0.0)
    assert gates(status) == {"a": "ready", "b": "waiting", "c": "waiting"}
    assert status.problem() == "b cannot reach c: refused"


def test_at_the_limit_the_rest_goes_all_the_same_and_later_turns_ready() -> None:
    broken = {**WELL, "b": {"a": "", "c": "refused"}}
    status, wake = mesh.turn(None, look(broken), 0.0)
    assert wake == 30.0
    status, wake = mesh.turn(status, look(broken), 30.0)
    assert (gates(status), wake) == ({"a": "ready", "b": "degraded", "c": "degraded"}, None)
    assert status.transport == "mixed"
    assert status.released == (("a", Gate.READY), ("b", Gate.DEGRADED), ("c", Gate.DEGRADED))
    status, _ = mesh.turn(status, look(WELL), 31.0)
    assert status.ready
    assert status.transport == "direct-mesh"
    assert status.problem() == ""


def test_the_wire_has_its_own_word_for_all_hosts_degraded() -> None:
    status, _ = mesh.turn(None, look({}), 0.0)
    status, _ = mesh.turn(status, look({}), 31.0)
    assert status.transport == "hub-relay"


def test_the_limit_counts_from_when_enough_agents_are_up() -> None:
    """Two of four agents are up while the others' image is on its way; all are up after 92 s."""
    hosts = ("a", "b", "c", "d")
    two = {"a": {"b": ""}, "b": {"a": ""}}
    status: mesh.MeshStatus | None = None
    for now in (0.0, 31.0, 74.0):
        failing = failing_pairs(hosts, two)
        assert mesh.heard(hosts, failing) == 2
        status, wake = mesh.turn(status, SeenMesh(hosts=hosts, failing=failing, enough=False), now)
        assert (status.released, wake) == ((), None)
        assert "a cannot reach c: no answer yet" in status.problem()
    all_up = {a: dict.fromkeys((b for b in hosts if b != a), "") for a in hosts}
    broken = {**all_up, "a": {**all_up["a"], "d": "no route"}}
    status, wake = mesh.turn(status, SeenMesh(hosts=hosts, failing=failing_pairs(hosts, broken)), 92.0)
    assert (gates(status), wake) == ({"a": "waiting", "b": "ready", "c": "ready", "d": "waiting"}, 122.0)
    status, _ = mesh.turn(status, SeenMesh(hosts=hosts, failing=failing_pairs(hosts, broken), enough=False), 122.0)
    assert gates(status)["a"] == "degraded"  # once begun the time goes on, whoever leaves


def test_the_time_goes_on_although_agents_leave_before_any_host_was_let_go() -> None:
    status, wake = mesh.turn(None, look({}), 0.0)
    assert (status.released, wake) == ((), 30.0)
    seen = SeenMesh(hosts=HOSTS, failing=failing_pairs(HOSTS, {}), enough=False)
    status, wake = mesh.turn(status, seen, 10.0)
    assert (status.released, wake) == ((), 30.0)
    status, _ = mesh.turn(status, seen, 30.0)
    assert set(gates(status).values()) == {"degraded"}


def test_why_names_who_cannot_resolve_a_name() -> None:
    story = Story(spec_of(2, 2, 2))
    problem = "cannot resolve the name gpt-0.gpt: name or service not known"
    seen = SeenMesh(hosts=("a", "b"), failing=failing_pairs(("a", "b"), {"a": {"b": ""}, "b": {"a": problem}}))
    story.look(mesh=seen)
    story.look(up(0), up(1), mesh=seen)
    assert f"waiting for the network between hosts (b cannot reach a: {problem})" in story.why
    story.look(up(0), up(1), after=31, mesh=seen)
    assert story.why == f"2 of 2 ranks are up; the run goes on although b cannot reach a: {problem}"


def test_what_falls_apart_later_is_ready_until_the_limit() -> None:
    status, _ = mesh.turn(None, look(WELL), 0.0)
    broken = {**WELL, "a": {"b": "no route", "c": ""}}
    status, wake = mesh.turn(status, look(broken), 500.0)
    assert (gates(status)["a"], wake) == ("ready", 530.0)
    status, _ = mesh.turn(status, look(broken), 530.0)
    assert gates(status) == {"a": "degraded", "b": "degraded", "c": "ready"}


def test_a_host_that_joins_does_not_hold_up_those_that_went() -> None:
    status, _ = mesh.turn(None, look(WELL, ("a", "b")), 0.0)
    status, _ = mesh.turn(status, look(WELL | {"d": {}}, ("a", "b", "d")), 10.0)
    assert gates(status) == {"a": "ready", "b": "ready", "d": "waiting"}


def test_many_failing_pairs_are_counted_and_a_few_are_named() -> None:
    hosts = tuple(f"h{number}" for number in range(10))
    reports = {source: dict.fromkeys(hosts, "refused") for source in hosts}
    failing = failing_pairs(hosts, reports)
    assert len(failing) == 90
    status, _ = mesh.turn(None, SeenMesh(hosts=hosts, failing=failing), 0.0)
    assert len(status.failing) == mesh.FAILING_KEPT
    assert status.problem().endswith("and 87 more")


@given(
    st.dictionaries(
        st.sampled_from(("a", "b", "c", "z")),
        st.dictionaries(st.sampled_from(("a", "b", "c", "z")), st.sampled_from(("", "refused"))),
    ),
    st.floats(0, 1e6),
)
def test_a_host_is_ready_exactly_if_all_its_pairs_answer(reports: dict[str, dict[str, str]], now: float) -> None:
    status, _ = mesh.turn(None, look(reports), now)
    for host in status.hosts:
        others = [other for other in HOSTS if other != host.host]
        answered = all(
            reports.get(a, {}).get(b, "?") == "" for o in others for a, b in ((host.host, o), (o, host.host))
        )
        told = all(name in reports for name in HOSTS)
        assert (host.gate is Gate.READY) == (answered and told)

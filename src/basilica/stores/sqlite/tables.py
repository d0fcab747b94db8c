"""The SQL of deployments and their events, and of keys. Writes run in the caller's transaction, one change each."""

import sqlite3
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from basilica.core.damage import DamagedRun
from basilica.core.errors import Conflict, DeploymentDamaged, DeploymentNotFound, NameInUse, StaleVersion
from basilica.core.events import Event, Reason, RecordedEvent
from basilica.core.spec import DeploymentSpec, Wanted
from basilica.core.status import DeploymentStatus
from basilica.ports import NO_LIMITS, Deployment, Limits
from basilica.stores.encoding import Undecodable, decode_spec, decode_status, encode_spec, encode_status, spec_digest
from basilica.stores.rules import (
    EVENTS_KEPT,
    IDEMPOTENCY_SECONDS,
    check_limits,
    ending_stand_in,
    is_live,
    is_open,
    usage_of,
)
from basilica.stores.sqlite import usage
from basilica.stores.sqlite.bounds import bounded

DELETIONS_KEPT = 100_000
"""In versions: a reader that is further behind than this misses deletions."""


def create(
    connection: sqlite3.Connection,
    deployment: Deployment,
    events: Sequence[Event],
    idempotency_key: str | None,
    limits: Limits,
) -> Deployment:
    now = deployment.status.created_at
    if idempotency_key is not None:
        earlier = _created_before(connection, deployment, idempotency_key, now)
        if earlier is not None:
            return earlier
    _check_name_free(connection, deployment)
    _check_limits(connection, deployment.user, limits, new_deployments=1, new_ranks=deployment.spec.world.target)
    deployment = replace(deployment, version=_next_version(connection))
    spec = deployment.spec
    try:
        usage.open_account(connection, deployment)
        row = _insert(connection, deployment)
    except sqlite3.IntegrityError:
        raise Conflict(f"the instance name {deployment.instance!r} has been given already") from None
    connection.execute("INSERT INTO specs VALUES (?, ?)", (row, encode_spec(spec)))
    if idempotency_key is not None:
        connection.execute(
            "INSERT INTO idempotency VALUES (?, ?, ?, ?, ?)",
            (deployment.user, idempotency_key, row, spec_digest(spec), now),
        )
    _record(connection, row, events, now, deployment.version)
    return deployment


def save_status(
    connection: sqlite3.Connection, before: Deployment, status: DeploymentStatus, events: Sequence[Event], now: float
) -> Deployment:
    if status == before.status and not events:
        current = _row(connection, "SELECT version FROM deployments WHERE instance = ?", before.instance)
        if current is None or current[0] != before.version:
            raise _stale(before, gone=current is None)
        return before
    after = replace(before, status=status, version=_next_version(connection))
    updated = _row(
        connection,
        """UPDATE deployments SET version = ?, live = ?, open = ?, terminal_at = ?, status = ?
           WHERE instance = ? AND version = ? RETURNING id""",
        after.version,
        is_live(status),
        is_open(after.spec, status),
        status.terminal_at,
        encode_status(status),
        before.instance,
        before.version,
    )
    if updated is None:
        known = _row(connection, "SELECT 1 FROM deployments WHERE instance = ?", before.instance)
        raise _stale(before, gone=known is None)
    _record(connection, updated[0], events, now, after.version)
    if usage_of(after) != usage_of(before):
        usage.update_account(connection, after)
    return after


def change_spec(
    connection: sqlite3.Connection,
    instance: str,
    change: Callable[[Deployment], DeploymentSpec],
    events: Sequence[Event],
    *,
    limits: Limits,
    now: float,
) -> Deployment:
    before = load(connection, instance)
    spec = change(before)
    if spec == before.spec:
        return before
    if is_live(before.status):
        more = spec.world.target - before.spec.world.target
        _check_limits(connection, before.user, limits, new_deployments=0, new_ranks=more)
    after = replace(before, spec=spec, version=_next_version(connection))
    updated = _row(
        connection,
        "UPDATE deployments SET name = ?, version = ?, open = ?, target = ? WHERE instance = ? RETURNING id",
        spec.name,
        after.version,
        is_open(spec, after.status),
        spec.world.target,
        instance,
    )
    assert updated is not None
    connection.execute("UPDATE specs SET spec = ? WHERE deployment = ?", (encode_spec(spec), updated[0]))
    _record(connection, updated[0], events, now, after.version)
    return after


def delete(connection: sqlite3.Connection, instance: str) -> bool:
    """Delete the run with its spec and events; False if there is none. Its usage stays."""
    if _row(connection, "DELETE FROM deployments WHERE instance = ? RETURNING id", instance) is None:
        return False
    version = _next_version(connection)
    connection.execute("INSERT INTO deletions VALUES (?, ?)", (version, instance))
    connection.execute("DELETE FROM deletions WHERE version <= ?", (version - DELETIONS_KEPT,))
    return True


def condemn(connection: sqlite3.Connection, instance: str, wanted: Wanted, now: float) -> Deployment:
    """End a run whose record cannot be read: a stand-in replaces the damaged parts."""
    spec, status, problem = _parts(connection, instance)
    after = ending_stand_in(damaged(connection, instance, problem, now), wanted, spec, status)
    after = replace(after, version=_next_version(connection))
    return _rewrite(connection, after)


def _rewrite(connection: sqlite3.Connection, after: Deployment) -> Deployment:
    updated = _row(
        connection,
        """UPDATE deployments SET name = ?, version = ?, live = ?, open = ?, target = ?, terminal_at = ?, status = ?
           WHERE instance = ? RETURNING id""",
        after.spec.name,
        after.version,
        is_live(after.status),
        is_open(after.spec, after.status),
        after.spec.world.target,
        after.status.terminal_at,
        encode_status(after.status),
        after.instance,
    )
    assert updated is not None
    connection.execute("INSERT OR REPLACE INTO specs VALUES (?, ?)", (updated[0], encode_spec(after.spec)))
    return after


def restore(connection: sqlite3.Connection, deployment: Deployment, events: Sequence[Event], now: float) -> None:
    """Insert a run again whose record is gone, and its account if there is none."""
    spec, version = deployment.spec, _next_version(connection)
    row = _insert(connection, replace(deployment, version=version))
    connection.execute("INSERT INTO specs VALUES (?, ?)", (row, encode_spec(spec)))
    if _row(connection, "SELECT 1 FROM usage WHERE instance = ?", deployment.instance) is None:
        usage.open_account(connection, deployment)
    _record(connection, row, events, now, version)


def raw(connection: sqlite3.Connection, instance: str) -> dict[str, object]:
    """Return the stored record as it is, damaged or not."""
    cursor = connection.execute(
        "SELECT * FROM deployments LEFT JOIN specs ON deployment = id WHERE instance = ?", (instance,)
    )
    names = [column[0] for column in cursor.description]
    return dict(zip(names, cursor.fetchone() or (), strict=False))


def _insert(connection: sqlite3.Connection, deployment: Deployment) -> int:
    spec, status = deployment.spec, deployment.status
    row = connection.execute(
        """INSERT INTO deployments
           (instance, user, namespace, name, version, live, open, target, terminal_at, status)
           VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)""",
        (
            deployment.instance,
            deployment.user,
            deployment.namespace,
            spec.name,
            deployment.version,
            is_live(status),
            is_open(spec, status),
            spec.world.target,
            status.terminal_at,
            encode_status(status),
        ),
    ).lastrowid
    assert row is not None
    return row


def damaged(connection: sqlite3.Connection, instance: str, problem: str, now: float = 0.0) -> DamagedRun:
    """Return the known facts of a run beside its record."""
    row = _find(
        connection,
        """SELECT d.instance, d.user, d.namespace, d.name, d.target, d.version, created_at
           FROM deployments d LEFT JOIN usage USING (instance) WHERE instance = ?""",
        instance,
    )
    if row is None:
        raise DeploymentNotFound(instance)
    instance, user, namespace, name, target, version, created_at = row
    return DamagedRun(
        instance=instance,
        user=user,
        namespace=namespace,
        name=name,
        target=target,
        created_at=now if created_at is None else created_at,
        version=version,
        problem=problem,
    )


def load(connection: sqlite3.Connection, instance: str) -> Deployment:
    """Return the run; `DeploymentDamaged` if its record cannot be read."""
    row = _find(
        connection,
        """SELECT instance, user, namespace, version, spec, status
           FROM deployments LEFT JOIN specs ON deployment = id WHERE instance = ?""",
        instance,
    )
    if row is None:
        raise DeploymentNotFound(instance)
    instance, user, namespace, version, spec, status = row
    try:
        return Deployment(
            instance=instance,
            user=user,
            namespace=namespace,
            spec=_decode_spec(spec),
            status=decode_status(status),
            version=version,
        )
    except Undecodable as error:
        raise DeploymentDamaged(damaged(connection, instance, str(error))) from None


def _decode_spec(text: str | None) -> DeploymentSpec:
    if text is None:
        raise Undecodable("it has no spec")
    return decode_spec(text)


def _parts(connection: sqlite3.Connection, instance: str) -> tuple[DeploymentSpec | None, DeploymentStatus | None, str]:
    """Return the readable parts of a run's record, and the problems of the rest."""
    row = _find(
        connection,
        "SELECT spec, status FROM deployments LEFT JOIN specs ON deployment = id WHERE instance = ?",
        instance,
    )
    if row is None:
        raise DeploymentNotFound(instance)
    spec: DeploymentSpec | None = None
    status: DeploymentStatus | None = None
    problems = []
    try:
        spec = _decode_spec(row[0])
    except Undecodable as error:
        problems.append(str(error))
    try:
        status = decode_status(row[1])
    except Undecodable as error:
        problems.append(str(error))
    return spec, status, "; ".join(problems)


def newest_named(connection: sqlite3.Connection, namespace: str, name: str) -> str:
    """Return the instance of the newest run of that friendly name, or raise `DeploymentNotFound`."""
    row = _find(
        connection,
        "SELECT instance FROM deployments WHERE namespace = ? AND name = ? ORDER BY id DESC LIMIT 1",
        namespace,
        name,
    )
    if row is None:
        raise DeploymentNotFound(name)
    return str(row[0])


def newest_version(connection: sqlite3.Connection) -> int:
    """Return the version of the last change of all."""
    (version,) = connection.execute("SELECT version FROM counter").fetchone()
    return int(version)


def raise_version(connection: sqlite3.Connection, version: int) -> None:
    """Make the next change come after that version."""
    connection.execute("UPDATE counter SET version = max(version, ?)", (version,))


def instances(connection: sqlite3.Connection, namespace: str | None) -> list[str]:
    """Return the instances, newest first."""
    if namespace is None:
        rows = connection.execute("SELECT instance FROM deployments ORDER BY id DESC")
    else:
        rows = connection.execute("SELECT instance FROM deployments WHERE namespace = ? ORDER BY id DESC", (namespace,))
    return _firsts(rows)


def open_instances(connection: sqlite3.Connection) -> list[str]:
    return _firsts(connection.execute("SELECT instance FROM deployments WHERE open ORDER BY id"))


def ended_before(connection: sqlite3.Connection, moment: float) -> list[str]:
    """Return the settled runs, in the order of their ends."""
    return _firsts(
        connection.execute(
            "SELECT instance FROM deployments WHERE NOT open AND terminal_at < ? ORDER BY terminal_at, instance",
            (moment,),
        )
    )


def changed_since(connection: sqlite3.Connection, version: int) -> list[str]:
    """Return the runs changed or deleted after that version, in the order of the last change of each."""
    return _firsts(
        connection.execute(
            """SELECT instance, version FROM deployments WHERE version > :since
               UNION ALL SELECT instance, version FROM deletions WHERE version > :since ORDER BY version""",
            {"since": bounded(version)},
        )
    )


def events(connection: sqlite3.Connection, instance: str, limit: int | None, since: int) -> list[RecordedEvent]:
    rows = connection.execute(
        """SELECT kind, reason, message, count, first_at, last_at, events.version
           FROM events JOIN deployments ON id = deployment
           WHERE instance = ? AND events.version > ?
           ORDER BY last_at DESC, events.version DESC, position DESC LIMIT ?""",
        (instance, bounded(since), bounded(limit)),
    )
    return [
        RecordedEvent(
            kind=kind, reason=reason, message=message, count=count, first_at=first, last_at=last, version=version
        )
        for kind, reason, message, count, first, last, version in rows
    ]


def _created_before(connection: sqlite3.Connection, deployment: Deployment, key: str, now: float) -> Deployment | None:
    connection.execute("DELETE FROM idempotency WHERE created_at <= ?", (now - IDEMPOTENCY_SECONDS,))
    earlier = _row(
        connection,
        """SELECT digest, instance FROM idempotency JOIN deployments ON id = deployment
           WHERE idempotency.user = ? AND key = ?""",
        deployment.user,
        key,
    )
    if earlier is None:
        return None
    digest, instance = earlier
    if digest != spec_digest(deployment.spec):
        raise Conflict(f"the idempotency key was used for another request already (it made {instance})")
    return load(connection, instance)


def _check_name_free(connection: sqlite3.Connection, deployment: Deployment) -> None:
    name = deployment.spec.name
    holder = _row(
        connection,
        "SELECT instance FROM deployments WHERE live AND namespace = ? AND name = ?",
        deployment.namespace,
        name,
    )
    if holder is not None and is_live(deployment.status):
        raise NameInUse(name, holder[0])


def _check_limits(
    connection: sqlite3.Connection, user: str, limits: Limits, *, new_deployments: int, new_ranks: int
) -> None:
    if limits == NO_LIMITS:
        return
    held = _row(connection, "SELECT count(*), total(target) FROM deployments WHERE live AND user = ?", user)
    assert held is not None
    check_limits(limits, deployments=held[0], ranks=int(held[1]), new_deployments=new_deployments, new_ranks=new_ranks)


def _record(connection: sqlite3.Connection, row: int, events: Sequence[Event], now: float, version: int) -> None:
    """Fold equal events, and keep their number bounded."""
    new = False
    for position, event in enumerate(events):
        recorded = _row(
            connection,
            """INSERT INTO events VALUES (?, ?, ?, ?, 1, ?, ?, ?, ?)
               ON CONFLICT DO UPDATE SET
                   count = count + 1, kind = excluded.kind, last_at = max(last_at, excluded.last_at),
                   version = excluded.version, position = excluded.position
               RETURNING count""",
            row,
            event.reason,
            event.message,
            event.kind,
            now,
            now,
            version,
            position,
        )
        new = new or recorded == (1,)
    if new:
        _forget_oldest(connection, row)


def _forget_oldest(connection: sqlite3.Connection, row: int) -> None:
    (count,) = connection.execute("SELECT count(*) FROM events WHERE deployment = ?", (row,)).fetchone()
    if count > EVENTS_KEPT:
        connection.execute(
            """DELETE FROM events WHERE (deployment, reason, message) IN (
                   SELECT deployment, reason, message FROM events WHERE deployment = ? AND reason <> ?
                   ORDER BY last_at, version, position LIMIT ?)""",
            (row, Reason.CREATED, count - EVENTS_KEPT),
        )


def _next_version(connection: sqlite3.Connection) -> int:
    row = _row(connection, "UPDATE counter SET version = version + 1 RETURNING version")
    assert row is not None
    return int(row[0])


def _stale(before: Deployment, *, gone: bool) -> Exception:
    if gone:
        return DeploymentNotFound(before.instance)
    return StaleVersion(f"{before.instance} has changed since version {before.version}")


def _row(connection: sqlite3.Connection, statement: str, *values: object) -> tuple[Any, ...] | None:
    """Return the one row, if any. All is fetched: a statement that is not at its end keeps its transaction from
    ending.
    """
    rows = connection.execute(statement, values).fetchall()
    return rows[0] if rows else None


def _find(connection: sqlite3.Connection, statement: str, *names: str) -> tuple[Any, ...] | None:
    """Return the row with the given names; a name that is not even valid Unicode matches none."""
    try:
        return _row(connection, statement, *names)
    except UnicodeEncodeError:
        return None


def _firsts(rows: Iterable[tuple[str, ...]]) -> list[str]:
    return [row[0] for row in rows]

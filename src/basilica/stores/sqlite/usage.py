"""The SQL of usage: one account for each run, which outlives it. Writes run in the caller's transaction."""

import sqlite3

from basilica.ports import Deployment, UsageRow
from basilica.stores.rules import usage_of
from basilica.stores.sqlite.bounds import bounded


def rows(connection: sqlite3.Connection, user: str, limit: int | None, offset: int) -> list[UsageRow]:
    """Return the user's rows, newest first."""
    found = connection.execute(
        """SELECT instance, name, rank_seconds, gpu_seconds, created_at, ended_at, training_seconds, lost_seconds
           FROM usage WHERE user = ? ORDER BY id DESC LIMIT ? OFFSET ?""",
        (user, bounded(limit), bounded(offset)),
    )
    return [
        UsageRow(
            user=user,
            instance=instance,
            name=name,
            rank_seconds=rank_seconds,
            gpu_seconds=gpu_seconds,
            created_at=created_at,
            ended_at=ended_at,
            training_seconds=training,
            lost_seconds=lost,
        )
        for instance, name, rank_seconds, gpu_seconds, created_at, ended_at, training, lost in found
    ]


def open_account(connection: sqlite3.Connection, deployment: Deployment) -> None:
    """Insert the run's account. Accounts outlive their runs, so an instance name that was given before fails here."""
    used = usage_of(deployment)
    connection.execute(
        """INSERT INTO usage
           (user, instance, name, rank_seconds, gpu_seconds, created_at, ended_at, training_seconds, lost_seconds)
           VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)""",
        (
            used.user,
            used.instance,
            used.name,
            used.rank_seconds,
            used.gpu_seconds,
            used.created_at,
            used.ended_at,
            used.training_seconds,
            used.lost_seconds,
        ),
    )


def update_account(connection: sqlite3.Connection, deployment: Deployment) -> None:
    used = usage_of(deployment)
    connection.execute(
        """UPDATE usage SET rank_seconds = ?, gpu_seconds = ?, ended_at = ?, training_seconds = ?, lost_seconds = ?
           WHERE instance = ?""",
        (
            used.rank_seconds,
            used.gpu_seconds,
            used.ended_at,
            used.training_seconds,
            used.lost_seconds,
            used.instance,
        ),
    )

"""The rendering of a run's checkpoints for a terminal: views in, a Rich table out. Pure."""

from collections.abc import Sequence
from datetime import datetime

from rich.table import Table

from basilica.cli.show import age, clean, columns
from basilica.cli.show_diloco import size
from basilica.client.views import Checkpoint


def table(found: Sequence[Checkpoint], now: datetime) -> Table:
    rows = columns("STEP", "TIER", "RANKS", "SIZE", "AGE")
    for each in found:
        ranks = f"{each.ranks} of {each.world}{'' if each.complete else ', incomplete'}"
        rows.add_row(str(each.step), clean(each.tier), ranks, size(each.bytes), age(each.sealed_at, now))
    return rows

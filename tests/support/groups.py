"""Which tests run on one worker, one after the other, and who comes first.

The tests of a file share its servers and what it imports, so they stay together. Some stay together across files:
the stories of the published client, which each version tells once and no two versions at a time, and what looks at the
console with one browser.

The longest group comes first, so that no worker is left alone with it at the end.
"""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import PurePath

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.support import times

_OF_A_FOLDER = {"official": "the published client", "console": "the console"}


def group_of(nodeid: str) -> str:
    file, _, _ = nodeid.partition("::")
    return _OF_A_FOLDER.get(PurePath(file).parent.name, file)


def arrange(items: list[pytest.Item], seconds: Mapping[str, float]) -> None:
    """Put the longest groups first."""
    long: dict[str, float] = defaultdict(float)
    for item in items:
        long[group_of(item.nodeid)] += seconds.get(times.test_of(item.nodeid), 0.0)
    items.sort(key=lambda item: (-long[group_of(item.nodeid)], group_of(item.nodeid)))


class Groups(LoadScopeScheduling):  # type: ignore[misc]  # xdist ships no types
    """xdist's own `loadgroup` writes the group into the name of a test, where this pytest no longer looks for it."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)

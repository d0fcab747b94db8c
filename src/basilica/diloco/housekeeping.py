"""What is done besides the rounds: old ones are removed, and replicas announce themselves. Flows, as the rounds are."""

from basilica.diloco.documents import Place
from basilica.diloco.effects import Create, Delete, Flow, Found, List


def remove_round(place: Place) -> Flow[int]:
    """Remove the parts and results of a round that is nobody's any more; how many objects that were.

    Manifests stay: they are the history of the run, and while one stands its round cannot be decided a second time by a
    replica that slept through it.
    """
    listing: tuple[Found, ...] = yield List(place.prefix)
    keys = tuple(found.key for found in listing if not found.key.startswith(f"{place.prefix}manifest-"))
    if keys:
        yield Delete(keys)
    return len(keys)


def announce(place: Place, round: int, rank: int) -> Flow[None]:
    """Ask to be expected in that round."""
    yield Create(f"{place.joining(round)}{rank:05d}", 0, iter(()))

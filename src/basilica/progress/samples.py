"""`basilica.Samples`: which samples this rank takes next, in any world, each once per epoch.

The cursor is the number of global batches that were used since the first epoch began. A batch counts as used when the
next one is requested or when `advance()` is called, whichever comes first; `Progress.commit` calls that. Batches that
were handed out and are not counted, such as those that a DataLoader has fetched ahead, are handed out again by the next
iteration, and after a restore.

The module runs inside other people's programs: standard library only, and torch is looked up, never imported.
"""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import index
from typing import Any

from basilica.progress.draws import Weights
from basilica.progress.look_ahead import BatchSampler, IndexSampler, Loader, parts_of
from basilica.progress.permutation import LONGEST
from basilica.progress.sample_plan import Plan, share_of

__all__ = ["Samples"]

FINGERPRINT = ("length", "global_batch", "seed", "shuffle", "drop_last", "weights")


class Samples:
    """The samples of a run: an iterable of this rank's share of each global batch, as lists of indices.

    `length` is the number of samples in the dataset and `global_batch` how many of them all ranks use together in one
    step. The global batches depend on `seed` and on nothing else: not on the world, nor on when the run was resized,
    killed or resumed. Each epoch has an order of its own; `epochs=None` goes on for ever. `drop_last` leaves out the
    last batch of an epoch if that is not full. `weights` draws with replacement, `length` draws in an epoch.
    `micro_batch` is how many samples a rank can take at once, see `micro_batches`. `rank` and `world` are those of
    torch.distributed, or RANK and WORLD_SIZE, unless given; they are read when an iteration begins.

    >>> samples = basilica.Samples(len(dataset), global_batch=512)     # doctest: +SKIP
    >>> for indices in samples:                                        # doctest: +SKIP
    ...     train_step(dataset[indices])                               # doctest: +SKIP
    """

    def __init__(
        self,
        length: int,
        global_batch: int,
        *,
        seed: int = 0,
        epochs: int | None = 1,
        shuffle: bool = True,
        drop_last: bool = False,
        micro_batch: int | None = None,
        weights: Iterable[float] | None = None,
        rank: int | None = None,
        world: int | None = None,
    ) -> None:
        length = _whole("length", length, 1, "a dataset without samples has nothing to train on")
        if length > LONGEST:
            raise ValueError(f"length={length} is more than {LONGEST}, the most that can be ordered")
        global_batch = _whole("global_batch", global_batch, 1)
        if drop_last and length < global_batch:
            raise ValueError(
                f"length={length} is less than global_batch={global_batch}, and drop_last leaves no batch: "
                "use a smaller global_batch, or drop_last=False"
            )
        if weights is not None and not shuffle:
            raise ValueError("weights draws at random, so shuffle=False has no meaning with it: leave one of them out")
        self.epochs = None if epochs is None else _whole("epochs", epochs, 1, "None is for ever")
        self.micro_batch = None if micro_batch is None else _whole("micro_batch", micro_batch, 1)
        if (rank is None) != (world is None):
            raise ValueError("rank and world belong together: give both, or neither")
        self._given: tuple[int, int] | None = None
        if rank is not None and world is not None:
            self._given = _place(_whole("rank", rank, 0), _whole("world", world, 1))
        self._plan = Plan(
            length,
            global_batch,
            _whole("seed", seed, None),
            bool(shuffle),
            bool(drop_last),
            None if weights is None else Weights(weights, length),
        )
        self._now: tuple[int, int] | None = None
        self._used = 0  # global batches
        self._handed = 0  # global batches that are used or in use
        self._loads = 0  # how often another cursor was loaded

    # ---- what there is ---------------------------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """The number of samples in the dataset."""
        return self._plan.length

    @property
    def global_batch(self) -> int:
        """The number of samples that all ranks use together in one step."""
        return self._plan.global_batch

    @property
    def step(self) -> int:
        """The number of global batches that were used since the first epoch began."""
        return self._used

    @property
    def epoch(self) -> int:
        """The epoch of the first batch that is not used yet; it counts from 0."""
        return self._used // self._plan.batches

    @property
    def position(self) -> int:
        """The number of samples of this epoch that all ranks together have used."""
        return self._used % self._plan.batches * self._plan.global_batch

    @property
    def remaining(self) -> int | None:
        """The number of global batches until the end of the last epoch; None if that never comes."""
        return None if self._last is None else max(0, self._last - self._used)

    @property
    def rank(self) -> int:
        """This process among those that share each global batch."""
        return self._here()[0]

    @property
    def world(self) -> int:
        """The number of processes that share each global batch."""
        return self._here()[1]

    def __len__(self) -> int:
        """The number of global batches in one epoch."""
        return self._plan.batches

    # ---- one step --------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's share of each global batch that is not used yet, to the end of the last epoch."""
        self._begin()
        return self._shares()

    def advance(self) -> None:
        """Count the oldest batch that was handed out as used; without one, nothing happens. `Progress.commit` calls it.

        A loop that asks for the next batch needs no call: that counts the batch before it.
        """
        self._used = min(self._used + 1, max(self._used, self._handed))

    @property
    def micro_batches(self) -> int:
        """The number of parts in which each rank takes its share of the present global batch, the same in all ranks.

        No part has more than `micro_batch` samples, so a smaller world takes more of them and the global batch stays as
        it is. A short last batch may need fewer.
        """
        return parts_of(self, self._used)

    def split(self, indices: Sequence[int]) -> list[list[int]]:
        """Split a share into exactly `micro_batches` lists of about equal size.

        Lists can be empty if there are more of them than samples. These come first, so the last one, with which ranks
        exchange their gradients, has samples wherever the share has.
        """
        count = self.micro_batches
        return [list(indices[len(indices) * i // count : len(indices) * (i + 1) // count]) for i in range(count)]

    @property
    def weight(self) -> float:
        """The factor for this rank's mean loss: then the mean of all ranks is that of the present global batch.

        It is 1 where all shares are equal, differs on an uneven batch, and is 0 for an empty share.
        """
        size = self._plan.size(self._used)
        return self.weight_of(share_of(size, *self._here()))

    def weight_of(self, part: Sequence[object]) -> float:
        """Return the factor for the mean loss of a part of the share, such as one micro-batch."""
        return len(part) * self.world / self._plan.size(self._used)

    # ---- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor, and the settings that it has a meaning with."""
        return {"epoch": self.epoch, "position": self.position, **self._fingerprint()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved cursor, at no cost. Raises ValueError if it belongs to other settings."""
        for name, mine in self._fingerprint().items():
            if name not in state:
                raise ValueError(f"the state of Samples has no {name!r}: it was not saved by Samples")
            if state[name] != mine:
                saved = "the same weights" if name == "weights" else f"{name}={state[name]!r}"
                found = "other weights" if name == "weights" else f"{name}={state[name]!r}, and here it is {mine!r}"
                raise ValueError(
                    f"the state of Samples was saved with {found}: these would be other samples than those of the "
                    f"saved run. Use {saved}, or start without the saved state of Samples"
                )
        try:
            epoch, position = index(state["epoch"]), index(state["position"])
        except (KeyError, TypeError):
            raise ValueError("the state of Samples has no epoch and position: it is damaged") from None
        batch, inside = divmod(position, self._plan.global_batch)
        if epoch < 0 or inside or not 0 <= batch < self._plan.batches:
            raise ValueError(f"the state of Samples is damaged: epoch {epoch}, position {position} begins no batch")
        self._used = self._handed = epoch * self._plan.batches + batch
        self._loads += 1

    def _fingerprint(self) -> dict[str, Any]:
        plan, weights = self._plan, self._plan.weights
        facts = (plan.length, plan.global_batch, plan.seed, plan.shuffle, plan.drop_last, weights and weights.digest)
        return dict(zip(FINGERPRINT, facts, strict=True))

    # ---- loaders ---------------------------------------------------------------------------------------------------

    def loader(self, dataset: Any, *, micro: bool = False, **options: Any) -> Loader:
        """Return an iterable of loaded batches, to the end of the last epoch: a torch DataLoader with these options.

        Batches count as used as they do in direct iteration, whatever the workers have fetched ahead. `micro` delivers
        each share in `micro_batches` parts.
        """
        return Loader(self, dataset, micro, options)

    def batch_sampler(self, *, micro: bool = False) -> BatchSampler:
        """Return a batch sampler for a DataLoader of your own: one pass goes from the cursor to the end of its epoch.

        It runs ahead with the DataLoader and counts no batch as used: call `advance()` after each step, or commit
        it with `Progress`. A DataLoader cannot load an empty share, so that is replaced by one sample of the batch;
        `weight` is 0 there.
        """
        return BatchSampler(self, micro=micro)

    def sampler(self) -> IndexSampler:
        """Return a sampler of single indices in the order of the run, for frameworks that share them out themselves.

        One pass goes from the cursor to the end of its epoch, the same in all ranks. `advance()` counts a global batch.
        """
        return IndexSampler(self)

    # ---- inside ----------------------------------------------------------------------------------------------------

    @property
    def _last(self) -> int | None:
        return None if self.epochs is None else self.epochs * self._plan.batches

    def _begin(self) -> tuple[int, int]:
        """Begin an iteration: read the world, and take back what was handed out and is not counted."""
        self._now = None
        rank, world = self._now = self._here()
        if self._plan.global_batch < world:
            raise ValueError(
                f"global_batch={self._plan.global_batch} is smaller than the world of {world}: some ranks would have "
                f"no sample in any step. Use a global_batch of at least {world}, or fewer ranks"
            )
        self._handed = self._used
        return rank, world

    def _here(self) -> tuple[int, int]:
        return self._given or self._now or _found_place()

    def _count_handed(self) -> None:
        """Count what was handed out: the next batch is requested."""
        self._used = max(self._used, self._handed)

    def _ahead(self, number: int) -> Iterator[list[int]]:
        """Yield this rank's shares from a global batch to the end of the last epoch; the cursor stays."""
        rank, world = self._here()
        while self._last is None or number < self._last:
            for share in self._plan.shares(number, rank, world):
                yield share
                number += 1

    def _shares(self) -> Iterator[list[int]]:
        shares: Iterator[list[int]] = iter(())
        expected = -1
        while True:
            self._count_handed()
            if self._used != expected:  # the first one, or another cursor was loaded
                shares, expected = self._ahead(self._used), self._used
            share = next(shares, None)
            if share is None:
                return
            expected += 1
            self._handed = expected
            yield share


def _whole(name: str, value: object, least: int | None, why: str = "") -> int:
    """Return a whole number that is not too small, whatever kind of integer it is."""
    try:
        number = None if isinstance(value, bool) else index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None:
        raise ValueError(f"{name}={value!r} is not a whole number")
    if least is not None and number < least:
        raise ValueError(f"{name}={number} is less than {least}" + (f": {why}" if why else ""))
    return number


def _place(rank: int, world: int) -> tuple[int, int]:
    if not 0 <= rank < world:
        raise ValueError(f"rank={rank} is not in a world of {world}: ranks count from 0 to {world - 1}")
    return rank, world


def _found_place() -> tuple[int, int]:
    """Return this process's rank and world: of torch.distributed if that is in use, or of the environment."""
    torch = sys.modules.get("torch.distributed")
    if torch is not None and torch.is_available() and torch.is_initialized():
        return torch.get_rank(), torch.get_world_size()
    rank, world = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    try:
        return _place(int(rank), int(world))
    except ValueError:
        raise ValueError(
            f"RANK={rank} and WORLD_SIZE={world} name no place in a world: give Samples rank and world"
        ) from None

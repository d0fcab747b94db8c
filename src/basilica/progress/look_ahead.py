"""Samples for loaders that fetch ahead: a batch sampler, a sampler of single indices, and a DataLoader that counts.

A DataLoader requests batches long before the training uses them. These samplers therefore have a place of their own
ahead of the cursor, and the cursor follows as batches are used: by `advance()`, or by the deliveries of `Loader`.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from basilica.progress.samples import Samples

DECIDED = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")


class BatchSampler:
    """This rank's shares, or their micro-batches, as torch's DataLoader takes them from `batch_sampler`."""

    def __init__(
        self, samples: "Samples", *, micro: bool = False, all_epochs: bool = False, counted: bool = True
    ) -> None:
        self._samples = samples
        self._micro = micro
        self._all_epochs = all_epochs
        self._counted = counted  # by `advance()`; else by the one that made it

    def __len__(self) -> int:
        """The number of batches in a whole epoch; after a restore the first pass has fewer."""
        batches = len(self._samples)
        if not self._micro:
            return batches
        return (batches - 1) * parts_of(self._samples, 0) + parts_of(self._samples, batches - 1)

    def __iter__(self) -> Iterator[list[int]]:
        samples = self._samples
        samples._begin()
        return self._run(samples._used, samples._loads)

    def _run(self, number: int, loads: int) -> Iterator[list[int]]:
        samples = self._samples
        end = None if self._all_epochs else (number // len(samples) + 1) * len(samples)
        for share in samples._ahead(number):
            if number == end:
                return
            padded = share or [_first_of(samples, number)]
            parts = _split(padded, parts_of(samples, number)) if self._micro else [padded]
            for part in parts:
                if samples._loads != loads:
                    raise RuntimeError(
                        "another cursor of Samples was loaded while a DataLoader ran ahead of it: begin a new iteration"
                    )
                if self._counted:
                    samples._handed = max(samples._handed, number + 1)
                yield part
            number += 1


class IndexSampler:
    """All indices of an epoch in the order of the run, one by one, as torch's DataLoader takes them from `sampler`."""

    def __init__(self, samples: "Samples") -> None:
        self._samples = samples

    def __len__(self) -> int:
        """The number of samples in a whole epoch; after a restore the first pass has fewer."""
        plan = self._samples._plan
        return min(plan.length, plan.batches * plan.global_batch)

    def __iter__(self) -> Iterator[int]:
        samples = self._samples
        samples._handed = samples._used
        return self._run(samples._used, samples._loads)

    def _run(self, number: int, loads: int) -> Iterator[int]:
        samples = self._samples
        if samples._last is not None and number >= samples._last:
            return
        for batch in samples._plan.shares(number, 0, 1):
            if samples._loads != loads:
                raise RuntimeError(
                    "another cursor of Samples was loaded while a DataLoader ran ahead of it: begin a new iteration"
                )
            number += 1
            samples._handed = max(samples._handed, number)
            yield from batch


class Loader:
    """The loaded batches of `Samples.loader`: an iterable that counts what it has delivered, not what was fetched."""

    def __init__(self, samples: "Samples", dataset: Any, micro: bool, options: dict[str, Any]) -> None:
        wrong = [name for name in DECIDED if name in options]
        if wrong:
            raise ValueError(f"{wrong[0]} is decided by Samples: leave it out")
        from torch.utils.data import DataLoader  # noqa: PLC0415 (only those who load by torch need it)

        sampler = BatchSampler(samples, micro=micro, all_epochs=True, counted=False)
        self._samples = samples
        self._micro = micro
        self.dataloader = DataLoader(dataset, batch_sampler=sampler, **options)

    def __len__(self) -> int:
        """The number of batches in a whole epoch."""
        return len(self.dataloader)

    def __iter__(self) -> Iterator[Any]:
        samples = self._samples
        batches, loads, number, part = iter(self.dataloader), samples._loads, samples._used, 0
        while True:
            if samples._loads != loads:  # what was fetched ahead belongs to the other cursor
                batches, loads, number, part = iter(self.dataloader), samples._loads, samples._used, 0
            samples._count_handed()
            batch = next(batches, self)
            if batch is self:
                return
            part += 1
            if part == (parts_of(samples, number) if self._micro else 1):
                number, part = number + 1, 0
                samples._handed = number
            yield batch


def parts_of(samples: "Samples", number: int) -> int:
    """Return in how many micro-batches each rank takes a global batch."""
    if samples.micro_batch is None:
        return 1
    largest = -(-samples._plan.size(number) // samples.world)
    return max(1, -(-largest // samples.micro_batch))


def _split(share: list[int], count: int) -> list[list[int]]:
    """Split a share for a DataLoader: a part that would be empty has the first sample of the share."""
    parts = [share[len(share) * i // count : len(share) * (i + 1) // count] for i in range(count)]
    return [part or share[:1] for part in parts]


def _first_of(samples: "Samples", number: int) -> int:
    return next(samples._plan.shares(number, 0, 1))[0]

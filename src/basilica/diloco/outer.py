"""The outer half of DiLoCo, in NumPy: who is synchronized when, pseudo-gradients, and SGD with momentum.

Every operation is a correctly rounded one on the processor, so replicas that apply the same mean to the same state get
the same bits, whatever machine or accelerator they train on.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

Array = NDArray[Any]
BLOCK = 1 << 15
"""Numbers that are computed with at a time: they stay in the processor's cache."""


@dataclass(frozen=True, slots=True)
class OuterSGD:
    """SGD with momentum as `torch.optim.SGD` defines it: no dampening, and the first gradient is the first velocity.

    With `warmup` the first rounds are plain averaging (a rate of 1, no momentum): from a random start early
    pseudo-gradients say little of later ones. The momentum of round r is then at most r / (r + warmup), and the rate
    changes with it.
    """

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True
    warmup: float = 0.0

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ValueError(f"outer_lr must be more than 0, not {self.lr}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"outer_momentum must be at least 0 and less than 1, not {self.momentum}")
        if not 0 <= self.warmup < math.inf:
            raise ValueError(f"outer_warmup must be 0 (none) or more, not {self.warmup}")

    def at(self, round: int) -> tuple[float, float]:
        """The rate and the momentum of a round."""
        if not (self.warmup and self.momentum):
            return self.lr, self.momentum
        momentum = min(self.momentum, round / (round + self.warmup))
        return 1 - (1 - self.lr) * momentum / self.momentum, momentum

    def at_rest(self, parameters: Sequence[Array]) -> list[Array]:
        """The velocity before the first step."""
        return [np.zeros_like(p) for p in parameters] if self.momentum else []

    def step(
        self, parameters: Sequence[Array], gradients: Sequence[Array], velocity: list[Array] | None, round: int = 0
    ) -> list[Array]:
        """Move the parameters in place; the velocity for the next step, which is also changed in place."""
        first = velocity is None
        rate, momentum = self.at(round)
        if velocity is None:
            velocity = self.at_rest(parameters)
        for index, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            speed = velocity[index].reshape(-1) if self.momentum else None
            rows = parameter.reshape(-1), gradient.reshape(-1)
            for part in _blocks(parameter.size):
                kept = None if speed is None else speed[part]
                self._step(rows[0][part], rows[1][part], kept, rate, momentum, first=first)
        return velocity

    def _step(
        self, parameter: Array, gradient: Array, speed: Array | None, rate: float, momentum: float, *, first: bool
    ) -> None:
        lr, momentum = parameter.dtype.type(rate), parameter.dtype.type(momentum)
        if speed is None:
            parameter -= lr * gradient
            return
        if not first:
            speed *= momentum
        speed += gradient
        # Nesterov without its first term would be ordinary momentum: the velocity is the whole direction then.
        direction = gradient + momentum * speed if self.nesterov else speed
        parameter -= lr * direction


def pseudo_gradient(before: Array, after: Array) -> Array:
    """Parameters before the inner steps minus after; it is put where `after` was."""
    return np.subtract(before, after, out=after)


def mixed(agreed: Array, local: Array, share: float) -> Array:
    """The agreed parameters with a share of what this replica has learned since it gave its part; replaces `local`."""
    local -= agreed
    local *= local.dtype.type(share)
    local += agreed
    return local


def fingerprint(parameters: Sequence[Array], velocity: Sequence[Array] | None, buffers: Sequence[Array] = ()) -> str:
    """Equal only if every bit of all is."""
    state = xxhash.xxh3_128()
    for array in (*parameters, *(velocity or ()), *buffers):
        state.update(memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8)))  # type: ignore[arg-type]
    return state.hexdigest()


def divide(sizes: Sequence[int], fragments: int) -> list[range]:
    """Parameters in their order, in fragments of about the same size; none is empty."""
    if not 1 <= fragments <= len(sizes):
        raise ValueError(f"{len(sizes)} parameters cannot be divided into {fragments} fragments")
    total, done, start = sum(sizes), 0, 0
    cut: list[range] = []
    for index, size in enumerate(sizes):
        done += size
        left = fragments - len(cut)
        enough = done * fragments >= total * (len(cut) + 1)
        if left > 1 and (enough or len(sizes) - index - 1 < left):
            cut.append(range(start, index + 1))
            start = index + 1
    return [*cut, range(start, len(sizes))]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Which fragment is synchronized after which inner step.

    Synchronizations are numbered through; number `n` is of fragment `n % fragments` and its round `n // fragments`. Its
    result is applied after step `(n + 1) * gap`, and its part was given `delay` steps before.
    """

    sync_every: int
    fragments: int = 1
    delay: int = 0

    def __post_init__(self) -> None:
        if self.sync_every < 1:
            raise ValueError(f"sync_every must be at least 1, not {self.sync_every}")
        if self.fragments < 1 or self.sync_every % self.fragments:
            raise ValueError(f"sync_every={self.sync_every} must be a multiple of fragments={self.fragments}")
        if not 0 <= self.delay < self.gap:
            raise ValueError(
                f"delay={self.delay} must be less than the {self.gap} steps from one fragment to the next: "
                "a fragment is applied before the next one is given"
            )

    @property
    def gap(self) -> int:
        """Steps from one synchronization to the next."""
        return self.sync_every // self.fragments

    def given(self, step: int) -> int | None:
        """The number of the synchronization that begins after this step."""
        number, rest = divmod(step + self.delay, self.gap)
        return number - 1 if rest == 0 and number else None

    def applied(self, step: int) -> int | None:
        """The number of the synchronization that is finished after this step."""
        number, rest = divmod(step, self.gap)
        return number - 1 if rest == 0 and number else None

    def start_of(self, rounds: Sequence[int]) -> int:
        """The step from which to go on, if that many rounds of each fragment are done."""
        return min(done * self.fragments + fragment for fragment, done in enumerate(rounds)) * self.gap


def _blocks(size: int) -> Iterator[slice]:
    return (slice(start, start + BLOCK) for start in range(0, size, BLOCK))

"""DiLoCo for parameters that are NumPy arrays: the same course as `basilica.diloco.torch`, without torch.

allreduce = ObjectStoreAllReduce("file:///shared/run", rank, world_size)
with ArrayDiLoCo(parameters, allreduce, sync_every=50) as diloco:
    while diloco.step_count < 1000:
        inner_step(parameters)
        diloco.step(samples=32)
"""

from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from basilica.diloco.allreduce import ObjectStoreAllReduce
from basilica.diloco.fragments import Checksum, Options
from basilica.diloco.outer import Array, OuterSGD
from basilica.diloco.replica import Replica


class ArrayValues:
    """Parameters that are NumPy arrays of floats, changed in place."""

    def __init__(self, arrays: Sequence[Array]) -> None:
        for array in arrays:
            if not isinstance(array, np.ndarray) or array.dtype.kind != "f":
                raise TypeError(f"parameters are NumPy arrays of floats, not {getattr(array, 'dtype', type(array))}")
        self._arrays = list(arrays)
        self.sizes = [array.nbytes for array in arrays]

    def read(self, index: int) -> Array:
        array = self._arrays[index]
        return np.array(array, np.float32 if array.dtype.itemsize < 4 else array.dtype.newbyteorder("="), order="C")

    def write(self, index: int, value: Array) -> None:
        self._arrays[index][...] = value

    def seen(self, index: int, agreed: Array) -> Array:
        own = self._arrays[index].dtype
        return agreed if agreed.dtype == own else agreed.astype(own).astype(agreed.dtype)

    def buffers(self) -> list[Array]:
        return []

    def write_buffers(self, values: Sequence[Array]) -> None:
        pass

    def frozen(self) -> list[Checksum]:
        return []


class Face:
    """The common part of DiLoCo's two interfaces, NumPy's and torch's.

    Leaving the block records how it ended. It waits until all is in the bucket, unless it fails: then it ends at once.
    """

    _replica: Replica

    @property
    def step_count(self) -> int:
        """Inner steps that the run has made, counted from its beginning: a replica that catches up jumps ahead."""
        return self._replica.step_count

    @property
    def round(self) -> int:
        """Rounds that are applied."""
        return self._replica.round

    @property
    def samples(self) -> float:
        """The run's sample cursor: what all counted replicas have seen together. The same number on all of them."""
        return self._replica.samples

    @property
    def incarnation(self) -> int:
        """How many times this rank was started before."""
        return self._replica.incarnation

    def step(self, samples: float | None = None) -> bool:
        """To be called after each inner step; True if the parameters were synchronized in it.

        `samples`: how many samples the step has seen. They are this replica's weight in the mean; without them all
        steps count the same. After an error of the round, such as `BarrierTimeout`, the call can be repeated.
        """
        return self._replica.step(samples)

    def take_agreed(self) -> None:
        """Make the parameters those that were last agreed on: the same bits on all replicas, without later steps."""
        self._replica.take_agreed()

    def close(self) -> None:
        """Wait until the last agreed state is in the bucket."""
        self._replica.close(outcome="finished")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is None:
            self.close()
            return
        self._replica.give_up(error)


class ArrayDiLoCo(Face):
    """DiLoCo around a loop that changes NumPy arrays in place. The options are those of `DiLoCo` for torch."""

    def __init__(
        self,
        parameters: Sequence[Array],
        allreduce: ObjectStoreAllReduce,
        sync_every: int,
        *,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        outer_warmup: float = 0.0,
        fragments: int = 1,
        delay: int = 0,
        mix: float = 0.0,
        checkpoint_every: int = 1,
    ) -> None:
        options = Options(
            sync_every=sync_every,
            outer=OuterSGD(outer_lr, outer_momentum, nesterov, outer_warmup),
            fragments=fragments,
            delay=delay,
            mix=mix,
            checkpoint_every=checkpoint_every,
        )
        self._replica = Replica(ArrayValues(parameters), allreduce, options)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint, beside the parameters: what was agreed on, momentum, round, step, and the all-reduce's."""
        return self._replica.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint. Where the bucket has gone further meanwhile it counts, and this changes nothing."""
        self._replica.load_state_dict(state)

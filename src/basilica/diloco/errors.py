"""The errors of a round. Each names the fact and the next step; `args` mirror the signature (picklable).

BasilicaError
└── RoundError(where, problem)               a round gave no result, and no replica got one that differs
    ├── BarrierTimeout(where, missing, waited)   also a TimeoutError: `missing` ranks did not come in time
    ├── RoundConflict(where, problem)            two replicas say different things about the same round
    ├── CorruptPart(where, key, problem)         an object is torn or its checksum does not fit
    └── RoundGone(where, problem)                the round was finished and removed long ago: catch up from a state
"""

from collections.abc import Sequence

from basilica.core.errors import BasilicaError


class RoundError(BasilicaError):
    """`where` names the run, the all-reduce and its round."""

    code = "RoundError"

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(where, problem)
        self.where, self.problem = where, problem

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}"


class BarrierTimeout(RoundError, TimeoutError):
    code = "BarrierTimeout"
    retryable = True

    def __init__(self, where: str, missing: Sequence[int], waited: float) -> None:
        Exception.__init__(self, where, tuple(missing), waited)
        self.where, self.missing, self.waited = where, tuple(missing), waited
        ranks = ", ".join(str(rank) for rank in self.missing)
        who = f"{'rank' if len(self.missing) == 1 else 'ranks'} {ranks}" if self.missing else "the others"
        self.problem = (
            f"no word from {who} within {waited:g} s; "
            "start them again with the state they had and repeat the call, or use a quorum"
        )


class RoundConflict(RoundError):
    code = "RoundConflict"


class CorruptPart(RoundError):
    code = "CorruptPart"

    def __init__(self, where: str, key: str, problem: str) -> None:
        Exception.__init__(self, where, key, problem)
        self.where, self.key = where, key
        self.problem = f"{key} {problem}; repeat the call: its owner writes it again"


class RoundGone(RoundError):
    code = "RoundGone"

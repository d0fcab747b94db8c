"""Errors of opening a state file. Once it is open, every failure is `StoreUnavailable`."""

from basilica.core.errors import BasilicaError


class StateInUse(BasilicaError):
    """Another process owns the state file. `pid` is None where it is not known."""

    def __init__(self, pid: int | None, path: str) -> None:
        super().__init__(pid, path)
        self.pid, self.path = pid, path

    def __str__(self) -> str:
        owner = "another process" if self.pid is None else f"process {self.pid}"
        return f"the state file {self.path} is in use by {owner}"


class StateFileRefused(BasilicaError):
    """The file exists and is readable, and it is not one that we may write to."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(path, problem)
        self.path, self.problem = path, problem

    def __str__(self) -> str:
        return f"{self.path} {self.problem}"

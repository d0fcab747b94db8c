"""What every `Runtime` promises, as a test class. Subclass it, say how to open yours, and run pytest:

class TestMyRuntime(RuntimeContract):
    @asynccontextmanager
    async def opened(self, directory: Path) -> AsyncIterator[Runtime]:
        yield MyRuntime(directory)

Ranks are real: they run `sh`, and write to files of this machine. A runtime that is opened a second time in a directory
succeeds the first.
"""

from basilica.testing.runtime_contract.attempts import Attempts
from basilica.testing.runtime_contract.commands import Commands
from basilica.testing.runtime_contract.directories import Directories
from basilica.testing.runtime_contract.notices import Notices
from basilica.testing.runtime_contract.outputs import Telling
from basilica.testing.runtime_contract.world import packed, reporting

__all__ = ["RuntimeContract", "packed", "reporting"]


class RuntimeContract(Attempts, Telling, Notices, Directories, Commands):
    """The stories that hold for every runtime."""

"""What every `Store` and every `Keys` promises, as test classes. Subclass one, say how to open yours, and run pytest:

class TestMyStore(StoreContract):
    @asynccontextmanager
    async def opened(self, directory: Path) -> AsyncIterator[Store]:
        yield MyStore(directory)
"""

from basilica.testing.store_contract.admission import Admitting
from basilica.testing.store_contract.changes import Changing
from basilica.testing.store_contract.damage import Damage
from basilica.testing.store_contract.keys import KeysContract
from basilica.testing.store_contract.persistence import Keeping
from basilica.testing.store_contract.stories import CREATED, a_run, ended, let_others_run, run
from basilica.testing.store_contract.wakeups import Waking

__all__ = ["CREATED", "KeysContract", "StoreContract", "a_run", "ended", "let_others_run", "run"]


class StoreContract(Keeping, Admitting, Changing, Waking, Damage):
    """The stories that hold for every store."""

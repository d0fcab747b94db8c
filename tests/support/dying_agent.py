"""torchrun, of which the agent with the seat $DIES kills itself once: when its round is final, and before it has told
the others who it is. The file $DIED is there afterwards."""

import os
import runpy
import signal
from pathlib import Path
from typing import Any

from torch.distributed.elastic.rendezvous import etcd_rendezvous

agents: Any = etcd_rendezvous.EtcdRendezvous
meet = agents.rendezvous_barrier


def meet_and_die(self: Any) -> Any:
    version, seat, world = meet(self)
    died = Path(os.environ["DIED"])
    if seat == int(os.environ["DIES"]) and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return version, seat, world


if __name__ == "__main__":
    agents.rendezvous_barrier = meet_and_die
    runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)

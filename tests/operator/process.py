"""An operator as a process of its own: `python -m tests.operator.process KUBECONFIG LEASE_SECONDS`.

As `basilica operator`, except that the rendezvous keeps its keys in its pod's own directory: in the test cluster a
pod's root is this machine's.
"""

import asyncio
import logging
import sys

from basilica.kube.manifests.run import Settings
from basilica.operator.logs import log_as_json
from basilica.wiring.kubernetes import ClusterOptions, OperatorOptions, operate

SETTINGS = Settings(
    image="basilica",
    carries=False,  # images are names here: ranks are processes of this machine
    rendezvous_command=(
        *("python", "-m", "basilica.rendezvous", "--host", "$(POD_IP)"),
        *("--port", "2379", "--data-dir", "rendezvous"),
    ),
)


def main(kubeconfig: str, lease_seconds: float) -> None:
    log_as_json(logging.INFO)
    options = ClusterOptions(kubeconfig=kubeconfig, namespace="default", run_settings=SETTINGS)
    wanted = OperatorOptions(host="127.0.0.1", port=0, lease_seconds=lease_seconds)
    asyncio.run(operate(options, wanted, lambda port: print(f"http://127.0.0.1:{port}", flush=True)))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))

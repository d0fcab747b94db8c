"""Three ways to fail, and what Basilica says about each: an exception, a signal, and too little memory.

python examples/failing_runs.py
"""

import sys

import basilica

FAILURES = {
    "exception": """
import os, time
time.sleep(0.2)
if os.environ["RANK"] == "1":
    raise ValueError("loss is NaN")
time.sleep(60)
""",
    "signal": """
import os, signal, time
time.sleep(0.2)
if os.environ["RANK"] == "0":
    os.kill(os.getpid(), signal.SIGSEGV)
time.sleep(60)
""",
    "memory": """
x = bytearray(512 << 20)
print("this machine does not limit memory", len(x))
""",
}


def main() -> None:
    client = basilica.BasilicaClient()
    for name, code in FAILURES.items():
        training = client.deploy_distributed(
            f"fails-by-{name}",
            command=[sys.executable, "-c", code],
            world_size=basilica.WorldSize(2, 2, 2),
            memory="128Mi" if name == "memory" else None,
            gpu_count=0,
            grace_seconds=1,
            delete_on_exit=True,
        )
        with training:
            try:
                training.join(timeout=60)
                print(f"{name}: it did not fail")
            except basilica.BelowMinimumWorld:
                training.refresh()
                culprit = training.culprit
                assert culprit is not None
                print(f"{name}: rank {culprit.rank}, exit code {culprit.exit_code}, {culprit.termination_reason}")
                print(f"    {culprit.evidence} (confidence: {culprit.confidence})")
                for line in culprit.log_tail[-1:]:
                    print(f"    its last line: {line}")


if __name__ == "__main__":
    main()

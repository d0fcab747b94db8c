"""`make durations`: tests/slow.txt, from what a whole run of the tests measured.

python -m tools.durations build/times.txt
"""

import sys
from pathlib import Path

from tests.support import times


def main() -> None:
    measured = times.read(Path(sys.argv[1]))
    times.write(times.longest_cases(measured.items()))
    print(f"{len(times.read())} of {len({times.test_of(name) for name in measured})} tests take {times.SLOW_SECONDS} s")


if __name__ == "__main__":
    main()

"""Our packages for a program that is executed as a file, `python -I -S FILE`: importable, without their `__init__`.

Such a program is copied for every rank, or starts for every command: what it imports costs memory and time each time.
Import this module first; it needs nothing else of ours.
"""

import os
import sys

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

for _name in ("basilica", "basilica.core", "basilica.machine", "basilica.runtimes", "basilica.runtimes.local"):
    if _name not in sys.modules:
        _package = type(sys)(_name)
        _package.__path__ = [os.path.join(_ROOT, *_name.split(".")[1:])]
        sys.modules[_name] = _package

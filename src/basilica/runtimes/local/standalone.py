"""Makes our packages importable, without their `__init__`, for a program executed as a file, `python -I -S FILE`.

Such a program is copied for every rank, or starts for every command: each import costs memory and time every time.
Import this module first; it needs no other module of ours.
"""

import os
import sys

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

for _name in ("basilica", "basilica.core", "basilica.machine", "basilica.runtimes", "basilica.runtimes.local"):
    if _name not in sys.modules:
        _package = type(sys)(_name)
        _package.__path__ = [os.path.join(_ROOT, *_name.split(".")[1:])]
        sys.modules[_name] = _package

"""`python -m basilica.entrypoint`, the documented command of images: see `basilica.rank.entrypoint`."""

import sys

from basilica.rank.entrypoint import main

if __name__ == "__main__":
    sys.exit(main())

"""``python -m irminsul_traffic``: the same as ``irminsul-traffic``."""

import sys

from irminsul_traffic.cli import main

if __name__ == "__main__":
    sys.exit(main())

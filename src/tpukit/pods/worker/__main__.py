"""`python -m tpukit.pods.worker [MODULE …]`: an agent; with modules, one with a warm spare."""

import sys

from .agent import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

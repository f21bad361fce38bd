"""Run a decode worker in the foreground, as ``twopool decode`` does; ``--help`` lists the flags."""

import sys

from twopool.scripts.cli import main

if __name__ == "__main__":
    sys.exit(main(["decode", *sys.argv[1:]]))

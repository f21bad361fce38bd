"""Run a prefill worker in the foreground, as ``twopool prefill`` does; ``--help`` lists the flags."""

import sys

from twopool.scripts.cli import main

if __name__ == "__main__":
    sys.exit(main(["prefill", *sys.argv[1:]]))

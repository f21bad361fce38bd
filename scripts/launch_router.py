"""Run the router in the foreground, as ``twopool router`` does; ``--help`` lists the flags."""

import sys

from twopool.scripts.cli import main

if __name__ == "__main__":
    sys.exit(main(["router", *sys.argv[1:]]))

"""A rank's process of which rank 1 cannot load: ``failing_rank.py ModelError|ConfigError --parent=... FDS``."""

import sys
from typing import Any
from unittest import mock

from twopool.engine import rank_process
from twopool.protocol.errors import ConfigError, ModelError

_ERRORS = {kind.__name__: kind for kind in (ModelError, ConfigError)}


def main() -> None:
    error = _ERRORS[sys.argv.pop(1)]
    load = rank_process._load

    def fail_on_rank_1(setup: Any, *others: Any) -> Any:
        if setup.rank == 1:
            raise error("tensor model.norm.weight cannot be read")
        return load(setup, *others)

    with mock.patch.object(rank_process, "_load", fail_on_rank_1):
        rank_process.main()


if __name__ == "__main__":
    main()

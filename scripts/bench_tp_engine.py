"""The whole engine of a worker for `bench_tp`, its other ranks with it: times what it is told to, a line at a time.

Unlike `bench_tp_rank` this counts all a step is: the plan told to the ranks, the forward passes, the tokens drawn.
"""

import argparse
import json
import sys
from pathlib import Path

from twopool.protocol.config import DTYPES
from twopool.scripts.bench_engine import Case, EngineBench


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    engine = EngineBench(args.folder, args.dtype, num_threads=args.threads, tensor_parallel_size=args.size)
    try:
        print(json.dumps({"ready": True}), flush=True)
        for seed, line in enumerate(sys.stdin):
            command = json.loads(line)
            measured = engine.measure(Case(command["phase"], command["size"], command["count"]), seed)
            print(json.dumps({"ms": [1e3 * measured.seconds / measured.num_steps]}), flush=True)
    finally:
        engine.close()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--dtype", choices=DTYPES[1:], required=True)
    parser.add_argument("--size", type=int, required=True, help="ranks")
    parser.add_argument("--threads", type=int, required=True, help="of each rank")
    return parser


if __name__ == "__main__":
    sys.exit(main())

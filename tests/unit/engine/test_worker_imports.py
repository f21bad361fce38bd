"""A worker starts in seconds because it does not import what only others need."""

import json
import subprocess
import sys

HEAVY = {"transformers", "tokenizers", "triton", "gguf", "accelerate", "starlette", "uvicorn", "huggingface_hub"}

PROGRAM = """
import json, sys
import twopool.scripts.cli, twopool.decode.process, twopool.prefill.process
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def test_a_worker_imports_nothing_heavy_but_torch() -> None:
    output = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=120
    )
    imported = set(json.loads(output.stdout))
    assert {"torch", "twopool"} <= imported
    assert not imported & HEAVY

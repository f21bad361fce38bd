"""Who is served by Triton, and that it costs the others nothing."""

import subprocess
import sys

import torch

from twopool.kernels.backend import uses_triton

SCRIPT = """
import sys
import torch
from twopool.models.config import DecoderConfig
from twopool.models.random_decoder import random_decoder
config = DecoderConfig.from_dict({"architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 20, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5})
random_decoder(config, dtype=torch.float32, device=torch.device("cpu"))
sys.exit("triton" in sys.modules)
"""


def test_cpu_tensors_are_not() -> None:
    assert not uses_triton(torch.zeros(1))


def test_a_cpu_decoder_does_not_import_triton() -> None:
    run = subprocess.run([sys.executable, "-P", "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr

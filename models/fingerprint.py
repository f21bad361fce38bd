"""A model's fingerprint, told from its files without loading it."""

import hashlib
from pathlib import Path

from twopool.models.config import DecoderConfig
from twopool.models.layers import expected_tensors, unused_tensors
from twopool.models.weights import WeightFiles


def model_fingerprint(folder: Path) -> str:
    """What a decoder loaded from ``folder`` has for its ``fingerprint()``. Raises ``ModelError``."""
    config = DecoderConfig.from_folder(folder)
    files = WeightFiles(folder)
    expected = expected_tensors(config)
    files.check(expected, unused_tensors(config))
    return combined_fingerprint(config, files.fingerprint(list(expected)))


def combined_fingerprint(config: DecoderConfig, weights_fingerprint: str) -> str:
    """sha256 of what the numbers mean."""
    return hashlib.sha256(f"{config.fingerprint()} {weights_fingerprint}".encode()).hexdigest()

"""The decode worker process."""

from pathlib import Path

from twopool.decode.role import DecodeRole
from twopool.engine.worker import run_worker
from twopool.protocol.config import DecodeConfig


def run_decode(config: DecodeConfig, model_folder: Path) -> int:
    """Serve in the foreground until SIGTERM or SIGINT; returns the exit status."""
    return run_worker(config, "decode", model_folder, DecodeRole)

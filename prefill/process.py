"""The prefill worker process."""

from pathlib import Path

from twopool.engine.worker import run_worker
from twopool.prefill.role import PrefillRole
from twopool.protocol.config import PrefillConfig


def run_prefill(config: PrefillConfig, model_folder: Path) -> int:
    """Serve in the foreground until SIGTERM or SIGINT; returns the exit status."""
    return run_worker(config, "prefill", model_folder, PrefillRole)

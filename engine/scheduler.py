"""Which sequences advance in the next step."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Bounds of a step and of a request. ``vocab_size``: ids from 0 up to it are valid in prompts."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting: int
    max_model_len: int
    vocab_size: int

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_waiting", "max_model_len", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")

"""The prefill worker: turns prompts into KV cache that decode workers read."""

"""The decode worker: turns KV cache into tokens."""

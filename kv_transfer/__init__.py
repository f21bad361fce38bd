"""Moving KV blocks between workers with one primitive: a READ by the worker that wants them."""

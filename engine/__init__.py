"""What prefill and decode workers share: block pool, scheduler, model runner, sampler."""

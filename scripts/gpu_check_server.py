"""The whole server on the device: `twopool up` with a random model, asked over HTTP as clients ask."""

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from twopool.models.layers import expected_tensors
from twopool.scripts.deployment import Deployment, deployment
from twopool.scripts.gpu_check_model import ModelSizes
from twopool.scripts.gpu_check_report import Result

_READY_TIMEOUT_S = 150.0
_REQUEST_TIMEOUT_S = 45.0
_PREFILL_ROUNDS = 3
_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class ServerSizes:
    """What is asked of the server of a model of these sizes."""

    model: ModelSizes = field(default_factory=ModelSizes)
    decode_tokens: int = 384
    """of each stream: enough that the first still runs when the last has begun"""
    flags: tuple[str, ...] = ("--max-num-batched-tokens=2048", f"--kv-cache-memory={6 * 1024**3}")
    """of `twopool up`"""


@dataclass
class _Stream:
    """When a request was sent and when each of its tokens came."""

    sent_s: float
    token_s: list[float] = field(default_factory=list)


def server_speed(device: torch.device, sizes: ServerSizes) -> Iterator[Result]:
    """One prefill and one decode worker, both on ``device``: prefill by the time to the first token, and decode."""
    model = sizes.model
    with tempfile.TemporaryDirectory(prefix="twopool-check-") as name:
        folder = Path(name) / "random"
        write_random_model(folder, model, device)
        flags = (f"--device={device}", f"--max-num-seqs={max(model.decode_batches)}", *sizes.flags)
        with deployment(str(folder), flags, log=Path(name) / "log") as server:
            server.wait_ready(_READY_TIMEOUT_S)
            asyncio.run(_ask(server, [model.prefill_lengths[0]], _WARM_UP_TOKENS, model, seed=0))
            for length in model.prefill_lengths:
                yield _prefill(server, length, model)
            for size in model.decode_batches:
                yield _decode(server, size, sizes)


def write_random_model(folder: Path, sizes: ModelSizes, device: torch.device) -> None:
    """A Hugging Face folder of a Llama with random weights, whose tokenizer has one word a token."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(sizes.hf_config() | {"dtype": "bfloat16"}), encoding="utf-8")
    words = {f"t{number}": number for number in range(sizes.vocab_size)}
    Tokenizer(models.WordLevel(words, unk_token="t0")).save(str(folder / "tokenizer.json"))
    generator = torch.Generator(device).manual_seed(0)
    tensors = {
        name: torch.ones(shape, dtype=torch.bfloat16)
        if len(shape) == 1
        else (torch.randn(shape, generator=generator, device=device) * shape[-1] ** -0.5).to("cpu", torch.bfloat16)
        for name, shape in expected_tensors(sizes.config()).items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _prefill(server: Deployment, length: int, model: ModelSizes) -> Result:
    times = []
    for seed in range(1, 1 + _PREFILL_ROUNDS):
        (stream,) = asyncio.run(_ask(server, [length], 1, model, seed=seed))
        times.append(stream.token_s[0] - stream.sent_s)
    first_s = statistics.median(times)
    note = f"first token after {1e3 * first_s:.1f} ms"
    return Result("server", f"prefill of {length}", passed=True, value=length / first_s, unit="tok/s", note=note)


def _decode(server: Deployment, size: int, sizes: ServerSizes) -> Result:
    """From the first token of the last stream to the end of the first."""
    model, wanted = sizes.model, sizes.decode_tokens
    streams = asyncio.run(_ask(server, [model.decode_context] * size, wanted, model, seed=100 + size))
    start_s = max(stream.token_s[0] for stream in streams)
    end_s = min(stream.token_s[-1] for stream in streams)
    num_tokens = sum(start_s < one <= end_s for stream in streams for one in stream.token_s)
    all_run = end_s > start_s
    return Result(
        "server",
        f"decode of {size}",
        passed=all(len(stream.token_s) == wanted for stream in streams),
        value=num_tokens / (end_s - start_s) if all_run else None,
        unit="tok/s",
        note="" if all_run else "not measured: the first stream had ended before the last began",
    )


async def _ask(
    server: Deployment, prompt_lens: list[int], num_tokens: int, model: ModelSizes, *, seed: int
) -> list[_Stream]:
    """One stream for each prompt length, all at once; the prompts are random and share nothing."""
    draw = np.random.default_rng(seed)
    prompts = [draw.integers(0, model.vocab_size, length).tolist() for length in prompt_lens]
    async with asyncio.timeout(_REQUEST_TIMEOUT_S), asyncio.TaskGroup() as group:
        tasks = [group.create_task(_stream(server.port, prompt, num_tokens)) for prompt in prompts]
    return [task.result() for task in tasks]


async def _stream(port: int, prompt: list[int], num_tokens: int) -> _Stream:
    fields = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    body = json.dumps(fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: check\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        stream = _Stream(time.perf_counter())
        writer.write(head.encode() + body)
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(f"the server answered {status.decode(errors='replace').strip()}")
        while line := await reader.readline():
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                raise RuntimeError(f"the stream ended with {event['error']}")
            now_s = time.perf_counter()  # tokens are words; a slow reader gets several in one event
            words = sum(len(choice["text"].split()) for choice in event["choices"])
            stream.token_s += [now_s] * words
    finally:
        writer.close()
    if not stream.token_s:
        raise RuntimeError("the stream ended without a token")
    return stream

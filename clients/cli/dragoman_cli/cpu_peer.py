"""Decode and prefill speed beside llama.cpp (through xllamacpp): same file, prompt and threads, alternated in one run."""

from __future__ import annotations

import json
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dragoman.step_model import StepModel
from dragoman_agent.device.base import Int32Array, SamplingBatch, StepBatch
from dragoman_agent.device.cpu_native import llama_shape, read_weights
from dragoman_agent.device.cpu_road import KV_DTYPES, TORCH_INT4, TORCH_ROADS
from dragoman_agent.model.errors import ModelFileError
from dragoman_agent.model.source import open_model
from dragoman_agent.pal.plan import Plan
from dragoman_kernels.cpu.build import KernelBuildError
from dragoman_kernels.cpu.llama import Activation, LlamaStep

PAGE_SIZE = 64
PROMPT_TOKENS = 40
DECODE_TOKENS = 64
BATCH = 8
PREFILL_TOKENS = 512
PREFILL_CHUNK = 512
REST_SECONDS = 0.1  # lets the other engine's threads stop spinning

Run = Callable[[], float]


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One case: tokens a second of both engines by round, and the ratio by round."""

    case: str
    ours: tuple[float, ...]
    peer: tuple[float, ...]
    ratios: tuple[float, ...]


def alternate(case: str, ours: Run, peer: Run, rounds: int) -> CaseResult:
    """Peer, ours, peer, ours, ..., peer: each round's ratio is to the mean of the peer runs on both sides of it."""
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}; at least 1 is needed")
    ours(), peer()
    peers, own = [peer()], []
    for _ in range(rounds):
        own.append(ours())
        peers.append(peer())
    ratios = [speed / ((before + after) / 2) for speed, before, after in zip(own, peers, peers[1:], strict=False)]
    return CaseResult(case, tuple(own), tuple(peers), tuple(ratios))


class OurEngine(ABC):
    """A road with the bookkeeping a scheduler would do: pages handed out in order, greedy choice of the next token."""

    blocks_each = -(-(PREFILL_TOKENS + DECODE_TOKENS) // PAGE_SIZE)
    tables = 1 + np.arange(BATCH * blocks_each, dtype=np.int32).reshape(BATCH, -1)
    vocab_size: int
    instruction_set: str  # what it computes with, for the record

    def forward(self, tokens: Sequence[Sequence[int]], start: int) -> npt.NDArray[np.intp]:
        """Append equally many tokens to the first len(tokens) sequences; the greedy next token of each."""
        num_seqs, count = len(tokens), len(tokens[0])
        positions = np.arange(start, start + count, dtype=np.int32)
        slots = self.tables[:num_seqs, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        ids = np.array(tokens, dtype=np.int32).ravel()
        starts = np.arange(0, (num_seqs + 1) * count, count, dtype=np.int32)
        logits = self.run(ids, np.tile(positions, num_seqs), slots.ravel().astype(np.int32), starts, start + count)
        chosen: npt.NDArray[np.intp] = logits.argmax(axis=-1)
        return chosen

    @abstractmethod
    def run(
        self, ids: Int32Array, positions: Int32Array, slots: Int32Array, starts: Int32Array, context: int
    ) -> npt.NDArray[np.float32]:
        """Logits [num_seqs, vocab_size] of one step; every context is `context` tokens long then."""

    def decode(self, prompts: Sequence[Sequence[int]]) -> float:
        """Tokens a second of DECODE_TOKENS steps after the prompts."""
        time.sleep(REST_SECONDS)
        next_tokens = self.forward(prompts, 0)
        began = time.perf_counter()
        for i in range(DECODE_TOKENS):
            next_tokens = self.forward(next_tokens[:, None].tolist(), len(prompts[0]) + i)
        return len(prompts) * DECODE_TOKENS / (time.perf_counter() - began)

    def prefill(self, prompt: Sequence[int]) -> float:
        """Tokens a second of one prompt, up to its first token."""
        time.sleep(REST_SECONDS)
        began = time.perf_counter()
        for start in range(0, len(prompt), PREFILL_CHUNK):
            self.forward([prompt[start : start + PREFILL_CHUNK]], start)
        return len(prompt) / (time.perf_counter() - began)


class NativeEngine(OurEngine):
    """The compiled kernels."""

    def __init__(self, model: Path, num_threads: int, activation: Activation, march: str, cache_dir: Path) -> None:
        """Raises ModelFileError, KernelBuildError, ValueError or MemoryError."""
        source = open_model(str(model), cache_dir)
        source.check()
        shape = llama_shape(source.config, PREFILL_TOKENS + DECODE_TOKENS)
        self.vocab_size = shape.vocab_size
        self.step = LlamaStep(
            shape,
            read_weights(source, lambda _: None),
            num_blocks=1 + BATCH * self.blocks_each,
            page_size=PAGE_SIZE,
            num_threads=num_threads,
            activation=activation,
            max_batch_tokens=max(PREFILL_CHUNK, BATCH * PROMPT_TOKENS),
            max_num_seqs=BATCH,
            march=march,
            cache_dir=cache_dir,
        )
        self.instruction_set = self.step.instruction_set

    def run(
        self, ids: Int32Array, positions: Int32Array, slots: Int32Array, starts: Int32Array, context: int
    ) -> npt.NDArray[np.float32]:
        """See OurEngine."""
        num_seqs = len(starts) - 1
        contexts, rows = np.full(num_seqs, context, dtype=np.int32), np.arange(num_seqs, dtype=np.int32)
        none = np.empty(0, dtype=np.int32)
        logits, _ = self.step.run(ids, positions, slots, starts, contexts, self.tables[:num_seqs], rows, none)
        return logits


class TorchEngine(OurEngine):
    """A road of torch, as a machine without a compiler takes it."""

    def __init__(self, model: Path, num_threads: int, road: str, cache_dir: Path) -> None:
        """Raises ModelFileError, ValueError, MemoryError or RuntimeError."""
        import torch

        from dragoman_agent.device.cpu_torch import TorchRoad
        from dragoman_agent.device.cpu_torch_int4 import Int4Road

        source = open_model(str(model), cache_dir)
        source.check()
        self.vocab_size = source.config.vocab_size
        self.instruction_set = f"{road}, torch {torch.__version__}"
        plan = Plan(
            device_kind="cpu",
            model_name=source.name,
            page_size=PAGE_SIZE,
            num_blocks=1 + BATCH * self.blocks_each,
            max_context_tokens=PREFILL_TOKENS + DECODE_TOKENS,
            max_batch_tokens=max(PREFILL_CHUNK, BATCH * PROMPT_TOKENS),
            max_num_seqs=BATCH,
            max_num_waiting=0,
            num_threads=num_threads,
            road=road,
            kv_dtype=KV_DTYPES[road],
            memory=(),
            step_model=StepModel((1,), (0,), (0.01,), 300.0, 0.01),
        )
        self._road = (Int4Road if road == TORCH_INT4 else TorchRoad)(source, plan, lambda _: None)

    def run(
        self, ids: Int32Array, positions: Int32Array, slots: Int32Array, starts: Int32Array, context: int
    ) -> npt.NDArray[np.float32]:
        """See OurEngine."""
        num_seqs = len(starts) - 1
        contexts, rows = np.full(num_seqs, context, dtype=np.int32), np.arange(num_seqs, dtype=np.int32)
        zeros, ones = np.zeros(num_seqs, np.float32), np.ones(num_seqs, np.float32)
        no = np.zeros(num_seqs, np.int32)
        sampling = SamplingBatch(zeros, no, ones, zeros, np.zeros(num_seqs, np.uint64), no, no, no - 1)
        batch = StepBatch(
            1, ids, positions, slots, starts, contexts, self.tables[:num_seqs], contexts, rows, rows[:0], sampling
        )
        return self._road.run(batch)[0]


class LlamaCpp:
    """llama.cpp's server loop in this process; speeds are the timings it reports itself."""

    def __init__(self, model: Path, num_threads: int) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(model)
        params.n_ctx = BATCH * (PREFILL_TOKENS + DECODE_TOKENS)
        params.n_parallel = BATCH
        params.n_batch = params.n_ubatch = PREFILL_CHUNK
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = num_threads
        params.warmup = True
        params.verbosity = -1  # its log would drown the table
        self.server: Any = xllamacpp.Server(params)
        self.version = str(xllamacpp.__version__)
        self.system = " ".join(str(xllamacpp.get_system_info()).split())

    def _timings(self, prompt: Sequence[int], num_tokens: int) -> dict[str, float]:
        reply = self.server.handle_completions(
            {
                "prompt": list(prompt),
                "n_predict": num_tokens,
                "temperature": 0,
                "samplers": ["top_k"],
                "top_k": 1,
                "ignore_eos": True,
                "cache_prompt": False,
            }
        )
        timings: dict[str, float] = reply["timings"]
        if timings["prompt_n"] != len(prompt) or timings["predicted_n"] != num_tokens:
            raise RuntimeError(
                f"llama.cpp ran {timings['prompt_n']} + {timings['predicted_n']} tokens, not {len(prompt)} + {num_tokens}"
            )
        return timings

    def decode(self, prompts: Sequence[Sequence[int]]) -> float:
        """Tokens a second over the prompts together: its own rate a sequence (the median) times their number."""
        time.sleep(REST_SECONDS)
        with ThreadPoolExecutor(len(prompts)) as pool:
            rates = [t["predicted_per_second"] for t in pool.map(lambda p: self._timings(p, DECODE_TOKENS), prompts)]
        return len(prompts) * statistics.median(rates)

    def prefill(self, prompt: Sequence[int]) -> float:
        """Tokens a second of one prompt."""
        time.sleep(REST_SECONDS)
        return self._timings(prompt, 1)["prompt_per_second"]


def measure(ours: OurEngine, peer: LlamaCpp, rounds: int) -> Iterator[CaseResult]:
    """The three cases of `cpu_peer`, each when it is done."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(100, ours.vocab_size, (BATCH, PROMPT_TOKENS)).tolist()
    long = rng.integers(100, ours.vocab_size, PREFILL_TOKENS).tolist()
    yield alternate("decode-b1", lambda: ours.decode(prompts[:1]), lambda: peer.decode(prompts[:1]), rounds)
    yield alternate("decode-b8", lambda: ours.decode(prompts), lambda: peer.decode(prompts), rounds)
    yield alternate("prefill", lambda: ours.prefill(long), lambda: peer.prefill(long), rounds)


def main(arguments: Sequence[str]) -> int:
    """Measures in this process, which the command bounds in time; prints one JSON object a line.

    Arguments: the model file, threads, activation or road of torch, instruction set, rounds, cache folder.
    """
    model, threads, activation, march, rounds, cache_dir = arguments
    chosen: Activation = "int8" if activation == "int8" else "float32"
    try:
        ours: OurEngine
        if activation in TORCH_ROADS:
            ours = TorchEngine(Path(model), int(threads), activation, Path(cache_dir))
        else:
            ours = NativeEngine(Path(model), int(threads), chosen, march, Path(cache_dir))
        peer = LlamaCpp(Path(model), int(threads))
        about = {"instruction_set": ours.instruction_set, "peer": peer.version, "system": peer.system}
        print(json.dumps(about), flush=True)
        for result in measure(ours, peer, int(rounds)):
            print(json.dumps(asdict(result)), flush=True)
    except (ModelFileError, KernelBuildError, ValueError, MemoryError, RuntimeError) as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""Random and embedded models for the CPU step, and a driver that keeps its pages."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tests.kernels.cpu.gguf_weights import read_gguf
from tests.needs import skip_without

from dragoman_kernels.cpu.build import available
from dragoman_kernels.cpu.llama import LlamaShape, LlamaStep
from dragoman_kernels.tensor import QuantTensor

GGUF_TYPES = {name: getattr(gguf.GGMLQuantizationType, name) for name in ("F32", "F16", "Q8_0", "Q4_1", "Q4_0")}


def quantize(values: np.ndarray, dtype: str) -> tuple[QuantTensor, np.ndarray]:
    """The tensor in GGUF layout and what it stands for, both by the gguf library."""
    data = gguf.quants.quantize(values.astype(np.float32), GGUF_TYPES[dtype])
    plain = gguf.quants.dequantize(data, GGUF_TYPES[dtype])
    packed = np.ascontiguousarray(data).view(np.uint8).reshape(values.shape[0], -1)
    return QuantTensor(dtype, (int(values.shape[0]), int(values.shape[1])), packed), plain


class Model:
    """A model's shape, its weights for the step, and the same weights as plain arrays."""

    def __init__(self, shape: LlamaShape, weights: dict[str, Any], plain: dict[str, np.ndarray]) -> None:
        self.shape = shape
        self.weights = weights
        self.plain = plain


class Driver:
    """Runs sequences through a LlamaStep: owns block tables and lengths, builds the step's arrays."""

    def __init__(self, step: LlamaStep) -> None:
        self.step = step
        self.free = list(range(step.num_blocks - 1, 0, -1))
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}

    def batch(self, work: Sequence[tuple[int, Sequence[int]]]) -> dict[str, np.ndarray]:
        """The arrays of a step that appends `tokens` to each sequence id of `work`."""
        page, names = self.step.page_size, [seq for seq, _ in work]
        tokens, positions, slots, starts, lengths = [], [], [], [0], []
        for seq, new in work:
            table, start = self.tables.setdefault(seq, []), self.lengths.get(seq, 0)
            self.lengths[seq] = start + len(new)
            while len(table) * page < start + len(new):
                table.append(self.free.pop())
            tokens += list(new)
            positions += range(start, start + len(new))
            slots += [table[p // page] * page + p % page for p in range(start, start + len(new))]
            starts.append(len(tokens))
            lengths.append(start + len(new))
        width = max(len(self.tables[seq]) for seq in names)
        tables = [self.tables[seq] + [0] * (width - len(self.tables[seq])) for seq in names]
        every = list(range(len(work)))
        arrays = {
            "token_ids": tokens,
            "positions": positions,
            "slot_mapping": slots,
            "query_starts": starts,
            "context_lens": lengths,
            "block_tables": tables,
            "logit_seqs": every,
            "hidden_seqs": every,
        }
        return {name: np.array(value, dtype=np.int32) for name, value in arrays.items()}

    def run(self, work: Sequence[tuple[int, Sequence[int]]]) -> tuple[np.ndarray, np.ndarray]:
        """Logits and hidden of each sequence's last token."""
        return self.step.run(**self.batch(work))

    def release(self, seq: int) -> None:
        """Give a sequence's blocks back, contents left as they are."""
        self.free += self.tables.pop(seq, [])
        self.lengths.pop(seq, None)

    def teacher_forced(self, seq: int, tokens: Sequence[int], prefill: int = 1) -> np.ndarray:
        """Logits after token prefill-1, prefill, ... [len(tokens) - prefill + 1, vocab]."""
        rows = [self.run([(seq, tokens[:prefill])])[0][0]]
        rows += [self.run([(seq, [token])])[0][0] for token in tokens[prefill:]]
        return np.stack(rows)


@pytest.fixture(scope="session", autouse=True)
def compiler() -> None:
    """The CPU kernels need a C++ compiler."""
    reason = available()
    if reason is not None:
        skip_without("g++", f"cpu kernels: {reason}")


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where this session's builds go."""
    return tmp_path_factory.mktemp("kernel-cache")


@pytest.fixture(scope="session")
def random_model() -> Callable[..., Model]:
    """Makes a small random model; sizes and dtypes by keyword."""

    def make(
        *,
        num_layers: int = 2,
        hidden_size: int = 64,
        intermediate_size: int = 96,
        num_heads: int = 3,
        num_kv_heads: int = 1,
        head_dim: int = 64,
        vocab_size: int = 101,
        dtype: str = "F32",
        embedding: str = "F32",
        bias: bool = False,
        qk_norm: bool = False,
        tied: bool = True,
        rope_attention_factor: float = 1.0,
        seed: int = 0,
    ) -> Model:
        rng = np.random.default_rng(seed)
        shape = LlamaShape(
            num_layers=num_layers,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            vocab_size=vocab_size,
            max_context_tokens=1024,
            rms_norm_eps=1e-5,
            inverse_frequencies=LlamaShape.default_frequencies(10000.0, head_dim),
            rope_attention_factor=rope_attention_factor,
        )
        weights: dict[str, Any] = {}
        plain: dict[str, np.ndarray] = {}

        def matrix(name: str, rows: int, cols: int, kind: str) -> None:
            weights[name], plain[name] = quantize(rng.normal(0, 1.3 / np.sqrt(cols), (rows, cols)), kind)

        def vector(name: str, size: int, mean: float) -> None:
            weights[name] = plain[name] = (mean + rng.normal(0, 0.2, size)).astype(np.float32)

        matrix("embed_tokens", vocab_size, hidden_size, embedding)
        if not tied:
            matrix("lm_head", vocab_size, hidden_size, embedding)
        vector("norm", hidden_size, 1.0)
        for layer in range(num_layers):
            for name, (rows, cols) in shape.matrix_shapes().items():
                matrix(f"layers.{layer}.{name}", rows, cols, dtype)
                if bias:
                    vector(f"layers.{layer}.{name}.bias", rows, 0.0)
            for name in ("input_norm", "post_attention_norm"):
                vector(f"layers.{layer}.{name}", hidden_size, 1.0)
            for name in ("q_norm", "k_norm") if qk_norm else ():
                vector(f"layers.{layer}.{name}", head_dim, 1.0)
        return Model(shape, weights, plain)

    return make


@pytest.fixture
def load(cache_dir: Path) -> Iterable[Callable[..., Driver]]:
    """Loads a model into a LlamaStep and wraps it in a Driver; everything is closed after the test."""
    steps: list[LlamaStep] = []

    def make(model: Model, **options: Any) -> Driver:
        settings: dict[str, Any] = {
            "num_blocks": 64,
            "page_size": 16,
            "num_threads": 2,
            "activation": "float32",
            "max_batch_tokens": 256,
            "max_num_seqs": 16,
            "cache_dir": cache_dir,
        }
        steps.append(LlamaStep(model.shape, model.weights, **(settings | options)))
        return Driver(steps[-1])

    yield make
    for step in steps:
        step.close()


@pytest.fixture(scope="session")
def embedded_model() -> Model:
    """SmolLM2-135M-Instruct Q4_1 from the model cache, read by the gguf library."""
    root = Path(os.environ.get("DRAGOMAN_CACHE_DIR") or Path.home() / ".cache" / "dragoman")
    path = root / "models" / "embedded" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not path.is_file():
        skip_without("model", "embedded model: not in the model cache; run `dragoman models fetch embedded`")
    shape, weights = read_gguf(path)
    plain = {
        name: gguf.quants.dequantize(value.data, GGUF_TYPES[value.dtype]).reshape(value.shape)
        if isinstance(value, QuantTensor)
        else value
        for name, value in weights.items()
    }
    return Model(shape, dict(weights), plain)

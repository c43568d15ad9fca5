"""The kernels of a step as calls with a shape: their names in Timings and their predicted seconds. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from dragoman_agent.pal.attention_cost import AttentionShape, decode_seconds, prefill_seconds
from dragoman_agent.pal.gemm_cost import fixed_gemm_seconds, gemm_seconds
from dragoman_agent.pal.plan import DecodeAttention, PrefillAttention
from dragoman_agent.pal.rates import Rates
from dragoman_kernels.contract import KernelContract
from dragoman_kernels.triton.contracts import TRITON_CONTRACTS
from dragoman_kernels.triton.launches import DecodeLaunch, FixedGemmLaunch, GemmLaunch, PrefillLaunch

KernelKind = Literal[
    "decode-attention",
    "prefill-attention",
    "prefill-batch",
    "prefill-library",
    "gemm",
    "gemm-fixed",
    "gemm-library",
    "rms-norm",
    "add-rms-norm",
    "silu-mul",
    "rope-cache",
    "sample",
]


@dataclass(frozen=True, slots=True)
class LibraryAlgorithm:
    """One of the algorithms that the library names for a product's sizes."""

    rank: int  # in its answer, from 0


Config = DecodeAttention | PrefillAttention | GemmLaunch | FixedGemmLaunch | LibraryAlgorithm | None

_LIBRARY_ATTENTION_SHARE = 0.7  # of the matrix rate: cuDNN at 8,192 tokens on an H200; what is timed corrects it
# What varies within a family of calls; the rest of a shape names the family.
_VARYING = {
    "decode-attention": ("batch", "context"),
    "prefill-attention": ("tokens", "context"),
    "prefill-batch": ("prompts", "tokens"),
    "prefill-library": ("tokens", "context"),
    "gemm": ("m", ""),
    "gemm-fixed": ("m", ""),
    "gemm-library": ("m", ""),
    "sample": ("rows", ""),
}
_ROWS_OF = ("tokens", "")
_SHORT = {
    "num_heads": "h", "num_kv_heads": "k", "head_dim": "d", "page_size": "p", "batch": "b", "context": "c", "tokens": "t",
    "prompts": "q",
    "m": "m", "n": "n", "k": "k", "width": "w", "rows": "r", "vocab_size": "v", "num_splits": "s", "block_m": "m",
    "block_n": "n", "block_k": "k", "num_warps": "w", "num_stages": "g",
    "rank": "a",
}  # fmt: skip
_TMA = "-tma"  # ends the configuration of prefill attention that loads by tensor descriptors
_ATTENTION = ("num_heads", "num_kv_heads", "head_dim", "page_size")
# Parts of a key in their order; names in one tuple share a part. The configuration is the last part, where there is one.
_PARTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "decode-attention": (_ATTENTION, ("batch",), ("context",)),
    "prefill-attention": (_ATTENTION, ("tokens",), ("context",)),
    "prefill-batch": (_ATTENTION, ("prompts",), ("tokens",)),
    "prefill-library": (_ATTENTION, ("tokens",), ("context",)),
    "gemm": (("m",), ("n",), ("k",)),
    "gemm-fixed": (("m",), ("n",), ("k",)),
    "gemm-library": (("m",), ("n",), ("k",)),
    "rms-norm": (("tokens",), ("width",)),
    "add-rms-norm": (("tokens",), ("width",)),
    "silu-mul": (("tokens",), ("width",)),
    "rope-cache": (_ATTENTION[:3], ("tokens",)),
    "sample": (("rows",), ("vocab_size",)),
}
_CONFIGS: dict[str, tuple[str, ...]] = {
    "decode-attention": ("num_splits", "block_n", "num_warps", "num_stages"),
    "prefill-attention": ("block_m", "block_n", "num_warps", "num_stages"),
    "prefill-batch": ("block_m", "block_n", "num_warps", "num_stages"),
    "gemm": ("block_n", "block_k", "num_stages", "num_warps"),
    "gemm-fixed": ("block_m", "block_n", "block_k", "num_stages", "num_warps"),
    "gemm-library": ("rank",),
}


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One call. `shape` has the names of `_PARTS` but those of the configuration; see `candidates.TuningCase`."""

    kind: KernelKind
    shape: Mapping[str, int]
    config: Config = None

    @property
    def key(self) -> str:
        """Its name in Timings, such as "gemm/m8/n4096/k1024": equal names are equal work."""
        return self._name(())

    @property
    def family(self) -> str:
        """Its name without what varies: calls of a family differ in rows and context only."""
        return self._name(_VARYING.get(self.kind, _ROWS_OF))

    @property
    def point(self) -> tuple[int, int]:
        """(rows, context) inside the family; context 0 where the kind has none."""
        rows, context = _VARYING.get(self.kind, _ROWS_OF)
        return self.shape[rows], self.shape[context] if context else 0

    def _name(self, without: tuple[str, ...]) -> str:
        parts = [
            "-".join(f"{_SHORT[name]}{self.shape[name]}" for name in group if name not in without)
            for group in _PARTS[self.kind]
        ]
        if self.config is not None:
            launch = "-".join(f"{_SHORT[name]}{getattr(self.config, name)}" for name in _CONFIGS[self.kind])
            parts.append(launch + (_TMA if getattr(self.config, "tma", False) else ""))
        return "/".join([self.kind, *(part for part in parts if part)])


def parse_key(key: str) -> KernelCall | None:
    """The call that has this key; None where no call of this version has it."""
    tma = key.startswith(("prefill-attention/", "prefill-batch/")) and key.endswith(_TMA)
    kind, *parts = key.removesuffix(_TMA if tma else "").split("/")
    groups = _PARTS.get(kind, ())
    shape = _read(groups, parts[: len(groups)])
    if not groups or shape is None:
        return None
    if len(parts) == len(groups):
        return None if kind.endswith(("attention", "batch", "fixed")) else KernelCall(kind, shape)  # type: ignore[arg-type]  # a key of _PARTS
    launch = _read((_CONFIGS.get(kind, ()),), parts[len(groups) :])
    if not launch:
        return None
    config: Config
    if kind == "decode-attention":
        config = DecodeAttention(max_batch=shape["batch"], **launch)
    elif kind in ("prefill-attention", "prefill-batch"):
        config = PrefillAttention("paged", **launch, tma=tma)
    elif kind == "gemm-fixed":
        config = FixedGemmLaunch(**launch)
    elif kind == "gemm-library":
        config = LibraryAlgorithm(**launch)
    else:
        config = GemmLaunch(**launch)
    return KernelCall(kind, shape, config)  # type: ignore[arg-type]  # a key of _PARTS


def _read(groups: tuple[tuple[str, ...], ...], parts: list[str]) -> dict[str, int] | None:
    if len(groups) != len(parts):
        return None
    values: dict[str, int] = {}
    for group, part in zip(groups, parts, strict=True):
        found = re.fullmatch("-".join(rf"{_SHORT[name]}(\d{{1,9}})" for name in group), part)
        if found is None:
            return None
        values |= {name: int(text) for name, text in zip(group, found.groups(), strict=True)}
    return values


def predicted_seconds(rates: Rates, call: KernelCall) -> float:
    """Analytic seconds of `call` in a graph of dependent kernels: phase + max(bytes / rate, operations / rate)."""
    shape = call.shape
    if isinstance(call.config, DecodeAttention):
        config = call.config
        launch = DecodeLaunch(config.block_n, config.num_warps, config.num_stages)
        return decode_seconds(
            rates, _attention_shape(shape), launch, config.num_splits, shape["batch"], shape["context"]
        )
    if isinstance(call.config, PrefillAttention):
        chosen = call.config
        work = PrefillLaunch(chosen.block_m, chosen.block_n, chosen.num_warps, chosen.num_stages, chosen.tma)
        tokens, num_prompts = shape["tokens"], shape.get("prompts", 1)
        return prefill_seconds(rates, _attention_shape(shape), work, tokens, shape.get("context", tokens), num_prompts)
    if call.kind == "prefill-library":
        return _library_prefill_seconds(rates, shape)
    if isinstance(call.config, FixedGemmLaunch):
        return fixed_gemm_seconds(rates, call.config, shape["m"], shape["n"], shape["k"])
    if call.kind in ("gemm", "gemm-library"):
        return gemm_seconds(rates, shape["m"], shape["n"], shape["k"])
    if call.kind == "sample":
        rows = {"num_rows": shape["rows"], "vocab_size": shape["vocab_size"]}
        return sum(_row_seconds(rates, name, rows) for name in ("block_max", "block_sum", "pick"))
    if call.kind == "rope-cache":
        return _row_seconds(rates, "rope_cache", {"num_tokens": shape["tokens"], **shape})
    name = "silu_mul" if call.kind == "silu-mul" else "rms_norm"
    has_residual = int(call.kind == "add-rms-norm")
    return _row_seconds(
        rates, name, {"num_tokens": shape["tokens"], "width": shape["width"], "has_residual": has_residual}
    )


def _library_prefill_seconds(rates: Rates, shape: Mapping[str, int]) -> float:
    """Of a library's causal attention: its share of the matrix rate, above what the longest row of tiles takes."""
    tokens, context, heads = shape["tokens"], shape["context"], shape["num_heads"]
    operations = 4 * heads * shape["head_dim"] * (tokens * (context - tokens) + tokens * tokens / 2)
    return rates.phase_seconds + 2 * rates.latency_seconds + operations / (_LIBRARY_ATTENTION_SHARE * rates.matmul_rate)


def contract(name: str) -> KernelContract:
    """The contract of the Triton kernel `name`."""
    return TRITON_CONTRACTS[f"triton.{name}"][2]


def _row_seconds(rates: Rates, name: str, shape: Mapping[str, int]) -> float:
    cost = contract(name).cost(shape)
    return cost.num_phases * rates.phase_seconds + rates.stream_seconds(cost.num_bytes)


def _attention_shape(shape: Mapping[str, int]) -> AttentionShape:
    return AttentionShape(shape["num_heads"], shape["num_kv_heads"], shape["head_dim"], shape["page_size"])

"""The samplers of a device against exact probabilities (chi-square, a filter at a time) and against the host's sampler.

python tests/gpu/check_sampling.py                 on the GPU: torch sampler and Triton kernels
python tests/gpu/check_sampling.py --device cpu    the torch sampler alone, on a machine without a GPU
Prints one line a check; exit 1 when one is off.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from dragoman_agent.device.base import Penalties, SamplingBatch
from dragoman_agent.engine.host_sampler import HostSampler
from dragoman_agent.engine.philox import uniforms
from dragoman_agent.engine.sampler import sample, score

NUM_DRAWS = 20_000
LARGE_VOCAB = 32_000
LARGEST_VOCAB = 151_936
# Rounding of exp() differs between devices in the last bit: a draw that falls into such a gap is one in millions.
MAX_DIFFERENT = 1e-3
MAX_LOGPROB_ERROR = 1e-4
FILTERS: list[dict[str, float]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 2.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 1000},
    {"top_p": 0.9},
    {"top_p": 0.3},
    {"min_p": 0.1},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.85, "min_p": 0.02},
]

Draw = Callable[[torch.Tensor, SamplingBatch], np.ndarray]


class Check(NamedTuple):
    """The outcome of one check."""

    name: str
    passed: bool
    figures: str


def batch_of(num: int, parameters: dict[str, float], **sparse: Any) -> SamplingBatch:
    """Rows of one request: the same seed, a cursor each."""
    return SamplingBatch(
        temperatures=np.full(num, parameters.get("temperature", 1.0), np.float32),
        top_ks=np.full(num, parameters.get("top_k", 0), np.int32),
        top_ps=np.full(num, parameters.get("top_p", 1.0), np.float32),
        min_ps=np.full(num, parameters.get("min_p", 0.0), np.float32),
        seeds=np.full(num, 0x5EED_1234_5678, np.uint64),
        choices=np.zeros(num, np.int32),
        cursors=np.arange(num, dtype=np.int32),
        num_logprobs=np.full(num, parameters.get("num_logprobs", -1), np.int32),
        **sparse,
    )


def exact_probabilities(logits: np.ndarray, parameters: dict[str, float]) -> np.ndarray:
    """Float64, each filter as in its definition: temperature, min-p, top-k, top-p over what the one before left."""
    temperature = parameters.get("temperature", 1.0)
    if temperature < 1e-5:
        return (np.arange(len(logits)) == logits.argmax()).astype(np.float64)
    scaled = logits.astype(np.float64) / temperature
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    probabilities[probabilities < parameters.get("min_p", 0.0) * probabilities.max()] = 0
    top_k = min(int(parameters.get("top_k", 0)), len(logits))
    if top_k:
        probabilities[probabilities < np.sort(probabilities)[::-1][top_k - 1]] = 0
    probabilities /= probabilities.sum()
    if parameters.get("top_p", 1.0) < 1:
        order = np.argsort(-probabilities, kind="stable")
        before = np.cumsum(probabilities[order]) - probabilities[order]
        probabilities[order[before >= parameters["top_p"]]] = 0
    return probabilities / probabilities.sum()


def chi_square(token_ids: np.ndarray, probabilities: np.ndarray) -> tuple[float, float, int]:
    """Statistic, its bound (four standard deviations over the mean), and draws of tokens that have no probability."""
    expected = probabilities * len(token_ids)
    observed = np.bincount(token_ids, minlength=len(probabilities))
    common = expected >= 5
    cells = np.append(expected[common], expected[~common].sum())
    counts = np.append(observed[common], observed[~common].sum())
    cells, counts = cells[cells > 0], counts[cells > 0]
    degrees = len(cells) - 1
    value = float(((counts - cells) ** 2 / cells).sum())
    return value, degrees + 4 * (2 * max(degrees, 1)) ** 0.5, int(observed[expected == 0].sum())


def small_logits() -> torch.Tensor:
    """One row over 60 tokens, in values that bfloat16 holds exactly."""
    row = torch.randn(1, 60, generator=torch.Generator().manual_seed(5)) * 1.5
    return row.bfloat16().float()


def distribution_checks(name: str, draw: Draw, filters: list[dict[str, float]]) -> Iterator[Check]:
    """Chi-square of many draws from one row, for each filter."""
    logits = small_logits()
    rows = logits.expand(NUM_DRAWS, -1).contiguous()
    for parameters in filters:
        ids = draw(rows, batch_of(NUM_DRAWS, parameters))
        value, bound, impossible = chi_square(ids, exact_probabilities(logits[0].numpy(), parameters))
        label = " ".join(f"{key}={number:g}" for key, number in parameters.items()) or "no filter"
        figures = f"chi-square {value:.1f}, at most {bound:.1f}; impossible draws {impossible}"
        yield Check(f"{name}, {label}", value <= bound and not impossible, figures)


def sparse_parts(num: int, vocab: int) -> dict[str, dict[str, Any]]:
    """What edits logits before sampling, one kind at a time and all together."""
    rng = np.random.default_rng(9)
    rows = np.arange(0, num, 3, dtype=np.int32)

    def ids(count: int) -> np.ndarray:
        return rng.choice(vocab, count, replace=False).astype(np.int32)

    parts: dict[str, dict[str, Any]] = {
        "penalties": {"penalties": {int(r): Penalties(1.3, 0.5, 0.2, ids(50), ids(30)) for r in rows}},
        "logit bias": {"logit_bias": {int(r): (ids(5), rng.normal(0, 5, 5).astype(np.float32)) for r in rows}},
        "banned": {"banned": {int(r): ids(40) for r in rows}},
        "allowed": {"allowed": {int(r): ids(40) for r in rows}},
        "mask": {
            "masked_rows": rows,
            "masks": rng.integers(-(2**31), 2**31, (len(rows), -(-vocab // 32)), dtype=np.int64).astype(np.int32),
        },
    }
    parts["penalties, bias, banned and mask"] = {
        key: value for name in ("penalties", "logit bias", "banned", "mask") for key, value in parts[name].items()
    }
    return parts


def host_draw(logits: torch.Tensor, batch: SamplingBatch) -> np.ndarray:
    """The host sampler's ids."""
    return HostSampler(logits.shape[1]).sample(logits.numpy(), batch).token_ids


def agreement_checks(
    name: str,
    draw: Draw,
    filters: list[dict[str, float]],
    parts: dict[str, dict[str, Any]],
    num: int,
    vocab: int | None = None,
    scale: float = 3.0,
) -> Iterator[Check]:
    """The same ids as the host's for the same seeds and logits, over a vocabulary of real size."""
    logits = torch.randn(num, vocab or LARGE_VOCAB, generator=torch.Generator().manual_seed(1)) * scale
    logits = logits.bfloat16().float()
    cases = [(str(parameters), parameters, dict[str, Any]()) for parameters in filters]
    cases += [(part, {"temperature": 0.9, "top_p": 0.95}, sparse) for part, sparse in parts.items()]
    for label, parameters, sparse in cases:
        batch = batch_of(num, parameters, **sparse)
        different = int((draw(logits, batch) != host_draw(logits, batch)).sum())
        yield Check(
            f"{name} = host, {label}", different <= max(MAX_DIFFERENT * num, 1), f"{different} of {num} ids differ"
        )


def logprob_checks(device: torch.device) -> Iterator[Check]:
    """Logprobs of sampled and of given tokens against float64."""
    num = 128
    logits = torch.randn(num, LARGE_VOCAB, generator=torch.Generator().manual_seed(2)) * 3
    exact = torch.log_softmax(logits.double(), dim=-1)
    result = sample(logits.to(device), batch_of(num, {"temperature": 1.0, "num_logprobs": 5}))
    assert result.logprobs is not None and result.top_ids is not None and result.top_logprobs is not None
    own = exact.gather(1, result.token_ids.cpu().unsqueeze(1)).squeeze(1)
    error = float((result.logprobs.cpu().double() - own).abs().max())
    best = exact.topk(5, dim=-1).values
    error = max(error, float((result.top_logprobs.cpu().double() - best).abs().max()))
    yield Check("logprobs of sampled tokens", error <= MAX_LOGPROB_ERROR, f"largest error {error:.1e}")
    targets = torch.randint(0, LARGE_VOCAB, (num,), generator=torch.Generator().manual_seed(3))
    scores, _, top = score(logits.to(device), targets.to(device), 5)
    assert top is not None
    error = float((scores.cpu().double() - exact.gather(1, targets.unsqueeze(1)).squeeze(1)).abs().max())
    error = max(error, float((top.cpu().double() - best).abs().max()))
    yield Check("logprobs of given tokens", error <= MAX_LOGPROB_ERROR, f"largest error {error:.1e}")


def torch_draw(device: torch.device) -> Draw:
    """The torch sampler on a device."""

    def draw(logits: torch.Tensor, batch: SamplingBatch) -> np.ndarray:
        return sample(logits.to(device), batch).token_ids.cpu().numpy()

    return draw


def triton_draw(device: torch.device, dtype: torch.dtype) -> Draw:
    """The Triton kernel, which knows temperature only, on logits of `dtype`."""
    from dragoman_kernels.triton.sampling import SamplingWorkspace, sample_rows

    def draw(logits: torch.Tensor, batch: SamplingBatch) -> np.ndarray:
        num, vocab = logits.shape
        numbers = uniforms(batch.seeds, batch.choices, batch.cursors)
        token_ids = torch.zeros(num, dtype=torch.int32, device=device)
        finite = torch.zeros(num, dtype=torch.int32, device=device)
        sample_rows(
            logits.to(device, dtype),
            torch.from_numpy(batch.temperatures).to(device),
            torch.from_numpy(numbers).to(device),
            SamplingWorkspace(num, vocab, device),
            token_ids,
            finite,
        )
        if not bool(finite.all()):
            raise RuntimeError("the kernel calls a row of finite logits not finite")
        return token_ids.cpu().numpy().astype(np.int64)

    return draw


def redraw_draw(device: torch.device, dtype: torch.dtype) -> Draw:
    """The kernels of every other row, on logits of `dtype`, as a step launches them."""
    from dragoman_agent.device.cuda_redraw import Redraw
    from dragoman_kernels.triton.filters import Drawn
    from dragoman_kernels.triton.sampling import SamplingWorkspace, sample_rows

    made: dict[tuple[int, int], tuple[SamplingWorkspace, Redraw]] = {}

    def draw(logits: torch.Tensor, batch: SamplingBatch) -> np.ndarray:
        num, vocab = logits.shape
        if (num, vocab) not in made:
            made.clear()
            made[num, vocab] = SamplingWorkspace(num, vocab, device), Redraw(num, vocab, device)
        workspace, redraw = made[num, vocab]
        numbers = uniforms(batch.seeds, batch.choices, batch.cursors)
        arrays = [torch.from_numpy(array).to(device) for array in (batch.temperatures, numbers)]
        ids, finite = (torch.full((num,), -1, dtype=torch.int32, device=device) for _ in range(2))
        on_device = logits.to(device, dtype)
        sample_rows(on_device, *arrays, workspace, ids, finite)
        redraw.draw(on_device, batch, workspace, Drawn(*arrays, ids, finite))
        if not bool((finite == 1).all()):
            raise RuntimeError("the kernels call a row of finite logits not finite")
        return ids.cpu().numpy().astype(np.int64)

    return draw


def redraw_checks(device: torch.device, num_rows: int) -> Iterator[Check]:
    """Filters and edits by the kernels of a step: peaked and flat logits, few and many tokens kept, the largest vocabulary."""
    for dtype, num in ((torch.float32, max(num_rows // 4, 1)), (torch.bfloat16, num_rows)):
        name = f"kernels, {str(dtype).removeprefix('torch.')}"
        draw = redraw_draw(device, dtype)
        yield from distribution_checks(name, draw, FILTERS)
        yield from agreement_checks(name, draw, FILTERS, sparse_parts(num, LARGE_VOCAB), num)
    few = min(num_rows, 96)
    for scale in (0.01, 0.5, 6.0):
        filters: list[dict[str, float]] = [
            {"top_p": 0.9}, {"top_p": 0.999, "temperature": 1.7}, {"top_k": 40, "top_p": 0.95}, {"top_k": 20_000, "top_p": 0.8},
            {"min_p": 0.05}, {"top_p": 0.0},
        ]  # fmt: skip
        parts = sparse_parts(few, LARGEST_VOCAB)
        yield from agreement_checks(f"kernels, logits of {scale:g}", draw, filters, parts, few, LARGEST_VOCAB, scale)


def all_checks(device: torch.device, num_rows: int, *, with_triton: bool) -> Iterator[Check]:
    """Every check of one device."""
    draw = torch_draw(device)
    yield from distribution_checks(f"torch on {device.type}", draw, FILTERS)
    yield from agreement_checks(f"torch on {device.type}", draw, FILTERS, sparse_parts(num_rows, LARGE_VOCAB), num_rows)
    yield from logprob_checks(device)
    if not with_triton:
        return
    plain = [parameters for parameters in FILTERS if not parameters.keys() - {"temperature"}]
    for dtype in (torch.float32, torch.bfloat16):
        name = f"Triton, {str(dtype).removeprefix('torch.')}"
        yield from distribution_checks(name, triton_draw(device, dtype), plain)
        yield from agreement_checks(name, triton_draw(device, dtype), plain, {}, num_rows)
    yield from redraw_checks(device, num_rows)


def main(argv: list[str] | None = None) -> int:
    """Check and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rows", type=int, default=1024, help="rows of the comparison with the host")
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("PyTorch sees no CUDA device; use --device cpu for the parts that need none", file=sys.stderr)
        return 1
    failed = 0
    with torch.inference_mode():
        device = torch.device(arguments.device)
        for check in all_checks(device, arguments.rows, with_triton=arguments.device == "cuda"):
            failed += not check.passed
            print(f"{'ok' if check.passed else 'OFF'} {check.name}: {check.figures}", flush=True)
    print(f"sampling on {arguments.device}: {failed} checks off")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Vectors of Qwen3-Embedding's layout and of Qwen3-0.6B's shape on a GPU, random weights, against what we did not write.

PYTHONPATH=. python tests/gpu/check_embedding.py [--out FILE.json]      one line a check; exit 1 when one is off

sentence-transformers is used where it is installed; which libraries were compared with is told, also in what benchmarks.record_gpu
records of FILE.json: the cosine and the bits of each text are samples, and the ratio of each quarter of the texts.

A library multiplies other numbers of rows in other orders, so that a text in company is equal to the text alone within the rounding
of bfloat16: transformers' own distance in bfloat16 from float32 is the measure. In a deterministic plan every bit is equal.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from benchmarks.card import Result, keep, result, usable_gpu
from tests.agent.model.embedding_model import save_embedding_model

from dragoman_agent.device.cuda import CudaDevice
from dragoman_agent.engine.core import EngineCore
from dragoman_agent.engine.local import build_core, run_all
from dragoman_agent.engine.messages import Embedded, Sampling, Start, StartEmbed, Stop
from dragoman_agent.model.source import ModelSource, open_model
from dragoman_agent.pal.planner import Limits, plan_for
from dragoman_agent.pal.probe import profile_device
from dragoman_agent.pal.profile import Profile
from dragoman_agent.pal.switches import Switches
from dragoman_agent.rpc.embedding import unit_vectors
from dragoman_text import TextTokenizer

SHAPE: dict[str, Any] = {
    "vocab_size": 151669,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "initializer_range": 0.02,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
MODEL = "qwen3-embedding-0.6b"
COMMAND = "python tests/gpu/check_embedding.py"
NUM_WORDS = (1, 3, 17, 60, 61, 150, 400, 900)
MIN_COSINE = 0.999  # bfloat16 against float32
DEVICE = "cuda"
MAX_RATIO = 1.2  # of a distance of ours to transformers' own in bfloat16 from float32
NUM_PARTS = 4  # of the texts, one of each number of words in each
Vectors = np.ndarray[Any, np.dtype[np.float32]]


class Report:
    """Prints what was found, keeps it as raw results, and counts what is off."""

    def __init__(self) -> None:
        self.results: list[Result] = []
        self.num_off = 0

    def cosines(self, name: str, ours: Vectors, theirs: Vectors, *, note: str) -> None:
        """Off when the worst is below `MIN_COSINE`."""
        found = (ours.astype(np.float64) * theirs).sum(axis=1)
        is_good = bool(found.min() >= MIN_COSINE)
        text = f"least cosine of {len(ours)} texts {found.min():.6f}, at least {MIN_COSINE}"
        self._add(name, "cosine", "1", found.tolist(), "min", f"{note}; {text}", is_good=is_good)
        print(f"{'ok' if is_good else 'OFF'} embedding, {name}: {text}", flush=True)

    def ratios(self, name: str, ours: Vectors, theirs: Vectors, rounding: Vectors, *, note: str) -> None:
        """Distance over that of `rounding`, what transformers' own in bfloat16 is off: off when above `MAX_RATIO`."""
        distance = ours - theirs
        ratio = float(np.linalg.norm(distance) / np.linalg.norm(rounding))
        parts = [
            float(np.linalg.norm(distance[part::NUM_PARTS]) / np.linalg.norm(rounding[part::NUM_PARTS]))
            for part in range(NUM_PARTS)
        ]
        is_good = ratio <= MAX_RATIO
        text = f"distance over transformers' rounding {ratio:.3f}, at most {MAX_RATIO}"
        self._add(name, "distance_over_rounding", "ratio", parts, "", f"{note}; {text}, of all texts", is_good=is_good)
        print(f"{'ok' if is_good else 'OFF'} embedding, {name}: {text}", flush=True)

    def bits(self, name: str, found: Sequence[bytes], together: Sequence[bytes]) -> None:
        """Off when one text differs."""
        same = [a == b for a, b in zip(found, together, strict=True)]
        text = f"{sum(same)} of {len(same)} texts have the same bits"
        self._add(name, "identical_bits", "share", same, "min", text, is_good=all(same))
        print(f"{'ok' if all(same) else 'OFF'} embedding, {name}: {text}", flush=True)

    def _add(self, name: str, metric: str, unit: str, samples: Sequence[float], value: str, note: str, *, is_good: bool) -> None:  # fmt: skip
        case = f"{MODEL}-{name.replace(',', '').replace(' ', '-')}"
        more: dict[str, Any] = {"value": value} if value else {}
        self.results.append(result("embedding", case, metric, unit, samples, predicted=1.0, note=note, **more))
        self.num_off += not is_good


def texts() -> list[str]:
    """Texts of very different lengths."""
    words = Path(__file__).resolve().parents[2].joinpath("README.md").read_text().split()
    rng = random.Random(3)
    return [" ".join(rng.choice(words) for _ in range(count)) for count in NUM_WORDS for _ in range(4)]


def raw_vectors(core: EngineCore, prompts: list[list[int]], *others: Start) -> list[bytes]:
    """As they leave the engine, beside `others`."""
    events = run_all(core, [*others, *(StartEmbed(str(i), ids) for i, ids in enumerate(prompts))])
    found = {event.request_id: event.values for event in events if isinstance(event, Embedded)}
    return [found[str(i)] for i in range(len(prompts))]


def embed(core: EngineCore, prompts: list[list[int]]) -> Vectors:
    """Unit vectors [num_prompts, hidden_size]."""
    return unit_vectors(raw_vectors(core, prompts), None)


def reference(directory: Path, prompts: list[list[int]], dtype: torch.dtype) -> Vectors:
    """transformers' last hidden state of the last token, each prompt alone."""
    model = transformers.AutoModel.from_pretrained(directory, dtype=dtype).to(DEVICE).eval()
    with torch.inference_mode():
        rows = [model(torch.tensor([ids], device=DEVICE)).last_hidden_state[0, -1].float() for ids in prompts]
    del model
    torch.cuda.empty_cache()
    return torch.nn.functional.normalize(torch.stack(rows), dim=1).cpu().numpy()


def check_transformers(report: Report, name: str, exact: Vectors, rounding: Vectors, ours: Vectors) -> None:
    """Against float32, and our error beside that of transformers in bfloat16."""
    other = "compared with too" if importlib.util.find_spec("sentence_transformers") else "not installed"
    note = f"transformers {transformers.__version__} in float32, random weights; sentence-transformers is {other}"
    report.cosines(name, ours, exact, note=note)
    report.ratios(name, ours, exact, rounding, note=note)


def in_company(core_of: Any, ids: list[list[int]]) -> dict[str, list[bytes]]:
    """The vectors of one text at a time, and of all beside requests that decode."""
    core = core_of()
    busy = [
        Start(f"busy{i}", row, Sampling(temperature=0.0), Stop(max_output_tokens=64), credit=1 << 30)
        for i, row in enumerate(ids[:16])
    ]
    return {
        "one at a time": [raw_vectors(core, [row])[0] for row in ids],
        "beside 16 requests in decode": raw_vectors(core_of(), ids, *busy),
    }


def check_company(report: Report, core_of: Any, ids: list[list[int]], together: Vectors, rounding: Vectors) -> None:
    """Alone, beside others and all together: no further apart than rounding to bfloat16 puts them."""
    for name, found in in_company(core_of, ids).items():
        report.ratios(name, unit_vectors(found, None), together, rounding, note="against all texts at once, ours both")


def check_bits(report: Report, core_of: Any, ids: list[list[int]], together: list[bytes]) -> None:
    """The same in a deterministic plan: every bit is equal."""
    for name, found in in_company(core_of, ids).items():
        report.bits(f"deterministic, {name}", found, together)


def check_sentence_transformers(report: Report, directory: Path, source: ModelSource, core_of: Any) -> None:
    """The library that the publisher names, with and without the prompt of queries."""
    if importlib.util.find_spec("sentence_transformers") is None:
        print("SKIPPED: sentence-transformers is not installed; checked against transformers alone", flush=True)
        return
    from sentence_transformers import SentenceTransformer, __version__

    model = SentenceTransformer(str(directory), device=DEVICE, model_kwargs={"dtype": torch.float32})
    tokenizer = TextTokenizer.from_files(source.tokenizer)
    for prompt_name in (None, "query"):
        prefix = source.embedding.prefix(prompt_name, None)
        ours = embed(core_of(), [tokenizer.encode(prefix + text) for text in texts()])
        theirs = model.encode(texts(), prompt_name=prompt_name, batch_size=8)
        name = f"sentence-transformers, {'no prompt' if prompt_name is None else f'prompt {prompt_name}'}"
        report.cosines(name, ours, theirs, note=f"sentence-transformers {__version__} in float32, random weights")


@contextmanager
def cores(profile: Profile, source: ModelSource, *, deterministic: bool) -> Iterator[Callable[[], EngineCore]]:
    """Cores on the loaded device, each with an empty prefix cache."""
    limits = Limits(
        max_context_tokens=8192, max_num_seqs=64, memory_utilization=0.2, kv_dtype="bf16", deterministic=deterministic
    )
    plan, _ = plan_for(profile, source.config, limits, Switches())
    device = CudaDevice()
    device.load(source, plan, lambda _: None)
    try:
        yield lambda: build_core(device, source, plan)
    finally:
        device.close()
        torch.cuda.empty_cache()


def main(argv: Sequence[str] | None = None) -> int:
    """Write the model, load it, run all checks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a JSON file for the raw results")
    options = parser.parse_args(argv)
    report = Report()
    profile, _ = profile_device(usable_gpu(), Path("/tmp/dragoman-check"))
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "qwen3-embedding"
        save_embedding_model(directory, dtype=torch.bfloat16, **SHAPE)
        source = open_model(str(directory), directory)
        source.check()
        encode = TextTokenizer.from_files(source.tokenizer).encode
        ids = [encode(text) for text in texts()]
        exact = reference(directory, ids, torch.float32)
        rounding = reference(directory, ids, torch.bfloat16) - exact

        def save() -> None:
            keep(options.out, "", profile.device.index, report.results, command=COMMAND)

        with cores(profile, source, deterministic=False) as core_of:
            together = embed(core_of(), ids)
            check_transformers(report, "transformers", exact, rounding, together)
            check_company(report, core_of, ids, together, rounding)
            save()
            check_sentence_transformers(report, directory, source, core_of)
            save()
        with cores(profile, source, deterministic=True) as core_of:
            raw = raw_vectors(core_of(), ids)
            check_transformers(report, "deterministic, transformers", exact, rounding, unit_vectors(raw, None))
            check_bits(report, core_of, ids, raw)
            save()
    return 1 if report.num_off else 0


if __name__ == "__main__":
    sys.exit(main())

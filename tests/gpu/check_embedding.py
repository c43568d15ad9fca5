"""Vectors of Qwen3-Embedding's layout and of Qwen3-0.6B's shape on a GPU, random weights, against what we did not write.

python tests/gpu/check_embedding.py      one line a check; exit 1 when one is off. sentence-transformers is used where it is

A library multiplies other numbers of rows in other orders, so that a text in company is equal to the text alone within the rounding
of bfloat16: transformers' own distance in bfloat16 from float32 is the measure. In a deterministic plan every bit is equal.
"""

from __future__ import annotations

import importlib.util
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tests.agent.model.embedding_model import save_embedding_model

from dragoman_agent.device.cuda import CudaDevice
from dragoman_agent.engine.core import EngineCore
from dragoman_agent.engine.local import build_core, run_all
from dragoman_agent.engine.messages import Embedded, Sampling, Start, StartEmbed, Stop
from dragoman_agent.model.source import ModelSource, open_model
from dragoman_agent.pal.attributes import take_inventory
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
NUM_WORDS = (1, 3, 17, 60, 61, 150, 400, 900)
MIN_COSINE = 0.999  # bfloat16 against float32
DEVICE = "cuda"
MAX_RATIO = 1.2  # of a distance of ours to transformers' own in bfloat16 from float32
Vectors = np.ndarray[Any, np.dtype[np.float32]]


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


def report(name: str, ours: Vectors, theirs: Vectors, least: float) -> int:
    """Print the worst cosine; 1 when it is below `least`."""
    worst = float((ours.astype(np.float64) * theirs).sum(axis=1).min())
    print(f"embedding, {name}: least cosine of {len(ours)} texts {worst:.6f}, at least {least}", flush=True)
    return int(not worst >= least)


def report_ratio(name: str, ours: Vectors, theirs: Vectors, rounding: float) -> int:
    """Print the distance over `rounding`; 1 when it is above `MAX_RATIO` of that."""
    ratio = float(np.linalg.norm(ours - theirs)) / rounding
    print(f"embedding, {name}: distance over transformers' rounding {ratio:.3f}, at most {MAX_RATIO}", flush=True)
    return int(not ratio <= MAX_RATIO)


def check_transformers(exact: Vectors, rounding: float, ours: Vectors) -> int:
    """Against float32, and our error beside that of transformers in bfloat16."""
    return report("transformers in float32", ours, exact, MIN_COSINE) + report_ratio(
        "transformers in float32", ours, exact, rounding
    )


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


def check_company(core_of: Any, ids: list[list[int]], together: Vectors, rounding: float) -> int:
    """Alone, beside others and all together: no further apart than rounding to bfloat16 puts them."""
    return sum(
        report_ratio(name, unit_vectors(found, None), together, rounding)
        for name, found in in_company(core_of, ids).items()
    )


def check_bits(core_of: Any, ids: list[list[int]], together: list[bytes]) -> int:
    """The same in a deterministic plan: every bit is equal."""
    bad = 0
    for name, found in in_company(core_of, ids).items():
        num_equal = sum(a == b for a, b in zip(found, together, strict=True))
        print(f"embedding, deterministic, {name}: {num_equal} of {len(ids)} texts have the same bits", flush=True)
        bad += num_equal != len(ids)
    return bad


def check_sentence_transformers(directory: Path, source: ModelSource, core_of: Any) -> int:
    """The library that the publisher names, with and without the prompt of queries."""
    if importlib.util.find_spec("sentence_transformers") is None:
        print("SKIPPED: sentence-transformers is not installed; checked against transformers alone", flush=True)
        return 0
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(directory), device=DEVICE, model_kwargs={"dtype": torch.float32})
    tokenizer, bad = TextTokenizer.from_files(source.tokenizer), 0
    for prompt_name in (None, "query"):
        prefix = source.embedding.prefix(prompt_name, None)
        ours = embed(core_of(), [tokenizer.encode(prefix + text) for text in texts()])
        theirs = model.encode(texts(), prompt_name=prompt_name, batch_size=8)
        bad += report(f"sentence-transformers, prompt {prompt_name}", ours, theirs, MIN_COSINE)
    return bad


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


def main() -> int:
    """Write the model, load it, run all checks."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "qwen3-embedding"
        save_embedding_model(directory, dtype=torch.bfloat16, **SHAPE)
        source = open_model(str(directory), directory)
        source.check()
        found = next(d for d in take_inventory().devices if d.facts.kind == "cuda")
        profile, _ = profile_device(found, Path("/tmp/dragoman-check"))
        encode = TextTokenizer.from_files(source.tokenizer).encode
        ids = [encode(text) for text in texts()]
        exact = reference(directory, ids, torch.float32)
        rounding = float(np.linalg.norm(reference(directory, ids, torch.bfloat16) - exact))
        with cores(profile, source, deterministic=False) as core_of:
            together = embed(core_of(), ids)
            bad = check_transformers(exact, rounding, together)
            bad += check_company(core_of, ids, together, rounding)
            bad += check_sentence_transformers(directory, source, core_of)
        with cores(profile, source, deterministic=True) as core_of:
            raw = raw_vectors(core_of(), ids)
            bad += check_transformers(exact, rounding, unit_vectors(raw, None))
            bad += check_bits(core_of, ids, raw)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

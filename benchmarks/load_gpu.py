"""Loading from the page cache against the measured host-to-device rate, on a GPU.

python -m benchmarks.load_gpu MODEL FOLDER [--out FILE]     writes a random model of that shape as safetensors to FOLDER
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path

import numpy as np
import torch
from benchmarks.card import environment
from safetensors.torch import save_file

from dragoman_agent.device.cuda_weights import CopyPlan, load_weights
from dragoman_agent.model.llama import LlamaWeights
from dragoman_agent.model.source import ModelSource, open_model
from dragoman_agent.pal.attributes import take_inventory
from dragoman_agent.pal.probe import profile_device
from dragoman_text.tokenizer import byte_tokenizer_files

HF_NAMES = {
    "embed_tokens": "model.embed_tokens",
    "norm": "model.norm",
    "lm_head": "lm_head",
    "input_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    **{f"{p}_proj": f"self_attn.{p}_proj" for p in "qkvo"},
    **{f"{p}_proj": f"mlp.{p}_proj" for p in ("gate", "up", "down")},
}


def write_model(name: str, folder: Path) -> None:
    """The random model as a safetensors directory."""
    source = open_model(f"random:{name}", Path())
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for canonical in source.tensor_names():
        stored = source.tensor(canonical)
        value = torch.from_numpy(stored.data).view(torch.bfloat16).view(stored.shape)
        parts = canonical.split(".")
        prefix = f"model.layers.{parts[1]}." if parts[0] == "layers" else ""
        tensors[f"{prefix}{HF_NAMES[parts[-1]]}.weight"] = value.reshape(-1) if canonical.endswith("norm") else value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(source.path.read_text())
    (folder / "tokenizer.json").write_bytes(byte_tokenizer_files().tokenizer_json)


def check_bytes(source: ModelSource, weights: LlamaWeights) -> None:
    """A few tensors on the device are what the file holds."""
    last = source.config.num_layers - 1
    for name, value in (
        ("embed_tokens", weights.embedding),
        ("layers.0.o_proj", weights.layers[0].out),
        (f"layers.{last}.down_proj", weights.layers[last].down),
        ("norm", weights.norm[None]),
    ):
        stored = source.tensor(name)
        expected = torch.from_numpy(np.array(stored.data)).view(torch.bfloat16).view(stored.shape)
        if not torch.equal(value.cpu(), expected):
            raise RuntimeError(f"{name} differs from the file")


def sweep(source: ModelSource, device: torch.device) -> None:
    """One line a choice."""
    for threads, size in itertools.product((8, 10, 12, 14), (4 << 20, 8 << 20, 16 << 20)):
        rates = []
        for _ in range(4):
            begin = time.perf_counter()
            load_weights(source, device, lambda _: None, CopyPlan(threads, size))
            torch.cuda.synchronize()
            rates.append(source.total_bytes / (time.perf_counter() - begin) / 1e9)
        print(f"  {threads} threads, 2 x {size >> 20} MiB each: {max(rates):.1f} GB/s")


def main() -> None:
    """Write once, load four times: the first fills the page cache."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sweep", action="store_true", help="time other numbers of threads and buffers first")
    options = parser.parse_args()
    if not (options.folder / "model.safetensors").exists():
        write_model(options.model, options.folder)
    found = next(d for d in take_inventory().devices if d.facts.kind == "cuda")
    profile, _ = profile_device(found, Path("/tmp/dragoman-bench"))
    rate = profile.number("link.h2d_pinned") / 1e9
    source = open_model(str(options.folder), Path())
    device = torch.device("cuda")
    check_bytes(source, load_weights(source, device, lambda _: None))
    if options.sweep:
        sweep(source, device)
    samples = []
    for _ in range(6):
        begin = time.perf_counter()
        weights = load_weights(source, device, lambda _: None)
        torch.cuda.synchronize()
        samples.append(source.total_bytes / (time.perf_counter() - begin) / 1e9)
        del weights
    print(
        f"load {options.model}: {[round(s, 2) for s in samples]} GB/s, link {rate:.1f} GB/s: {samples[-1] / rate:.0%}"
    )
    if options.out:
        result = {
            "bench": "load", "case": options.model, "metric": "gb_per_second", "samples": samples[2:],
            "predicted": 0.8 * rate, "note": f"measured pinned host-to-device rate {rate:.1f} GB/s",
        }  # fmt: skip
        body = {
            "model": options.model, "device": profile.device.name, "results": [result],
            **environment(profile.device.index),
        }  # fmt: skip
        options.out.write_text(json.dumps(body))


if __name__ == "__main__":
    main()

"""Our bfloat16 logits against transformers' float32, on a GPU with random weights of a real shape.

python tests/gpu/check_parity.py qwen3-0.6b      prints one line a check; exit 1 when one is off
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
import transformers

from dragoman_agent.device.base import SamplingBatch, StepBatch
from dragoman_agent.device.cuda import CudaDevice
from dragoman_agent.model.config import ModelConfig
from dragoman_agent.model.source import ModelSource, open_model
from dragoman_agent.pal.attributes import take_inventory
from dragoman_agent.pal.plan import GemmDecode, Plan
from dragoman_agent.pal.planner import Limits
from dragoman_agent.pal.planner_cuda import plan_cuda
from dragoman_agent.pal.probe import profile_device
from dragoman_agent.pal.step_cost import matrices
from dragoman_kernels.triton.launches import GEMM_LAUNCHES

LENGTHS = (1, 7, 64, 65, 130, 300, 511)
DECODE_STEPS = 12
MAX_RATIO = 1.2

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


def hf_name(name: str) -> str:
    """Canonical name -> transformers' name."""
    parts = name.split(".")
    if parts[0] == "layers":
        return f"model.layers.{parts[1]}.{HF_NAMES[parts[2]]}.weight"
    return f"{HF_NAMES[parts[0]]}.weight"


def hf_model(source: ModelSource, dtype: torch.dtype) -> torch.nn.Module:
    """The same weights in transformers."""
    body = json.loads(Path(source.path).read_text())
    body.pop("name", None)
    config = transformers.AutoConfig.for_model(body.pop("model_type"), **body)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    state = {}
    for name in source.tensor_names():
        stored = source.tensor(name)
        value = torch.from_numpy(stored.data).view(torch.bfloat16).view(stored.shape).to("cuda", dtype)
        state[hf_name(name)] = value.reshape(-1) if name.endswith("norm") else value
    if source.config.tied_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True, strict=True)
    rebuilt = type(model.model.rotary_emb)(config, device="cuda")
    model.model.rotary_emb = rebuilt
    return model.eval()


def batch_of(lengths: list[int], done: list[int], tokens: list[list[int]], width: int, page: int) -> StepBatch:
    """Tokens done[i]..lengths[i] of each sequence; sequence i lives in blocks 1 + i * width onwards."""
    count = len(lengths)
    tables = np.arange(1, 1 + count * width, dtype=np.int32).reshape(count, width)
    positions = np.concatenate([np.arange(a, b, dtype=np.int32) for a, b in zip(done, lengths, strict=True)])
    owners = np.repeat(np.arange(count), np.subtract(lengths, done))
    ids = np.concatenate([tokens[i][done[i] : lengths[i]] for i in range(count)]).astype(np.int32)
    starts = np.concatenate(([0], np.cumsum(np.subtract(lengths, done)))).astype(np.int32)
    zeros = np.zeros(count, np.int32)
    ones = np.ones(count, np.float32)
    sampling = SamplingBatch(
        ones * 0, zeros, ones, ones * 0, np.zeros(count, np.uint64), zeros, zeros, np.full(count, -1, np.int32)
    )
    slots = tables[owners, positions // page] * page + positions % page
    return StepBatch(
        1, ids, positions, slots.astype(np.int32), starts, np.array(lengths, np.int32), tables,
        np.array(lengths, np.int32), np.arange(count, dtype=np.int32), np.zeros(0, np.int32), sampling,
    )  # fmt: skip


def our_logits(device: CudaDevice, tokens: list[list[int]], page: int) -> list[torch.Tensor]:
    """Logits after each prompt, prefilled in two chunks, and after each of the decode steps that follow."""
    width = (max(LENGTHS) + DECODE_STEPS) // page + 1
    lengths = list(LENGTHS)
    halves = [length // 2 for length in lengths]
    first = [i for i, half in enumerate(halves) if half]
    out = []
    with torch.inference_mode():
        pick = [halves[i] for i in first]
        batch = batch_of(pick, [0] * len(first), [tokens[i] for i in first], width, page)
        batch.block_tables = np.arange(1, 1 + len(lengths) * width, dtype=np.int32).reshape(-1, width)[first]
        owners = np.repeat(np.arange(len(first)), pick)
        batch.slot_mapping = (
            batch.block_tables[owners, batch.positions // page] * page + batch.positions % page
        ).astype(np.int32)
        device.submit(batch).result()
        device.submit(batch_of(lengths, halves, tokens, width, page)).result()
        out.append(copied(device))
        for _ in range(DECODE_STEPS):
            done, lengths = lengths, [length + 1 for length in lengths]
            device.submit(batch_of(lengths, done, tokens, width, page)).result()
            out.append(copied(device))
    return out


def copied(device: CudaDevice) -> torch.Tensor:
    """The last step's logits in float32. In another stream than the steps, which overwrite what is read."""
    logits = device.last_logits().float().clone()
    torch.cuda.synchronize()
    return logits


def variants(plan: Plan, model: ModelConfig) -> dict[str, Plan]:
    """The plan from the profile alone, and one in which every product of a decode step and every early start is our kernels'. Not of
    more rows: some of these launches would need more shared memory than there is, and no plan takes one that could not be timed.
    """
    sizes = dict.fromkeys((*matrices(model), (model.vocab_size, model.hidden_size)))
    launches = itertools.cycle(GEMM_LAUNCHES)
    rows = plan.max_num_seqs
    few = tuple(GemmDecode(n, k, rows, **asdict(launch)) for (n, k), launch in zip(sizes, launches, strict=False))
    return {"planned": plan, "few rows": replace(plan, gemm_decode=few, dependent_max_batch=plan.max_num_seqs)}


def main() -> int:
    """Compare and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    name = parser.parse_args().model
    source = open_model(f"random:{name}", Path())
    found = next(d for d in take_inventory().devices if d.facts.kind == "cuda")
    profile, _ = profile_device(found, Path("/tmp/dragoman-check"))
    plan, _ = plan_cuda(profile, source.config, Limits(max_context_tokens=2048, max_num_seqs=8, memory_utilization=0.2))
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, source.config.vocab_size, length + DECODE_STEPS).tolist() for length in LENGTHS]
    ours = {}
    for label, variant in variants(plan, source.config).items():
        device = CudaDevice()
        device.load(source, variant, lambda _: None)
        ours[label] = our_logits(device, tokens, plan.page_size)
        device.close()
    theirs = reference(source, tokens, torch.bfloat16)
    exact = reference(source, tokens, torch.float32)
    verdicts = [judge(f"{name}, {label}", logits, theirs, exact) for label, logits in ours.items()]
    return 0 if all(verdicts) else 1


def reference(source: ModelSource, tokens: list[list[int]], dtype: torch.dtype) -> list[list[torch.Tensor]]:
    """Transformers' logits of the last token of each prompt and of the decode steps that follow."""
    model = hf_model(source, dtype)
    rows = []
    with torch.inference_mode():
        for sequence, length in zip(tokens, LENGTHS, strict=True):
            logits = model(torch.tensor([sequence], device="cuda")).logits[0]
            rows.append([logits[length - 1 + step].float() for step in range(DECODE_STEPS + 1)])
    del model
    torch.cuda.empty_cache()
    return rows


def judge(
    label: str, ours: list[torch.Tensor], theirs: list[list[torch.Tensor]], exact: list[list[torch.Tensor]]
) -> bool:
    """Whether we are as near to float32 as transformers in bfloat16, and choose the same token outside near-ties."""
    our_error = their_error = norm = 0.0
    agree = total = clear = clear_agree = 0
    for i in range(len(LENGTHS)):
        for step in range(DECODE_STEPS + 1):
            truth = exact[i][step]
            our_error += float((ours[step][i] - truth).square().sum())
            their_error += float((theirs[i][step] - truth).square().sum())
            norm += float(truth.square().sum())
            top = truth.topk(2)
            same = int(ours[step][i].argmax() == top.indices[0])
            agree += same
            total += 1
            if float(top.values[0] - top.values[1]) > 0.5:
                clear += 1
                clear_agree += same
    ratio = (our_error / their_error) ** 0.5
    good = ratio <= MAX_RATIO and clear_agree == clear
    print(
        f"{'ok' if good else 'OFF'} parity {label}: our error {(our_error / norm) ** 0.5:.2e}, transformers' bf16 "
        f"{(their_error / norm) ** 0.5:.2e}, ratio {ratio:.3f} (at most {MAX_RATIO}); top-1 {agree}/{total}, outside "
        f"near-ties {clear_agree}/{clear}",
        flush=True,
    )
    return good


if __name__ == "__main__":
    sys.exit(main())

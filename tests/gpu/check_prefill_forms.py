"""Steps whose prompts one of two launches attends, on a GPU, random weights of a real shape: each is the one that the plan says.

python tests/gpu/check_prefill_forms.py [qwen3-0.6b]      exit 1 when a step is off
The same steps by a plan of both launches and by plans of either alone: logits of the first are those of the launch that should have
attended, to a tenth of what lies between the two; bits as a rule. Milliseconds on the device are told beside them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from benchmarks.card import usable_gpu
from benchmarks.gpu_setup import Loaded
from check_mixed_graphs import distance, fill, run, step_of

from dragoman_agent.model.source import open_model
from dragoman_agent.pal.plan import LongPrefill, Plan, PrefillAttention, PrefillForms, seen_tokens
from dragoman_agent.pal.planner import Limits, Switches, plan_for
from dragoman_agent.pal.probe import profile_device
from dragoman_agent.pal.rates import rates_of
from dragoman_kernels.triton.launches import tma_prefill_launches, ws_prefill_launches

PROFILES = Path("/tmp/dragoman-check")
LIMITS = Limits(max_context_tokens=9216, max_num_seqs=256)
MIN_TOKENS, MIN_CONTEXT = 1024, 900
MAX_BLOCKS = 2048
NEAR = 0.1  # of what lies between the launches alone
Shape = tuple[list[tuple[int, int]], int, int]
Ran = tuple[torch.Tensor, np.ndarray, float, float]  # logits, tokens, wall and device seconds

# (tokens of each prompt in the step and before it, sequences that decode beside them at so many tokens).
STEPS: tuple[Shape, ...] = (
    ([(1024, 0)], 0, 0), ([(1024, 0)] * 4, 0, 0), ([(1024, 0)] * 16, 0, 0), ([(2048, 6144)], 0, 0), ([(1024, 7168)], 0, 0),
    ([(500, 7000)], 0, 0), ([(64, 4000)] * 16, 0, 0), ([(2048, 6144)], 32, 500), ([(8192, 0)], 0, 0), ([(3000, 0), (1500, 5000)], 16, 300),
)  # fmt: skip


def results(loaded: Loaded, plan: Plan, shapes: Sequence[Shape]) -> list[Ran]:
    """Of each step over the same K and V: what another launch wrote before would be another context."""
    device = loaded.device(plan)
    ran = []
    for shape in shapes:
        fill(device)
        ran.append(run(device, step_of(plan, *shape)))
    print(f"  graphs of {device.info['mixed_graph_tokens']} tokens", flush=True)
    device.close()
    return ran


def takes_long(forms: PrefillForms, prompts: list[tuple[int, int]]) -> bool:
    """Whether a step of these prompts is for the launch of long contexts."""
    assert forms.long is not None
    num_items = sum(-(-count // forms.long.attention.block_m) for count, _ in prompts)
    num_seen = sum(seen_tokens(count, count + before) for count, before in prompts)
    return forms.long.takes(sum(count for count, _ in prompts), num_seen, num_items)


def told(shape: Shape, is_long: bool, both: Ran, usual: Ran, long: Ran) -> tuple[bool, str]:
    """(whether the step was attended by the launch that it is for, what is said of it)."""
    expected, between = (long if is_long else usual)[0], distance(usual[0], long[0])
    off = distance(both[0], expected)
    good = bool(torch.isfinite(both[0]).all()) and between > 0 and off <= NEAR * between
    words = " and ".join(f"{count} behind {before}" for count, before in shape[0][:2])
    equal = "equal bits" if torch.equal(both[0], expected) else f"off {off:.1e}"
    return good, (
        f"{len(shape[0])} prompts ({words}), {shape[1]} decode: by the {'long' if is_long else 'usual'} launch, {equal}, "
        f"launches apart {between:.1e}; {1e3 * both[3]:.2f} ms, by the usual one alone {1e3 * usual[3]:.2f}, by the long one {1e3 * long[3]:.2f}"
    )


def forms_of(sizes: tuple[int, int, tuple[int, int], int]) -> PrefillForms | None:
    """By descriptors with all warps alike, and with roles and other tiles of keys, for equal ones give equal bits; None where the
    card has not both.
    """
    plain = tma_prefill_launches(*sizes)[-1:]
    roles = [one for one in ws_prefill_launches(*sizes) if plain and one.block_n != plain[0].block_n][:1]
    if not (plain and roles):
        return None
    usual, other = (PrefillAttention("paged", **asdict(one)) for one in (*plain, *roles))
    return PrefillForms(usual, LongPrefill(other, MIN_TOKENS, MIN_CONTEXT))


def main() -> int:
    """Every step by the three plans."""
    name = sys.argv[1] if len(sys.argv) > 1 else "qwen3-0.6b"
    source = open_model(f"random:{name}", Path())
    profile, _ = profile_device(usable_gpu(), PROFILES)
    plan, _ = plan_for(profile, source.config, LIMITS, Switches())
    plan = replace(plan, num_blocks=min(plan.num_blocks, MAX_BLOCKS), graph_batch_sizes=(1,))
    rates = rates_of(profile)
    forms = forms_of((source.config.head_dim, plan.page_size, rates.capability, rates.shared_per_block))
    if forms is None or forms.long is None:
        print("this card has no launch with roles for warps beside another by tensor descriptors: nothing to check")
        return 0
    shapes = [shape for shape in STEPS if sum(count for count, _ in shape[0]) + shape[1] <= plan.max_batch_tokens]
    loaded = Loaded(source)
    both = results(loaded, replace(plan, prefill_attention=forms.usual, long_prefill=forms.long), shapes)
    usual, long = (
        results(loaded, replace(plan, prefill_attention=one, long_prefill=None), shapes) for one in forms.all
    )
    bad = 0
    for shape, *ran in zip(shapes, both, usual, long, strict=True):
        good, words = told(shape, takes_long(forms, shape[0]), *ran)
        bad += not good
        print(f"{'ok ' if good else 'OFF'} {words}", flush=True)
    return bad


if __name__ == "__main__":
    sys.exit(min(main(), 1))

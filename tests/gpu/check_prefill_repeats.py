"""Every form of prefill attention on a GPU, over and over on prompts of uneven lengths: the same bits each time, near those by pointers.

PYTHONPATH=. python tests/gpu/check_prefill_repeats.py [--repeats 300] [--seconds 120]      a line a form and step; exit 1 when one is off

Roles for warps and copies under way can read a tile too early or give it back too early; which of many runs shows it is chance, so
that one comparison says little. What each form wrote first is compared with the form by pointers, which has none of these.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import torch
from benchmarks.prefill_kernels_gpu import NEW, OLD, SHAPES, Step, make_step, name_of, with_roles

from dragoman_kernels.triton.launches import PrefillLaunch

SHORT = (67, 70, 84, 73, 77, 77, 73, 86, 173, 160, 159, 122, 282, 296, 275, 318)
# (queries, tokens before them): contexts that end anywhere in a page, work items that are nearly empty, and full ones.
STEPS: dict[str, list[tuple[int, int]]] = {
    "short texts": [(count, 0) for count in SHORT * 2],
    "few tokens behind a page": [(count - 64, 64) for count in SHORT * 2],
    "uneven": [(700, 0), (1, 900), (333, 64), (64, 1), (129, 63), (2, 126)] * 4,
    "even": [(1024, 0)] * 8,
}
MAX_APART = 0.02  # of a row of one head from that by pointers, relative: both are rounded to bfloat16


def check_form(step: Step, launch: PrefillLaunch, right: torch.Tensor, repeats: int) -> tuple[int, float]:
    """(runs whose bits differ from the first's, how far the worst row of the first is from `right`)."""
    first, again = (torch.full_like(step.q, float("nan")) for _ in range(2))
    step.call(launch, first)()
    call = step.call(launch, again)
    differ = torch.zeros((), device=step.q.device, dtype=torch.int64)
    for _ in range(repeats):
        again.fill_(float("nan"))
        call()
        differ += (again != first).any()
    apart = (first.float() - right.float()).norm(dim=-1) / right.float().norm(dim=-1)
    return int(differ), float(apart.nan_to_num(float("inf")).max())


def main(argv: Sequence[str] | None = None) -> int:
    """Every head shape, step and form."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=120.0, help="forms begin no later than this")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        sys.exit("no GPU that PyTorch can use: run this where nvidia-smi names one")
    begun, num_off, num_left = time.monotonic(), 0, 0
    for shape in SHAPES:
        for name, prompts in STEPS.items():
            step = make_step(prompts, *shape)
            right = torch.empty_like(step.q)
            step.call(OLD[0], right)()
            for launch in (OLD[0], *with_roles(shape), NEW[1]):
                if time.monotonic() - begun > options.seconds:
                    num_left += 1
                    continue
                differ, apart = check_form(step, launch, right, options.repeats)
                off = differ > 0 or not apart <= MAX_APART
                num_off += off
                print(
                    f"{'OFF' if off else 'ok'} {'/'.join(map(str, shape))} {name}, {name_of(launch)}: {differ} of {options.repeats} runs "
                    f"have other bits, the worst row is {apart:.4f} from that by pointers",
                    flush=True,
                )
    if num_left:
        print(f"OFF {num_left} forms left out: {options.seconds:g} s are over")
    return 1 if num_off or num_left else 0


if __name__ == "__main__":
    sys.exit(main())

"""Streams that were cut and taken up again on a GPU, in a deterministic plan: the same tokens and logprobs from every third token on.

PYTHONPATH=. python tests/gpu/check_resume.py [--model qwen3-0.6b] [--layers 6]      a line a case; exit 1 when one is off
Greedy and seeded, with filters, penalties, bias, a grammar, stop strings and several choices; all cuts of a case at once, beside others.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.gpu.check_determinism import plan_of

from dragoman_agent.engine.core import EngineCore
from dragoman_agent.engine.local import build_core, run_all
from dragoman_agent.engine.messages import Delta, Failed, GrammarSpec, Sampling, Start, Stop

NUM_TOKENS, EVERY = 32, 3
PROMPT = [7 * i % 251 for i in range(150)]  # more than a page
EOS = 258  # of the byte tokenizer
LETTERS = GrammarSpec("regex", "[a-d]{60}")
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "seed": 11},
    "top-p, top-k and penalties": {
        "temperature": 0.8, "seed": 12, "top_p": 0.9, "top_k": 50, "repetition_penalty": 1.4, "presence_penalty": 0.3,
    },
    "frequency penalty and bias, greedy": {"frequency_penalty": 0.8, "logit_bias": {65: 2.0}},
    "grammar": {"temperature": 1.0, "seed": 13, "grammar": GrammarSpec("regex", "[a-z]{2}(,[0-9]{1,3})+;")},
    "stop strings": {"temperature": 1.0, "seed": 14, "grammar": LETTERS, "strings": ["aab", "bcd", "dca", "cbb"]},
    "three choices and stop strings": {"temperature": 1.0, "seed": 15, "grammar": LETTERS, "strings": ["aacb", "bcda", "dcaa", "cbbd"], "num_choices": 3},
}  # fmt: skip
Answer = list[tuple[int, float]]  # token and logprob


def start(name: str, case: Mapping[str, Any], delivered: Sequence[Sequence[int]] = ()) -> Start:
    """A request of `case`; `delivered` holds the tokens that each choice has had."""
    fields = dict(case)
    stop = Stop(max_output_tokens=NUM_TOKENS, strings=fields.pop("strings", []), eos_token_ids=[EOS])
    more = {"num_choices": fields.pop("num_choices", 1)}
    sampling = Sampling(**{"temperature": 0.0, "num_logprobs": 0, **fields})
    had = [list(tokens) for tokens in delivered]
    return Start(name, PROMPT, sampling, stop, credit=1 << 30, delivered=had, cache_salt=name, **more)


def run(core: EngineCore, starts: Sequence[Start]) -> dict[tuple[str, int], Answer]:
    """What each choice of each request gives."""
    found: dict[tuple[str, int], Answer] = {(s.request_id, c): [] for s in starts for c in range(s.num_choices)}
    for event in run_all(core, starts):
        if isinstance(event, Failed):
            raise RuntimeError(f"{event.request_id}: {event.message}")
        if isinstance(event, Delta):
            pairs = zip(event.token_ids, (entry.logprob for entry in event.logprobs), strict=True)
            found[event.request_id, event.choice].extend(pairs)
    return found


def check_case(core: EngineCore, name: str, case: Mapping[str, Any]) -> bool:
    """Every cut of one case, beside other requests; prints a line. Whether all is equal."""
    num_choices = int(case.get("num_choices", 1))
    alone = run(core, [start("whole", case)])
    whole = [alone["whole", choice] for choice in range(num_choices)]
    cuts = range(0, max(map(len, whole)), EVERY)
    others = [start(f"other {seed}", {"temperature": 1.0, "seed": seed}) for seed in range(5)]
    # Choices are cut in different places; one that is over has had all that it gives.
    had = {cut: [answer[: max(cut - choice, 0)] for choice, answer in enumerate(whole)] for cut in cuts}
    again = [
        start(f"after {cut}", case, [[token for token, _ in part] for part in parts]) for cut, parts in had.items()
    ]
    found = run(core, [*again, *others])
    wrong = [
        f"choice {choice} after {len(had[cut][choice])}"
        for cut in cuts
        for choice in range(num_choices)
        if found[f"after {cut}", choice] != whole[choice][len(had[cut][choice]) :]
    ]
    good = not wrong and max(map(len, whole)) > EVERY
    lengths = " and ".join(str(len(answer)) for answer in whole)
    text = f"{name}: {len(cuts) * num_choices - len(wrong)} of {len(cuts) * num_choices} streams of {lengths} tokens go on with the same bits"
    print(f"{'ok ' if good else 'OFF'} {text}" + (f"; not {', '.join(wrong[:4])}" if wrong else ""), flush=True)
    return good


def check_all(core: EngineCore) -> int:
    """How many cases are off."""
    return sum(not check_case(core, name, case) for name, case in CASES.items())


def main(argv: Sequence[str] | None = None) -> int:
    """Load a random model, cut to some layers, and check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--layers", type=int, default=6)
    options = parser.parse_args(argv)
    from benchmarks.card import usable_gpu
    from tests.gpu.determinism_rig import CutSource

    from dragoman_agent.device.cuda import CudaDevice
    from dragoman_agent.pal.probe import profile_device

    profile, _ = profile_device(usable_gpu(), Path("/tmp/dragoman-check"))
    source = CutSource(options.model, options.layers)
    plan = plan_of(profile, source, deterministic=True)
    device = CudaDevice(profile.device.index)
    device.load(source, plan, lambda _: None)
    try:
        return min(check_all(build_core(device, source, plan)), 1)
    finally:
        device.close()


if __name__ == "__main__":
    sys.exit(main())

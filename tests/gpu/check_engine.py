"""The embedded model and concurrent requests on a GPU, through the engine core.

python tests/gpu/check_engine.py MODEL.gguf      exit 1 when a check is off
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.card import usable_gpu

from dragoman_agent.device.cuda import CudaDevice
from dragoman_agent.engine.core import EngineCore
from dragoman_agent.engine.local import build_core, run_all
from dragoman_agent.engine.messages import Delta, Failed, Sampling, Start, Stop
from dragoman_agent.model.source import open_model
from dragoman_agent.pal.planner import Limits
from dragoman_agent.pal.planner_cuda import plan_cuda
from dragoman_agent.pal.probe import profile_device

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "transformers_smollm2.json"
MARGIN = 0.5
Answer = tuple[list[int], list[float]]  # tokens, and at each the lead of the best over the second in logprob


def ask(core: EngineCore, prompts: dict[str, list[int]], num_tokens: int, salt: str) -> dict[str, Answer]:
    """Greedy answers of all prompts at once."""
    stop = Stop(max_output_tokens=num_tokens)
    sampling = Sampling(temperature=0.0, num_logprobs=2)
    starts = [Start(name, ids, sampling, stop, credit=1 << 30, cache_salt=salt) for name, ids in prompts.items()]
    answers: dict[str, Answer] = {name: ([], []) for name in prompts}
    for event in run_all(core, starts):
        if isinstance(event, Failed):
            raise RuntimeError(event.message)
        if isinstance(event, Delta):
            answers[event.request_id][0].extend(event.token_ids)
            answers[event.request_id][1].extend(e.top[0][1] - e.top[1][1] for e in event.logprobs)
    return answers


def first_difference(left: list[int], right: list[int]) -> int | None:
    """Index of the first token in which two answers differ."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=True)) if a != b), None)


def check_embedded(core: EngineCore) -> int:
    """Against transformers' float32 tokens: a difference is allowed only where the record's or our own lead is small."""
    record = json.loads(GOLDEN.read_text())
    entries = record["greedy"]
    prompts = {f"e{i}": entry["prompt_ids"] for i, entry in enumerate(entries)}
    answers = ask(core, prompts, len(entries[0]["token_ids"]), "embedded")
    equal = bad = 0
    for i, entry in enumerate(entries):
        tokens, leads = answers[f"e{i}"]
        at = first_difference(tokens, entry["token_ids"][: len(tokens)])
        if at is None:
            equal += 1
        elif leads[at] > MARGIN:
            bad += 1
            print(f"  prompt {i}: token {at} differs although the lead is {leads[at]:.2f}")
    print(f"embedded model: {equal}/{len(entries)} answers equal float32, {bad} differ outside near-ties")
    return bad


def check_concurrent(core: EngineCore) -> int:
    """64 mixed requests at once against each alone."""
    prompts = {f"c{i}": [(i * 7919 + j * 104729) % 40000 + 100 for j in range(1 + (i * 37) % 900)] for i in range(64)}
    together = ask(core, prompts, 32, "together")
    equal = bad = 0
    for name, ids in prompts.items():
        alone = ask(core, {name: ids}, 32, f"alone-{name}")[name]
        at = first_difference(alone[0], together[name][0])
        if at is None:
            equal += 1
        elif alone[1][at] > MARGIN:
            bad += 1
            print(f"  {name}: token {at} differs although the lead is {alone[1][at]:.2f}")
    print(f"64 at once: {equal}/64 equal their answer alone, {bad} differ outside near-ties")
    return bad


def main() -> int:
    """Run both."""
    if len(sys.argv) < 2:
        sys.exit("which model? See the first lines of this file")
    source = open_model(sys.argv[1], Path())
    found = usable_gpu()
    profile, _ = profile_device(found, Path("/tmp/dragoman-check"))
    plan, _ = plan_cuda(profile, source.config, Limits(max_num_seqs=64, memory_utilization=0.2))
    device = CudaDevice()
    device.load(source, plan, lambda _: None)
    core = build_core(device, source, plan)
    bad = check_embedded(core) + check_concurrent(core)
    device.close()
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

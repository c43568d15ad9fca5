"""Prompt log-probabilities and grammar masks on a GPU, through the engine core with random weights of a real shape.

python tests/gpu/check_features.py qwen3-0.6b      exit 1 when a check is off
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from benchmarks.card import usable_gpu
from check_parity import hf_model

from dragoman_agent.device.cuda import CudaDevice
from dragoman_agent.engine.core import EngineCore
from dragoman_agent.engine.local import build_core, run_all
from dragoman_agent.engine.messages import Delta, Failed, GrammarSpec, Opened, Sampling, Start, Stop
from dragoman_agent.model.source import ModelSource, open_model
from dragoman_agent.pal.planner import Limits
from dragoman_agent.pal.planner_cuda import plan_cuda
from dragoman_agent.pal.probe import profile_device

LENGTHS = (2, 65, 300, 1500)
MAX_ERROR = 0.1  # bfloat16 logits of a random model against float32
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "ok": {"type": "boolean"}, "n": {"enum": [1, 2, 3]}},
    "required": ["name", "ok", "n"],
    "additionalProperties": False,
}


def check_prompt_logprobs(core: EngineCore, source: ModelSource) -> int:
    """Against transformers in float32."""
    rng = np.random.default_rng(3)
    prompts = {f"p{n}": rng.integers(0, 50000, n).tolist() for n in LENGTHS}
    sampling = Sampling(temperature=0.0, num_prompt_logprobs=2)
    starts = [Start(name, ids, sampling, Stop(max_output_tokens=1)) for name, ids in prompts.items()]
    scored = {}
    for event in run_all(core, starts):
        if isinstance(event, Failed):
            raise RuntimeError(event.message)
        if isinstance(event, Opened):
            scored[event.request_id] = np.frombuffer(event.logprobs, "<f4")
    model = hf_model(source, torch.float32)
    bad = 0
    for name, ids in prompts.items():
        with torch.inference_mode():
            rows = model(torch.tensor([ids], device="cuda")).logits[0].log_softmax(-1)
        expected = rows[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].cpu().numpy()
        worst = float(np.abs(scored[name] - expected).max()) if len(scored.get(name, ())) == len(expected) else np.inf
        bad += worst > MAX_ERROR
        print(f"prompt log-probabilities, {len(ids)} tokens: largest error {worst:.3f}, at most {MAX_ERROR}")
    return bad


def check_grammar(core: EngineCore) -> int:
    """Every answer under a schema parses, greedy and sampled, beside unmasked rows."""
    stop = Stop(max_output_tokens=600, eos_token_ids=[258])
    grammar = GrammarSpec("json_schema", json.dumps(SCHEMA))
    starts = [
        Start(f"g{i}", [65 + i], Sampling(temperature=float(i % 2), seed=i, grammar=grammar), stop, credit=1 << 20)
        for i in range(16)
    ]
    starts += [Start(f"u{i}", [65 + i], Sampling(temperature=1.0, seed=i), stop, credit=1 << 20) for i in range(16)]
    texts: dict[str, str] = {}
    for event in run_all(core, starts):
        if isinstance(event, Failed):
            raise RuntimeError(f"{event.request_id}: {event.message}")
        if isinstance(event, Delta):
            texts[event.request_id] = texts.get(event.request_id, "") + event.text
    bad = 0
    for name in (f"g{i}" for i in range(16)):
        try:
            value = json.loads(texts[name])
            bad += set(value) != {"name", "ok", "n"} or value["n"] not in (1, 2, 3)
        except ValueError:
            bad += 1
            print(f"  {name}: {texts[name][:80]!r}")
    print(f"grammar: {16 - bad}/16 answers parse")
    return bad


def main() -> int:
    """Run both."""
    if len(sys.argv) < 2:
        sys.exit("which model? See the first lines of this file")
    source = open_model(f"random:{sys.argv[1]}", Path())
    found = usable_gpu()
    profile, _ = profile_device(found, Path("/tmp/dragoman-check"))
    plan, _ = plan_cuda(
        profile, source.config, Limits(max_context_tokens=4096, max_num_seqs=64, memory_utilization=0.2)
    )
    device = CudaDevice()
    device.load(source, plan, lambda _: None)
    core = build_core(device, source, plan)
    bad = check_grammar(core) + check_prompt_logprobs(core, source)
    device.close()
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

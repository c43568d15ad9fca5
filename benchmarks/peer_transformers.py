"""Decode and prefill of one model with random weights on a GPU through transformers, beside our engine's figures of the same minutes.

    python -m benchmarks.peer_transformers MODEL [--ours FILE] [--out FILE] [--seconds 150] [--parts b1,...]

`--ours`: what `engine_gpu MODEL --out FILE` left on this card in the last half hour. The --out FILE is written anew after each part.
A part for which the time is too short is left out and said so. Exit 1 when a part failed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.card import Result, environment, result, usable_gpu

from dragoman_agent.model.random_source import CONFIG_DIR

BENCH = "peer_transformers"
PROMPT_TOKENS = 128
OUTPUTS = 256  # as ours makes at 32 and 256 sequences; at 1 ours makes 512, so its mean context is longer and the peer's static cache shorter
EAGER_OUTPUTS = 64
MAX_TOKEN = 10000  # ids of prompts, as in engine_gpu
REPEATS = 3
MAX_AGE_SECONDS = 1800.0  # of our figures
# Of the same card with transformers 5.17.0; static: a whole call of 96 tokens with its prompt.
ANCHORS = {
    ("qwen3-0.6b", "b1"): 3.645, ("qwen3-0.6b", "b1-eager"): 23.95, ("qwen3-0.6b", "1x8192"): 143094.0,
    ("llama-3.2-1b", "b1"): 2.819, ("llama-3.2-1b", "b1-eager"): 15.334, ("llama-3.2-1b", "1x8192"): 162815.0,
    ("qwen3-8b", "b1"): 7.757, ("qwen3-8b", "b1-eager"): 31.377, ("qwen3-8b", "1x8192"): 29156.0,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Part:
    """One figure. `length`: tokens of a prompt; `outputs`: tokens that decode makes, 0 of a prefill; `ours`: (bench, case) of it."""

    case: str
    batch: int
    length: int
    outputs: int
    static: bool  # cache and compile; eager with a dynamic cache otherwise
    expected_seconds: float
    ours: tuple[str, str]

    @property
    def metric(self) -> str:
        return "ms_per_step" if self.outputs else "tokens_per_second"

    @property
    def unit(self) -> str:
        return "ms" if self.outputs else "1/s"


# The cheap ones and those with bars come first.
PARTS = (
    Part("1x8192", 1, 8192, 0, False, 8.0, ("prefill", "1x8192")),
    Part("16x1024", 16, 1024, 0, False, 5.0, ("prefill", "16x1024")),
    Part("b1", 1, PROMPT_TOKENS, OUTPUTS, True, 60.0, ("decode", "b1")),
    Part("b32", 32, PROMPT_TOKENS, OUTPUTS, True, 60.0, ("decode", "b32")),
    Part("b1-eager", 1, PROMPT_TOKENS, EAGER_OUTPUTS, False, 10.0, ("decode", "b1")),
    Part("b256-eager", 256, PROMPT_TOKENS, EAGER_OUTPUTS, False, 20.0, ("decode", "b256")),
)


class Peer:
    """A model of transformers' own class with random bfloat16 weights, made where it runs."""

    def __init__(self, config: Mapping[str, Any], device: str, *, compiles: bool = True, **generate: Any) -> None:
        """`config`: a Hugging Face config.json. `compiles`: a static cache does. `generate`: more of each such call."""
        import torch
        import transformers

        kind = getattr(transformers, config["architectures"][0])
        made = kind.config_class(**config)
        with torch.device(device):
            self.model = kind._from_config(made, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
        settings = self.model.generation_config
        settings.eos_token_id, settings.pad_token_id = None, 0  # runs to its length
        self.torch, self.device, self.compiles = torch, device, compiles
        self._most = min(MAX_TOKEN, made.vocab_size)
        self._generate = generate

    def prompts(self, batch: int, length: int, seed: int) -> Any:
        """[batch, length] token ids."""
        rng = random.Random(seed)
        rows = [[rng.randrange(self._most) for _ in range(length)] for _ in range(batch)]
        return self.torch.tensor(rows, device=self.device)

    def seconds(self, work: Callable[[], Any]) -> float:
        """Of `work` until the device has done it."""
        self._wait()
        begin = time.perf_counter()
        work()
        self._wait()
        return time.perf_counter() - begin

    def _wait(self) -> None:
        if self.device.startswith("cuda"):
            self.torch.cuda.synchronize()

    def generate_seconds(self, prompts: Any, outputs: int, *, static: bool) -> float:
        """Of one greedy call of `generate` that makes `outputs` tokens a prompt."""
        chosen: dict[str, Any] = {"cache_implementation": "static"} if static else {}
        chosen |= self._generate if static and self.compiles else {"disable_compile": True}
        ids: list[Any] = []

        def call() -> None:
            mask = self.torch.ones_like(prompts)
            ids.append(
                self.model.generate(prompts, attention_mask=mask, do_sample=False, max_new_tokens=outputs, **chosen)
            )

        seconds = self.seconds(call)
        if ids[0].shape[1] != prompts.shape[1] + outputs:
            raise RuntimeError(f"generate made {ids[0].shape[1] - prompts.shape[1]} tokens of {outputs}")
        return seconds

    def first_token_seconds(self, prompts: Any) -> float:
        """Of one forward pass over the prompts, which fills a dynamic cache, until their next tokens are with the host."""
        kept: list[Any] = []

        def call() -> None:
            with self.torch.no_grad():
                logits = self.model(prompts, use_cache=True, logits_to_keep=1).logits
            kept.extend((logits[:, -1].argmax(-1).cpu(), logits))

        seconds = self.seconds(call)
        if kept[1].shape[1] != 1 or not bool(kept[1].isfinite().all()):
            raise RuntimeError(f"logits of shape {tuple(kept[1].shape)} are not one finite row a prompt")
        return seconds

    def reset_compiled(self) -> None:
        """The next shape is compiled for itself: another batch would make the compiler take it as a variable."""
        self.torch.compiler.reset()
        self.torch._dynamo.utils.counters.clear()

    def compiled(self) -> dict[str, int]:
        """What the compiler says of itself since the reset."""
        counters = self.torch._dynamo.utils.counters
        names = (("stats", "unique_graphs"), ("inductor", "cudagraph_skips"))
        return {name: int(counters[group][name]) for group, name in names}


def decode(peer: Peer, part: Part, repeats: int = REPEATS) -> Result:
    """Milliseconds a step, as ours: (wall - wall of the same call with one token) / (tokens - 1)."""
    compiles = part.static and peer.compiles
    if compiles:
        peer.reset_compiled()
    # Whole calls, whose static cache is as long as that of all others; the second one records the graphs that later ones replay.
    warm = [
        peer.generate_seconds(peer.prompts(part.batch, part.length, seed), part.outputs, static=part.static)
        for seed in (1, 2)[: 2 if compiles else 1]
    ]
    said = peer.compiled() if compiles else {}
    if compiles and not said["unique_graphs"]:
        raise RuntimeError(
            "generate with a static cache compiled nothing, so this would be no figure of compiled decode"
        )
    samples, settled = [], []
    half = part.outputs // 2
    for repeat in range(repeats):
        prompts = [peer.prompts(part.batch, part.length, 10 * (repeat + 1) + n) for n in range(3)]
        short, middle, long = (
            peer.generate_seconds(each, outputs, static=part.static)
            for each, outputs in zip(prompts, (1, half, part.outputs), strict=True)
        )
        samples.append((long - short) / (part.outputs - 1) * 1e3)
        settled.append((long - middle) / (part.outputs - half) * 1e3)
    cache = "static cache" if part.static else "dynamic cache, eager"
    note = f"generate, sdpa, {cache}, prompt {part.length}, {part.outputs} tokens; {statistics.median(settled):.3f} ms a step over the second half"
    if compiles:
        again = peer.compiled()
        note += f"; compiled in {warm[0]:.0f} s ({', '.join(f'{name} {again[name]}' for name in again)})"
        if again["unique_graphs"] != said["unique_graphs"]:
            note += f"; COMPILED AGAIN while it was timed: {said['unique_graphs']} graphs before"
    elif part.static:
        note += "; not compiled"
    return result(BENCH, part.case, part.metric, part.unit, samples, note=note)


def prefill(peer: Peer, part: Part, repeats: int = REPEATS) -> Result:
    """Prompt tokens a second until all have their first token."""
    seconds = [peer.first_token_seconds(peer.prompts(part.batch, part.length, seed)) for seed in range(2 + repeats)][2:]
    note = "forward, eager, sdpa, logits of the last token alone"
    rates = [part.batch * part.length / each for each in seconds]
    return result(BENCH, part.case, part.metric, part.unit, rates, note=note)


def ratio(theirs: Mapping[str, Any], part: Part, ours: Sequence[Mapping[str, Any]], peer_name: str) -> Result | None:
    """How many times as quick ours is: our median over each of the peer's samples. None where ours has no such figure."""
    one = {(each["bench"], each["case"]): each for each in ours}.get(part.ours)
    if one is None:
        return None
    own = statistics.median(one["samples"])

    def quicker(peer: float, us: float) -> float:
        return peer / us if part.outputs else us / peer  # times, or rates

    guesses = theirs.get("predicted"), one.get("predicted")
    return result(
        BENCH, theirs["case"], "ours_over_transformers", "ratio", [quicker(each, own) for each in theirs["samples"]],
        predicted=quicker(guesses[0], guesses[1]) if guesses[0] and guesses[1] else None,
        peer={"name": peer_name, "value": statistics.median(theirs["samples"])},
        note=f"median of ours, {own:.6g} {part.unit} ({' '.join(part.ours)}), over each run of the peer; {theirs['note']}",
    )  # fmt: skip


@dataclass(slots=True)
class Session:
    """Runs the parts while there is time; owns what came of them, which `keep` writes after each."""

    model: str
    ends: float  # by time.monotonic()
    keep: Callable[[Session], None] = lambda _: None
    ours: Sequence[Mapping[str, Any]] = ()
    peer_name: str = "transformers"
    results: list[Result] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def run(self, peer: Peer, parts: Sequence[Part]) -> None:
        """Each part is tried although another failed."""
        compile_seconds = 0.0
        for part in parts:
            compiles = part.static and peer.compiles
            # A second compilation takes about as long as the first, whatever was expected of it.
            expected = compile_seconds if compiles and compile_seconds else part.expected_seconds
            left = self.ends - time.monotonic()
            if left < expected:
                self.left_out[part.case] = f"{left:.0f} s were left of about {expected:.0f} s that it takes"
                print(f"  left out: {part.case}: {self.left_out[part.case]}", flush=True)
            else:
                begin = time.monotonic()
                self._measure(peer, part)
                if compiles:
                    compile_seconds = time.monotonic() - begin
            self.keep(self)

    def _measure(self, peer: Peer, part: Part) -> None:
        try:
            theirs = decode(peer, part) if part.outputs else prefill(peer, part)
        except Exception as error:  # of torch or transformers: the other parts do not need this one
            traceback.print_exc()
            self.failed[part.case] = f"{type(error).__name__}: {str(error)[:500]}"
            print(f"  FAILED: {part.case}: {self.failed[part.case]}", flush=True)
            return
        if part.static and not peer.compiles:
            theirs["case"] = f"{part.case}-uncompiled"  # another thing than what the case's name stands for
        theirs["predicted"] = ANCHORS.get((self.model, str(theirs["case"])))
        compared = ratio(theirs, part, self.ours, self.peer_name)
        if self.ours and compared is None:
            print(f"  {part.case}: our results have no {' '.join(part.ours)} to compare with", flush=True)
        for one in (theirs, compared) if compared else (theirs,):
            self.results.append(one)
            print(f"  {one['case']} {one['metric']}: {one}", flush=True)


def read_ours(path: Path, model: str, card: Mapping[str, Any], now: float) -> list[dict[str, Any]]:
    """The results in a file of `engine_gpu`. Exits where they are not of this model, card and half hour. `now`: by time.time()."""
    try:
        body = json.loads(path.read_text())
        results: list[dict[str, Any]] = body["results"]
        age = now - path.stat().st_mtime
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(
            f"--ours {path} holds no results of engine_gpu ({error!r}); run `engine_gpu {model} --benches decode,prefill "
            f"--out {path}` first, or leave --ours out"
        ) from error
    differences = [
        f"it is of {body.get(name)!r}, not {value!r}"
        for name, value in (("model", model), ("device", card["device"]), ("driver", card["driver"]))
        if body.get(name) != value
    ]
    if age > MAX_AGE_SECONDS:
        differences.append(f"it is {age / 60:.0f} minutes old, and more than {MAX_AGE_SECONDS / 60:.0f} is no same run")
    if differences:
        raise SystemExit(f"--ours {path} does not compare: {'; '.join(differences)}; run engine_gpu {model} here first")
    return results


def write(path: Path | None, session: Session, card: Mapping[str, Any]) -> None:
    """What was measured so far, in the shape of `card.keep`, of `card` with the peer's version. No `path`, no file."""
    if path is not None:
        command = f"python -m benchmarks.peer_transformers {session.model}"
        body = {"model": session.model, "command": command, "left_out": session.left_out, "failed": session.failed}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**body, "results": session.results, **card}, indent=1) + "\n")


def read_config(name: str) -> dict[str, Any]:
    """The packaged config of a model. Exits with the names that there are."""
    path = CONFIG_DIR / f"{name}.json"
    if not path.is_file():
        names = ", ".join(sorted(each.stem for each in CONFIG_DIR.glob("*.json")))
        raise SystemExit(f"no packaged config of model {name!r}; there are {names}")
    config: dict[str, Any] = json.loads(path.read_text())
    return config


def chosen_parts(names: str) -> list[Part]:
    """The parts named, in our order. Exits on a name that is none."""
    wanted = names.split(",")
    known = [part.case for part in PARTS]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise SystemExit(f"--parts: {', '.join(unknown)} is none of {', '.join(known)}")
    return [part for part in PARTS if part.case in wanted]


def main() -> int:
    """Run and print; `--out` gets the raw results."""
    begin = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--ours", type=Path, help="raw results of engine_gpu on this card")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=150.0, help="no part begins that would end later")
    parser.add_argument("--parts", default=",".join(part.case for part in PARTS))
    parser.add_argument("--no-compile", action="store_true", help="static cache, not compiled")
    options = parser.parse_args()
    config, parts = read_config(options.model), chosen_parts(options.parts)
    found = usable_gpu()
    card = environment(found.facts.index)
    ours = read_ours(options.ours, options.model, card, time.time()) if options.ours else []
    try:
        import transformers
    except ImportError as error:
        raise SystemExit(f"transformers is not installed here ({error}); it is what this benchmark measures") from error

    card["versions"] = {**card["versions"], "transformers": transformers.__version__}  # type: ignore[dict-item]
    peer = Peer(config, f"cuda:{found.facts.index}", compiles=not options.no_compile)
    print(f"{options.model} is ready after {time.monotonic() - begin:.1f} s", flush=True)
    session = Session(
        options.model, begin + options.seconds, lambda one: write(options.out, one, card), ours,
        f"transformers-{transformers.__version__}",
    )  # fmt: skip
    session.run(peer, parts)
    print(f"{len(session.results)} results after {time.monotonic() - begin:.0f} s", flush=True)
    return 1 if session.failed else 0


if __name__ == "__main__":
    sys.exit(main())

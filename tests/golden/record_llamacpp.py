"""Record llama.cpp's tokenization and teacher-forced tokens for the embedded model: `python tests/golden/record_llamacpp.py`.

Needs the bench extra (xllamacpp) and the embedded model; not run by `make test`. Writes llamacpp_smollm2.json beside
this file:

    {
      "peer": {"xllamacpp": version, "system": llama.cpp's build and CPU flags},
      "model": {"file": name, "sha256": digest},
      "tokenization": [{"text": str, "plain": [ids], "parsed": [ids]}, ...]      200 strings, add_special off;
          "plain" with parse_special false, "parsed" with parse_special true
      "pre": {name: {"sha256": digest of the JSON of all "plain" ids, "plain": [[ids], ...] or null}, ...}
          the same strings and vocabulary under another `tokenizer.ggml.pre`; null where the digest repeats an earlier one
      "teacher_forced": [{"text": str, "token_ids": [n ids], "top1": [n ids], "top1_logprob": [n], "top2": [n ids],
                          "top2_logprob": [n]}, ...]
          entry i of the four lists is the prediction after token_ids[: i + 1]; 1,000 positions or more in all
    }
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import xllamacpp
from golden_texts import STRINGS, TEXTS

from dragoman_agent.model.embedded import default_cache_dir, embedded_path
from dragoman_agent.model.gguf import GgufFile
from dragoman_agent.model.gguf_tokenizer import PRE_TOKENIZERS

TARGET = Path(__file__).with_name("llamacpp_smollm2.json")
MIN_POSITIONS = 1000


class Peer:
    """llama.cpp's server in this process, on one thread and a free loopback port."""

    def __init__(self, model: Path) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = str(model)
        params.n_ctx, params.n_parallel, params.warmup = 1024, 1, False
        params.hostnames, params.port, params.verbosity = ["127.0.0.1"], 0, 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        self._server = xllamacpp.Server(params)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """A JSON reply of the server's HTTP interface."""
        request = urllib.request.Request(
            self._server.listening_address + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as reply:
            value: dict[str, Any] = json.load(reply)
        return value

    def tokenize(self, text: str, *, parse_special: bool) -> list[int]:
        """Ids without BOS."""
        body = {"content": text, "add_special": False, "parse_special": parse_special}
        ids: list[int] = self.post("/tokenize", body)["tokens"]
        return ids

    def best_two(self, token_ids: list[int]) -> list[tuple[int, float]]:
        """The two likeliest next tokens with their log probabilities, the likelier first."""
        reply = self.post(
            "/completion",
            {
                "prompt": token_ids,
                "n_predict": 1,
                "temperature": 0,
                "n_probs": 2,
                "cache_prompt": True,
                "samplers": ["top_k"],
                "top_k": 2,
            },
        )
        best = reply["completion_probabilities"][0]["top_logprobs"]
        return [(entry["id"], round(entry["logprob"], 4)) for entry in best]


def with_pre(model: Path, name: str, target: Path) -> None:
    """A copy of `model` whose `tokenizer.ggml.pre` is `name`; tensors stay where they are relative to the data."""
    file = GgufFile(model)
    data = model.read_bytes()
    key, old = b"tokenizer.ggml.pre", str(file.metadata["tokenizer.ggml.pre"]).encode()
    entry = key + struct.pack("<IQ", 8, len(old)) + old
    if data.count(entry, 0, file.header_bytes) != 1:
        raise SystemExit(f"{model}: {key.decode()} was not found once")
    changed = key + struct.pack("<IQ", 8, len(name)) + name.encode()
    header = data[: file.header_bytes].replace(entry, changed)
    padding = bytes(-len(header) % file.alignment)
    start = file.header_bytes + -file.header_bytes % file.alignment
    target.write_bytes(header + padding + data[start:])


def record_pre(model: Path) -> dict[str, Any]:
    """Ids of all strings under every pre-tokenizer name the agent knows."""
    recorded: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in PRE_TOKENIZERS:
            copy = Path(folder) / "model.gguf"
            with_pre(model, name, copy)
            peer = Peer(copy)
            ids = [peer.tokenize(text, parse_special=False) for text in STRINGS]
            digest = hashlib.sha256(json.dumps(ids).encode()).hexdigest()
            seen = any(entry["sha256"] == digest for entry in recorded.values())
            recorded[name] = {"sha256": digest, "plain": None if seen else ids}
            del peer
            copy.unlink()
    return recorded


def record_teacher_forced(peer: Peer) -> list[dict[str, Any]]:
    """Predictions at every position of every text."""
    recorded = []
    for text in TEXTS:
        token_ids = peer.tokenize(text, parse_special=True)
        pairs = [peer.best_two(token_ids[: end + 1]) for end in range(len(token_ids))]
        recorded.append(
            {
                "text": text,
                "token_ids": token_ids,
                "top1": [first[0] for first, _ in pairs],
                "top1_logprob": [first[1] for first, _ in pairs],
                "top2": [second[0] for _, second in pairs],
                "top2_logprob": [second[1] for _, second in pairs],
            }
        )
    return recorded


def main() -> None:
    """Record everything and write the file."""
    model = embedded_path(default_cache_dir(os.environ))
    peer = Peer(model)
    tokenization = [
        {
            "text": text,
            "plain": peer.tokenize(text, parse_special=False),
            "parsed": peer.tokenize(text, parse_special=True),
        }
        for text in STRINGS
    ]
    teacher_forced = record_teacher_forced(peer)
    num_positions = sum(len(entry["token_ids"]) for entry in teacher_forced)
    if num_positions < MIN_POSITIONS:
        raise SystemExit(f"the texts have {num_positions} positions, {MIN_POSITIONS} are needed; lengthen them")
    record = {
        "peer": {"xllamacpp": xllamacpp.__version__, "system": " ".join(str(xllamacpp.get_system_info()).split())},
        "model": {"file": model.name, "sha256": hashlib.sha256(model.read_bytes()).hexdigest()},
        "tokenization": tokenization,
        "pre": record_pre(model),
        "teacher_forced": teacher_forced,
    }
    TARGET.write_text(json.dumps(record, ensure_ascii=True, separators=(",", ":")) + "\n")
    print(f"{TARGET}: {len(tokenization)} strings, {num_positions} positions")


if __name__ == "__main__":
    main()

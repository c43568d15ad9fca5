"""Record transformers' greedy tokens for the embedded model: `python tests/golden/record_transformers.py`.

LlamaForCausalLM in float32 on the weights as the `gguf` library dequantises them; none of this project's code computes
the tokens. Needs the dev extra and the embedded model; takes minutes; not run by `make test`. Writes
transformers_smollm2.json beside this file:

    {
      "peer": {"transformers": version, "torch": version, "gguf": version, "attention": "sdpa"},
      "model": {"file": name, "sha256": digest},
      "greedy": [{"name": str, "prompt_ids": [ids], "token_ids": [64 ids], "margins": [64]}, ...]     20 prompts;
          "margins" is the best logit less the second best; no token ends the text early
    }
"""

from __future__ import annotations

import hashlib
import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from gguf import GGUFReader
from gguf.quants import dequantize
from transformers_prompts import CHATS, PLAIN

from dragoman_agent.model.embedded import default_cache_dir, embedded_path
from dragoman_agent.model.source import open_model
from dragoman_text.chat import ChatTemplate
from dragoman_text.tokenizer import TextTokenizer

TARGET = Path(__file__).with_name("transformers_smollm2.json")
NUM_TOKENS = 64

_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def load_reference(path: Path) -> Any:
    """LlamaForCausalLM in float32 from a Llama GGUF file."""
    reader = GGUFReader(str(path))

    def number(key: str) -> Any:
        return reader.fields[f"llama.{key}"].contents()

    heads, kv_heads = number("attention.head_count"), number("attention.head_count_kv")
    state: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        values = np.array(dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(tensor.shape[::-1].tolist())
        if tensor.name in ("token_embd.weight", "output_norm.weight"):
            state["model.embed_tokens.weight" if "embd" in tensor.name else "model.norm.weight"] = torch.from_numpy(
                values
            )
            continue
        _, layer, part, _ = tensor.name.split(".")
        if part in ("attn_q", "attn_k"):
            count = heads if part == "attn_q" else kv_heads
            values = values.reshape(count, -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        state[f"model.layers.{layer}.{_NAMES[part]}.weight"] = torch.from_numpy(np.ascontiguousarray(values))
    config = transformers.LlamaConfig(
        vocab_size=state["model.embed_tokens.weight"].shape[0],
        hidden_size=number("embedding_length"),
        intermediate_size=number("feed_forward_length"),
        num_hidden_layers=number("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=number("context_length"),
        rms_norm_eps=number("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": number("rope.freq_base")},
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    model = transformers.LlamaForCausalLM(config).eval()
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    return model


def greedy(model: Any, prompt_ids: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
    """Tokens and the margin of each."""
    out = model.generate(
        torch.tensor([prompt_ids]),
        attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.int64),
        max_new_tokens=num_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(out.logits).topk(2, dim=-1).values
    margins = [round(float(value), 4) for value in best[:, 0] - best[:, 1]]
    return out.sequences[0, len(prompt_ids) :].tolist(), margins


def prompts(cache_dir: Path) -> dict[str, list[int]]:
    """Token ids of every prompt by its name."""
    files = open_model("embedded", cache_dir).tokenizer
    tokenizer, template = TextTokenizer.from_files(files), ChatTemplate(files)
    made = {f"chat-{i}": template.encode(tokenizer, messages) for i, messages in enumerate(CHATS)}
    return made | {f"plain-{i}": tokenizer.encode(text) for i, text in enumerate(PLAIN)}


def main() -> None:
    cache_dir = default_cache_dir(os.environ)
    path = embedded_path(cache_dir)
    model = load_reference(path)
    recorded = []
    for name, prompt_ids in prompts(cache_dir).items():
        token_ids, margins = greedy(model, prompt_ids, NUM_TOKENS)
        recorded.append({"name": name, "prompt_ids": prompt_ids, "token_ids": token_ids, "margins": margins})
        print(f"{name}: {len(prompt_ids)} + {len(token_ids)} tokens, least margin {min(margins)}")
    record = {
        "peer": {name: version(name) for name in ("transformers", "torch", "gguf")} | {"attention": "sdpa"},
        "model": {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()},
        "greedy": recorded,
    }
    TARGET.write_text(json.dumps(record, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

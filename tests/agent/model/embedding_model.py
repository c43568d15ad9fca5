"""A small Qwen3-Embedding as its publisher lays it out: weights by transformers, and the files of sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tests.agent.model.checkpoints import save_checkpoint
from tokenizers import Tokenizer, processors

TASK = "Given a web search query, retrieve relevant passages that answer the query"
MODES = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
KINDS = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
END = "<|end|>"


def modules(*folders: str, library: str = "sentence_transformers.models") -> list[dict[str, Any]]:
    """modules.json with these folders' steps."""
    return [
        {"idx": i, "name": str(i), "path": folder, "type": f"{library}.{KINDS.get(folder, folder)}"}
        for i, folder in enumerate(folders)
    ]


def write_layout(
    directory: Path,
    *,
    steps: list[dict[str, Any]] | None = None,
    pooling: dict[str, Any] | None = None,
    prompts: dict[str, Any] | None = None,
    limits: dict[str, Any] | None = None,
    width: int = 64,
) -> None:
    """The files that say how to embed, each in the publisher's words unless given."""
    flags = {f"pooling_mode_{mode}": mode == "lasttoken" for mode in MODES}
    files: dict[str, Any] = {
        "modules.json": modules(*KINDS) if steps is None else steps,
        "1_Pooling/config.json": pooling or {"word_embedding_dimension": width, **flags, "include_prompt": True},
        "config_sentence_transformers.json": prompts
        or {
            "prompts": {"query": f"Instruct: {TASK}\nQuery:", "document": ""},
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
        },
    }
    if limits is not None:
        files["sentence_bert_config.json"] = limits
    for name, value in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(json.dumps(value))
    (directory / "2_Normalize").mkdir(exist_ok=True)


def save_embedding_model(directory: Path, *, dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    """The whole model; its tokenizer ends each text with the end token. Returns transformers' decoder."""
    sizes: dict[str, Any] = {"tie_word_embeddings": True, "head_dim": 32, "num_key_value_heads": 2} | config
    model = save_checkpoint(directory, "qwen3", base=True, dtype=dtype, **sizes)
    path = directory / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    end = tokenizer.token_to_id(END)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {END}", special_tokens=[(END, end)])
    tokenizer.save(str(path))
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    settings |= {"padding_side": "left", "pad_token": END}
    settings.pop("bos_token", None)
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    write_layout(directory, width=int(model.config.hidden_size))
    return model

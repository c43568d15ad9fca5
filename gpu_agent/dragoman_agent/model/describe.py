"""What a model is, in words and numbers for people."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from dragoman_agent.model.source import ModelSource


def describe(source: ModelSource) -> dict[str, Any]:
    """Configuration, rotary scaling, end tokens, template, sizes and dtypes of a checked model; weights are not read.

    Values are JSON types; what a model does not have is None.
    """
    config, generation = source.config, source.generation
    facts: dict[str, Any] = {
        "name": source.name,
        "path": str(source.path),
        "digest": source.digest,
        "num_parameters": config.num_parameters,
        "total_bytes": source.total_bytes,
        "kv_bytes_per_token": config.kv_bytes_per_token,
        "dtypes": dict(Counter(source.layout(name).dtype for name in source.tensor_names())),
        "files": [str(path.name) for path in source.files],
        "random_seed": source.random_seed,
    }
    for field in dataclasses.fields(config):
        if field.name not in ("name", "rope_scaling", "eos_token_ids"):
            facts[field.name] = getattr(config, field.name)
    scaling = config.rope_scaling
    facts["rope_scaling"] = None if scaling.kind == "none" else dataclasses.asdict(scaling)
    facts["eos_token_ids"] = list(generation.eos_token_ids)
    facts["chat_template"] = source.tokenizer.chat_template is not None
    facts["generation"] = {
        field.name: getattr(generation, field.name)
        for field in dataclasses.fields(generation)
        if field.name != "eos_token_ids" and getattr(generation, field.name) is not None
    }
    return facts

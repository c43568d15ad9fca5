"""Tiny checkpoints and tokenizers made by transformers and tokenizers, as publishers make theirs."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEMPLATE = (
    "{{ bos_token or '' }}{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIALS = ["<|bos|>", "<|start|>", "<|end|>", "<|stop|>"]
FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
SIZES: dict[str, Any] = {
    "vocab_size": 400,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.08,
    "bos_token_id": None,
    "eos_token_id": 2,
}


@cache
def trained_tokenizer(kind: str) -> str:
    """tokenizer.json of a byte-level BPE trained on this repository's README.

    `llama3`: three digits a piece, whole words first, BOS by the post-processor. `qwen`: single digits, NFC, no BOS.
    """
    llama3 = kind == "llama3"
    tokenizer = Tokenizer(models.BPE(ignore_merges=llama3))
    if not llama3:
        tokenizer.normalizer = normalizers.NFC()
    pattern = Regex(WORDS.replace("DIGITS", "{1,3}" if llama3 else ""))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=380, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([(Path(__file__).parents[3] / "README.md").read_text()], trainer)
    if llama3:
        tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    return str(tokenizer.to_str())


def save_tokenizer(directory: Path, kind: str = "llama3", **options: Any) -> None:
    """tokenizer.json and its companions, written by transformers."""
    bos = {"bos_token": "<|bos|>"} if kind == "llama3" else {}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(trained_tokenizer(kind)),
        eos_token="<|end|>",
        chat_template=TEMPLATE,
        **bos,
        **options,
    ).save_pretrained(directory)


def save_checkpoint(
    directory: Path,
    family: str = "llama",
    *,
    max_shard_size: str = "1GB",
    dtype: torch.dtype = torch.float32,
    base: bool = False,
    **config: Any,
) -> Any:
    """A random model of a family with its tokenizer, saved by transformers; returns the model.

    `base` saves the decoder alone, without `model.` before its names.
    """
    known = getattr(transformers, f"{FAMILIES[family]}Config")(**SIZES | config)
    torch.manual_seed(1)
    model = getattr(transformers, f"{FAMILIES[family]}{'Model' if base else 'ForCausalLM'}")(known)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "norm.weight")):  # transformers starts them at 0 and 1, which hides mistakes
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model = model.to(dtype).eval()
    model.save_pretrained(directory, safe_serialization=True, max_shard_size=max_shard_size)
    save_tokenizer(directory)
    return model

"""A tokenizer.json from a GGUF file's metadata, chosen by `tokenizer.ggml.model` and `tokenizer.ggml.pre`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from dragoman_agent.model.gguf import GgufFile
from dragoman_agent.model.metadata import Metadata
from dragoman_text.files import TokenizerFiles
from dragoman_text.tokenizer import added_token_json

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

_WORDS_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS_LLAMA3 = _WORDS_QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_SPLITS_DEFAULT = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How text is cut before byte-pair merges."""

    single_digits: bool = False  # every numeric character stands alone before anything else
    splits: tuple[str, ...] = ()  # patterns instead of GPT-2's, each applied to what the one before left
    ignore_merges: bool = False  # a word that is in the vocabulary is taken whole
    add_bos: bool = False  # where the file does not say


_GPT2 = PreTokenizer()
_GPT2_SINGLE_DIGITS = PreTokenizer(single_digits=True)
_QWEN2 = PreTokenizer(splits=(_WORDS_QWEN2,))
_LLAMA3 = PreTokenizer(splits=(_WORDS_LLAMA3,), ignore_merges=True, add_bos=True)

PRE_TOKENIZERS: Final = MappingProxyType(
    {
        "default": PreTokenizer(splits=_SPLITS_DEFAULT),
        "gpt-2": _GPT2,
        "phi-2": _GPT2,
        "smollm": _GPT2_SINGLE_DIGITS,
        "starcoder": _GPT2_SINGLE_DIGITS,
        "refact": _GPT2_SINGLE_DIGITS,
        "command-r": _GPT2_SINGLE_DIGITS,
        "qwen2": _QWEN2,
        "stablelm2": _QWEN2,
        "deepseek-r1-qwen": _QWEN2,
        "llama-bpe": _LLAMA3,
        "llama3": _LLAMA3,
        "llama-v3": _LLAMA3,
    }
)


def tokenizer_files_from_gguf(file: GgufFile) -> TokenizerFiles:
    """The file's tokenizer, chat template and special tokens. Raises ModelFileError for a kind that is not known."""
    metadata = Metadata(file)
    build = _MODELS.get(metadata.required_text("tokenizer.ggml.model"))
    if build is None:
        raise file.fail(
            f"tokenizer model {metadata.text('tokenizer.ggml.model')!r} is not supported (known: {', '.join(_MODELS)})",
            "use a model with such a tokenizer",
        )
    vocabulary = _vocabulary(metadata)
    tokens = list(vocabulary)
    value, add_bos = build(metadata, vocabulary)
    value |= {"version": "1.0", "added_tokens": _added_tokens(metadata, tokens)}
    eos_ids = end_token_ids(metadata, len(tokens))
    bos_id = _token_id(metadata, "tokenizer.ggml.bos_token_id", len(tokens))
    if metadata.flag("tokenizer.ggml.add_eos_token", False) and eos_ids:
        value["post_processor"] = _append_token_json(tokens[eos_ids[0]], eos_ids[0])
    return TokenizerFiles(
        tokenizer_json=json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass"),
        chat_template=metadata.text("tokenizer.chat_template"),
        bos_token=None if bos_id is None else tokens[bos_id],
        eos_token=tokens[eos_ids[0]] if eos_ids else None,
        bos_token_id=bos_id,
        eos_token_ids=tuple(sorted(eos_ids)),
        add_bos_token=metadata.flag("tokenizer.ggml.add_bos_token", add_bos) and bos_id is not None,
    )


def _byte_level(metadata: Metadata, vocabulary: dict[str, int]) -> tuple[dict[str, Any], bool]:
    """`gpt2`: byte-level BPE. Also whether a BOS is added where the file does not say."""
    pre = _pre_tokenizer(metadata)
    value = {
        "pre_tokenizer": _pre_tokenizer_json(pre),
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {
            "type": "BPE",
            "ignore_merges": pre.ignore_merges,
            "vocab": vocabulary,
            "merges": _merges(metadata, vocabulary),
        },
    }
    return value, pre.add_bos


def _sentencepiece(metadata: Metadata, vocabulary: dict[str, int]) -> tuple[dict[str, Any], bool]:
    """`llama`: pieces with scores. Joining the best-scored neighbours first is BPE whose merges are ranked by score."""
    prefix = metadata.flag("tokenizer.ggml.add_space_prefix", True)
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    unspace = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    value = {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Prepend", "prepend": "▁"}, space] if prefix else [space],
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [unspace, {"type": "ByteFallback"}, {"type": "Fuse"}, *([strip] if prefix else [])],
        },
        "model": {
            "type": "BPE",
            "unk_token": _unknown_token(metadata, vocabulary),
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": vocabulary,
            "merges": _scored_merges(metadata, vocabulary),
        },
    }
    return value, True


_MODELS: Final[MappingProxyType[str, Callable[[Metadata, dict[str, int]], tuple[dict[str, Any], bool]]]] = (
    MappingProxyType({"gpt2": _byte_level, "llama": _sentencepiece})
)


def _vocabulary(metadata: Metadata) -> dict[str, int]:
    tokens = metadata.strings("tokenizer.ggml.tokens")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise metadata.fail("the tokenizer names a token twice")
    return vocabulary


def _unknown_token(metadata: Metadata, vocabulary: dict[str, int]) -> str | None:
    token_id = _token_id(metadata, "tokenizer.ggml.unknown_token_id", len(vocabulary))
    return None if token_id is None else list(vocabulary)[token_id]


def _scored_merges(metadata: Metadata, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Every way to make a piece from two others, the best-scored piece first."""
    scores = metadata.numbers("tokenizer.ggml.scores")
    types = metadata.integers("tokenizer.ggml.token_type")
    if len(scores) != len(vocabulary) or len(types) != len(vocabulary):
        raise metadata.fail(
            f"the tokenizer has {len(vocabulary)} tokens but {len(scores)} scores and {len(types)} token types"
        )
    ranked = sorted(
        (piece for piece, token_id in vocabulary.items() if len(piece) > 1 and types[token_id] == NORMAL),
        key=lambda piece: -scores[vocabulary[piece]],
    )
    return [
        (piece[:cut], piece[cut:])
        for piece in ranked
        for cut in range(1, len(piece))
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary
    ]


def end_token_ids(metadata: Metadata, num_tokens: int) -> list[int]:
    """Every token the metadata calls an end (of sequence, turn or message), the sequence's own first."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    named = [_token_id(metadata, key, num_tokens) for key in keys]
    return list(dict.fromkeys(token_id for token_id in named if token_id is not None))


def _token_id(metadata: Metadata, key: str, num_tokens: int) -> int | None:
    token_id = metadata.integer(key)
    if token_id is not None and not 0 <= token_id < num_tokens:
        raise metadata.fail(f"metadata key {key!r} is {token_id}, the tokenizer has {num_tokens} tokens")
    return token_id


def _pre_tokenizer(metadata: Metadata) -> PreTokenizer:
    name = metadata.text("tokenizer.ggml.pre")
    if name is None:
        raise metadata.fail(
            "metadata key 'tokenizer.ggml.pre' is missing, so how the model cuts words is unknown",
            "convert the model with current tools",
        )
    known = PRE_TOKENIZERS.get(name)
    if known is None:
        raise metadata.fail(
            f"pre-tokenizer {name!r} is not supported (known: {', '.join(PRE_TOKENIZERS)})",
            "use a model with a known tokenizer",
        )
    return known


def _added_tokens(metadata: Metadata, tokens: list[str]) -> list[dict[str, Any]]:
    types = metadata.integers("tokenizer.ggml.token_type")
    if len(types) != len(tokens):
        raise metadata.fail(f"the tokenizer has {len(tokens)} tokens but {len(types)} token types")
    return [
        added_token_json(token_id, token, special=kind != USER_DEFINED)
        for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (UNKNOWN, CONTROL, USER_DEFINED) and token
    ]


def _merges(metadata: Metadata, vocabulary: dict[str, int]) -> list[str]:
    merges = metadata.strings("tokenizer.ggml.merges")
    for merge in merges:
        left, space, right = merge.partition(" ")
        if not space or left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise metadata.fail(f"the tokenizer's merge {merge!r} names a token that is not in the vocabulary")
    return merges


def _pre_tokenizer_json(pre: PreTokenizer) -> dict[str, Any]:
    steps: list[dict[str, Any]] = []
    if pre.single_digits:
        steps.append({"type": "Digits", "individual_digits": True})
    for pattern in pre.splits:
        steps.append({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False})
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": not pre.splits}
    return {"type": "Sequence", "pretokenizers": [*steps, byte_level]}


def _append_token_json(token: str, token_id: int) -> dict[str, Any]:
    text = {"Sequence": {"id": "A", "type_id": 0}}
    end = {"SpecialToken": {"id": token, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [text, end],
        "pair": [text, end, {"Sequence": {"id": "B", "type_id": 1}}, end],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}},
    }

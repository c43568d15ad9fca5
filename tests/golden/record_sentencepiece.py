"""Record llama.cpp's tokenization with scored pieces: `python tests/golden/record_sentencepiece.py`.

A small vocabulary is trained from the golden texts and put into a tiny model that llama.cpp loads. Writes
llamacpp_sentencepiece.json beside this file:

    {"peer": {"xllamacpp": version}, "tokens": [str], "token_types": [int], "scores": [float],
     "tokenization": [{"text": str, "plain": [ids], "parsed": [ids]}, ...]}      as in llamacpp_smollm2.json
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import xllamacpp
from golden_texts import STRINGS, TEXTS
from record_llamacpp import Peer
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

TARGET = Path(__file__).with_name("llamacpp_sentencepiece.json")
EXTRA_STRINGS = ["<s>a</s> b", "a</s>b <s> c"]
HIDDEN, HEAD_DIM, VOCAB_SIZE = 64, 16, 700


def train_vocabulary() -> dict[str, list[Any]]:
    """Control tokens, 256 byte pieces, merged pieces scored by their rank, single characters last."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merged = ["".join(pair) for pair in model["merges"]]
    single = sorted(set(model["vocab"]) - set(merged) - {"<unk>"})
    pieces = [*merged, *single]
    control = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    return {
        "tokens": [*control, *pieces],
        "token_types": [2, 3, 3, *[6] * 256, *[1] * len(pieces)],
        "scores": [*[0.0] * len(control), *(-float(rank) for rank in range(len(pieces)))],
    }


def write_model(path: Path, vocabulary: dict[str, list[Any]]) -> None:
    """One layer of random weights: enough for llama.cpp to load the vocabulary."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HIDDEN // HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(vocabulary["tokens"])
    writer.add_token_types(vocabulary["token_types"])
    writer.add_token_scores(vocabulary["scores"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    random = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (len(vocabulary["tokens"]), HIDDEN), "output_norm": (HIDDEN,)}
    shapes |= {f"blk.0.{name}": (HIDDEN,) for name in ("attn_norm", "ffn_norm")}
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        shapes[f"blk.0.{name}"] = (HIDDEN, HIDDEN)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Train, load, record."""
    vocabulary = train_vocabulary()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny.gguf"
        write_model(path, vocabulary)
        peer = Peer(path)
        tokenization = [
            {
                "text": text,
                "plain": peer.tokenize(text, parse_special=False),
                "parsed": peer.tokenize(text, parse_special=True),
            }
            for text in [*STRINGS, *EXTRA_STRINGS]
        ]
    record = {"peer": {"xllamacpp": xllamacpp.__version__}, **vocabulary, "tokenization": tokenization}
    TARGET.write_text(json.dumps(record, ensure_ascii=True, separators=(",", ":")) + "\n")
    print(f"{TARGET}: {len(vocabulary['tokens'])} tokens, {len(tokenization)} strings")


if __name__ == "__main__":
    main()

"""The C interface of `csrc/cpu/api.h` through ctypes: structures, signatures, loading. Calls release the GIL."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path

from dragoman_kernels.cpu.build import KernelBuildError

DTYPE_CODES = {"F32": 0, "F16": 1, "Q8_0": 2, "Q4_1": 3, "Q4_0": 4}
LAYER_VECTORS = ("input_norm", "post_attention_norm", "q_norm", "k_norm")
NO_MEMORY = 10


class Config(ctypes.Structure):
    """`dragoman_llama_config`."""

    _fields_ = [
        *(
            (name, c_int32)
            for name in (
                "num_layers",
                "hidden_size",
                "intermediate_size",
                "num_heads",
                "num_kv_heads",
                "head_dim",
                "vocab_size",
                "max_context_tokens",
                "num_blocks",
                "page_size",
                "num_threads",
                "max_batch_tokens",
                "max_num_seqs",
                "int8_activations",
            )
        ),
        ("rms_norm_eps", c_float),
        ("rope_attention_factor", c_float),
    ]


class Batch(ctypes.Structure):
    """`dragoman_llama_batch`."""

    _fields_ = [
        *(
            (name, c_int32)
            for name in (
                "num_tokens",
                "num_seqs",
                "max_num_blocks",
                "num_logit_seqs",
                "num_hidden_seqs",
                "num_hidden_rows",
            )
        ),
        *(
            (name, c_void_p)
            for name in (
                "token_ids",
                "positions",
                "slot_mapping",
                "query_starts",
                "context_lens",
                "block_tables",
                "logit_seqs",
                "hidden_seqs",
                "hidden_rows",
            )
        ),
    ]


class Report(ctypes.Structure):
    """`dragoman_llama_report`: what a refused batch had wrong."""

    _fields_ = [(name, c_int32) for name in ("code", "row", "column", "value", "expected")]


def load_library(path: Path) -> ctypes.CDLL:
    """Load a built library and declare its functions. Raises KernelBuildError naming the file when it does not load."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelBuildError(
            f"The compiled CPU kernels in {path} do not load: {error}. Delete {path.parent} and start again to rebuild."
        ) from error
    signatures: dict[str, tuple[object, list[object]]] = {
        "dragoman_simd_name": (c_char_p, []),
        "dragoman_llama_create": (c_void_p, [POINTER(Config), c_void_p]),
        "dragoman_llama_set_matrix": (c_int, [c_void_p, c_int, c_int, c_int, c_int, c_int, c_void_p]),
        "dragoman_llama_set_bias": (c_int, [c_void_p, c_int, c_int, c_int, c_void_p]),
        "dragoman_llama_set_vector": (c_int, [c_void_p, c_int, c_int, c_int, c_void_p]),
        "dragoman_llama_run": (c_int, [c_void_p, POINTER(Batch), c_void_p, c_void_p, POINTER(Report)]),
        "dragoman_llama_head": (None, [c_void_p, c_int, c_void_p, c_void_p]),
        "dragoman_llama_block_bytes": (c_int64, [c_void_p]),
        "dragoman_llama_read_blocks": (None, [c_void_p, c_int, c_void_p, c_void_p]),
        "dragoman_llama_write_blocks": (None, [c_void_p, c_int, c_void_p, c_void_p]),
        "dragoman_llama_destroy": (None, [c_void_p]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library


def refusal(report: Report) -> str:
    """The message for a refused batch: array, index, value, and what it should have been."""
    row, column, value, expected = report.row, report.column, report.value, report.expected
    messages = {
        1: f"query_starts[{row}] is {value}; starts begin at 0, rise strictly and end at num_tokens ({expected})",
        2: f"token_ids[{row}] is {value}; it must lie in [0, {expected}), the vocabulary",
        3: f"context_lens[{row}] is {value}; it must cover the sequence's query tokens and not exceed {expected}",
        4: f"positions[{row}] is {value} but its sequence's context_lens and query_starts put that token at {expected}",
        5: f"block_tables[{row}, {column}] is {value}; a block in use must lie in [1, {expected}) (0 is the null block)",
        6: f"slot_mapping[{row}] is {value} but block_tables puts that token in slot {expected}",
        7: f"slot_mapping[{row}] is {value}: sequence {expected} would write a block that sequence {column} also writes",
        8: f"logit_seqs[{row}] is {value}; it must lie in [0, {expected}), the sequences of the batch",
        11: f"hidden_rows[{row}] is {value}; it must lie in [0, {expected}), the query tokens of the batch",
        9: f"hidden_seqs[{row}] is {value}; it must lie in [0, {expected}), the sequences of the batch",
    }
    return messages[report.code]

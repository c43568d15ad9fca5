"""Spreads one packed copy of a step's metadata over the static arrays that a captured graph reads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

HEAD_WORDS = 4  # of a packed step: how many rows, how wide the tables are, and two that keep the rest on 16 bytes
_HEAD = tl.constexpr(HEAD_WORDS)


# The counts are read on the device, so that a graph replays for any; the stride must not make new binaries.
@triton.jit(do_not_specialize=["table_stride"])
def _unpack_kernel(
    packed_ptr, sampled_ptr, tokens_ptr, positions_ptr, slots_ptr, lens_ptr, tables_ptr, temperatures_ptr, uniforms_ptr,
    table_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    num_rows = tl.load(packed_ptr)
    width = tl.load(packed_ptr + 1)
    body_ptr = packed_ptr + _HEAD
    if row < num_rows:
        token = tl.load(body_ptr + row)
        if token < 0:
            token = tl.load(sampled_ptr - 1 - token)
        tl.store(tokens_ptr + row, token)
        tl.store(positions_ptr + row, tl.load(body_ptr + num_rows + row))
        tl.store(slots_ptr + row, tl.load(body_ptr + 2 * num_rows + row))
        tl.store(lens_ptr + row, tl.load(body_ptr + 3 * num_rows + row))
        bits = tl.load(body_ptr + 4 * num_rows + row)
        tl.store(temperatures_ptr + row, bits.to(tl.float32, bitcast=True))
        low = tl.load(body_ptr + 5 * num_rows + 2 * row).to(tl.uint32, bitcast=True).to(tl.uint64)
        high = tl.load(body_ptr + 5 * num_rows + 2 * row + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
        tl.store(uniforms_ptr + row, ((high << 32) | low).to(tl.float64, bitcast=True))
        source = body_ptr + 7 * num_rows + row * width
        for start in range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < width
            blocks = tl.load(source + columns, mask=inside, other=0)
            tl.store(tables_ptr + row.to(tl.int64) * table_stride + columns, blocks, mask=inside)
    else:
        # A padding row reads nothing and writes into the null block.
        tl.store(tokens_ptr + row, 0)
        tl.store(positions_ptr + row, 0)
        tl.store(slots_ptr + row, 0)
        tl.store(lens_ptr + row, 0)
        tl.store(temperatures_ptr + row, 0.0)
        tl.store(uniforms_ptr + row, 0.0)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["tokens_ptr"])
def _resolve_kernel(tokens_ptr, sampled_ptr, num_tokens, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens_ptr + index, mask=index < num_tokens, other=0)
    coming = token < 0
    value = tl.load(sampled_ptr - 1 - token, mask=coming, other=0)
    tl.store(tokens_ptr + index, value, mask=coming)


def resolve_tokens(token_ids: torch.Tensor, sampled: torch.Tensor) -> None:
    """Replace each id -1 - r of `token_ids` int32 [num_tokens] by `sampled[r]`, what the step before sampled."""
    _resolve_kernel[(triton.cdiv(len(token_ids), 1024),)](token_ids, sampled, len(token_ids), BLOCK=1024, num_warps=4)


class StepInputs:
    """The static arrays: [max_num_rows] each, tables [max_num_rows, max_num_blocks]."""

    def __init__(self, max_num_rows: int, max_num_blocks: int, device: torch.device) -> None:
        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.token_ids = ints(max_num_rows)
        self.positions = ints(max_num_rows)
        self.slots = ints(max_num_rows)
        self.context_lens = ints(max_num_rows)
        self.block_tables = ints(max_num_rows, max_num_blocks)
        self.temperatures = torch.zeros(max_num_rows, dtype=torch.float32, device=device)
        self.uniforms = torch.zeros(max_num_rows, dtype=torch.float64, device=device)

    def unpack(self, packed: torch.Tensor, sampled: torch.Tensor, num_padded: int) -> None:
        """Fill the first `num_padded` rows from `packed` int32: num_rows, width and two words that are not read; token ids,
        positions, slots, context lengths and temperatures (float32 bits) [num_rows] each, uniforms (float64 bits)
        [num_rows, 2], tables [num_rows, width]. At most `num_padded` rows; those beyond are padding.
        A token id -1 - r becomes `sampled[r]` (int32), what the step before sampled.
        """
        _unpack_kernel[(num_padded,)](
            packed, sampled, self.token_ids, self.positions, self.slots, self.context_lens, self.block_tables,
            self.temperatures, self.uniforms, self.block_tables.stride(0), BLOCK=64, num_warps=1,
        )  # fmt: skip

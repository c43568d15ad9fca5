"""Prefill attention by cuDNN over our paged cache: one graph of its operation, made once, for steps of any composition.

API: the cuDNN frontend's scaled dot product attention with page tables and lengths on the device
(docs.nvidia.com/cudnn, "Attention"). The package is optional: a plan names it only where it was timed.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dragoman_agent.device.base import DeviceError

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class LibraryPart:
    """What the library reads of a step's prompts, on the device, for its `max_num_seqs` sequences."""

    offsets: Tensor  # int32 [max_num_seqs + 1]: first value of each sequence in q
    query_lens: Tensor  # int32 [max_num_seqs], 0 for none
    context_lens: Tensor  # int32 [max_num_seqs]


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """What the graph is made for."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    num_blocks: int  # of a layer's cache
    max_num_seqs: int  # prompts in a step
    max_num_tokens: int  # of one prompt in a step
    max_context_tokens: int

    @property
    def table_width(self) -> int:
        """Blocks of the longest context."""
        return -(-self.max_context_tokens // self.page_size)

    def can_run(self, query_starts: Int32Array) -> bool:
        """Whether a step's prompts fit the graph; `query_starts` int32 [num_seqs + 1]."""
        lengths = np.diff(query_starts)
        return 0 < len(lengths) <= self.max_num_seqs and int(lengths.max()) <= self.max_num_tokens

    def words(self, query_starts: Int32Array, context_lens: Int32Array) -> Int32Array:
        """What `CudnnAttention.part` needs on the device, int32 [3 * max_num_seqs + 1]; `query_starts` [num_seqs + 1] in the
        rows that it is run on, `context_lens` [num_seqs] with the queries included.
        """
        count, num_seqs = self.max_num_seqs, len(context_lens)
        words = np.zeros(3 * count + 1, dtype=np.int32)
        words[: num_seqs + 1] = query_starts * np.int32(self.num_heads * self.head_dim)
        words[num_seqs + 1 : count + 1] = words[num_seqs]
        words[count + 1 : count + 1 + num_seqs] = np.diff(query_starts)
        words[2 * count + 1 : 2 * count + 1 + num_seqs] = context_lens
        return words


class CudnnAttention:
    """Causal attention of a step's prompts over their whole contexts, bfloat16."""

    def __init__(self, sizes: AttentionSizes, stream: Any) -> None:
        """Runs in `stream` (torch). Raises DeviceError where cuDNN's frontend is not there or has no kernel for `sizes`."""
        try:
            cudnn = importlib.import_module("cudnn")  # optional, and slow to import
        except (ImportError, OSError, AssertionError) as error:  # the last is what it says where libcudnn is not found
            raise DeviceError(
                f"cuDNN's frontend cannot be imported ({error}); install nvidia-cudnn-frontend, or plan without it"
            ) from error
        self.sizes = sizes
        with torch.cuda.stream(stream):
            device = torch.device("cuda", torch.cuda.current_device())
            self._tables = torch.zeros((sizes.max_num_seqs, sizes.table_width), dtype=torch.int32, device=device)
            try:
                self._handle = cudnn.create_handle()
                cudnn.set_stream(handle=self._handle, stream=stream.cuda_stream)
                self._build(cudnn)
            except Exception as error:  # whatever the library says
                raise DeviceError(f"cuDNN has no attention for {sizes}: {error}") from error
            size = max(self._graph.get_workspace_size(), 1)
            self._workspace = torch.empty(size, dtype=torch.uint8, device=device)

    def take_tables(self, block_tables: Tensor) -> None:
        """Those of a step's prompts, int32 [num_seqs, width], into the place that the graph reads, until the next step's."""
        self._tables[: block_tables.shape[0], : block_tables.shape[1]].copy_(block_tables)

    def part(self, words: Tensor) -> LibraryPart:
        """A step's part from `words` on the device, whose tables were taken."""
        count = self.sizes.max_num_seqs
        return LibraryPart(words[: count + 1], words[count + 1 : 2 * count + 1], words[2 * count + 1 :])

    def run(self, q: Tensor, keys: Tensor, values: Tensor, part: LibraryPart, out: Tensor) -> None:
        """Attend. `q` and `out` [num_tokens, num_heads, head_dim]; caches [num_blocks, num_kv_heads, page, head_dim]."""
        tables = self._tables.data_ptr()
        operands = {
            self._q: q.data_ptr(), self._keys: keys.data_ptr(), self._values: values.data_ptr(),
            self._out: out.data_ptr(), self._offsets: part.offsets.data_ptr(),
            self._query_lens: part.query_lens.data_ptr(), self._context_lens: part.context_lens.data_ptr(),
            self._key_tables: tables, self._value_tables: tables,
        }  # fmt: skip
        try:
            self._graph.execute(operands, self._workspace.data_ptr(), handle=self._handle)
        except RuntimeError as error:
            raise DeviceError(f"cuDNN's attention failed: {error}") from error

    def _build(self, cudnn: Any) -> None:
        sizes = self.sizes
        count, heads, dim, page = sizes.max_num_seqs, sizes.num_heads, sizes.head_dim, sizes.page_size
        half, integer, single = cudnn.data_type.BFLOAT16, cudnn.data_type.INT32, cudnn.data_type.FLOAT
        graph = cudnn.pygraph(
            handle=self._handle, io_data_type=half, intermediate_data_type=single, compute_data_type=single
        )

        def integers(name: str, *size: int) -> Any:
            strides = [int(np.prod(size[i + 1 :])) for i in range(4)]
            return graph.tensor(name=name, dim=list(size), stride=strides, data_type=integer)

        def rows(name: str, **more: Any) -> Any:
            strides = [heads * sizes.max_num_tokens * dim, dim, heads * dim, 1]
            return graph.tensor(
                name=name, dim=[count, heads, sizes.max_num_tokens, dim], stride=strides, data_type=half, **more
            )

        def pages(name: str) -> Any:
            strides = [sizes.num_kv_heads * page * dim, page * dim, dim, 1]
            return graph.tensor(
                name=name, dim=[sizes.num_blocks, sizes.num_kv_heads, page, dim], stride=strides, data_type=half
            )

        self._offsets = integers("offsets", count + 1, 1, 1, 1)
        self._query_lens = integers("query_lens", count, 1, 1, 1)
        self._context_lens = integers("context_lens", count, 1, 1, 1)
        self._key_tables = integers("key_tables", count, 1, sizes.table_width, 1)
        self._value_tables = integers("value_tables", count, 1, sizes.table_width, 1)
        self._q, self._keys, self._values = rows("q", ragged_offset=self._offsets), pages("keys"), pages("values")
        self._out, _ = graph.sdpa(
            name="prefill", q=self._q, k=self._keys, v=self._values, generate_stats=False, attn_scale=dim**-0.5,
            use_padding_mask=True, seq_len_q=self._query_lens, seq_len_kv=self._context_lens,
            diagonal_alignment=cudnn.diagonal_alignment.BOTTOM_RIGHT, diagonal_band_right_bound=0,
            paged_attention_k_table=self._key_tables, paged_attention_v_table=self._value_tables,
            paged_attention_max_seq_len_kv=sizes.max_context_tokens,
        )  # fmt: skip
        self._out.set_output(True).set_data_type(half).set_dim([count, heads, sizes.max_num_tokens, dim])
        self._out.set_stride([heads * sizes.max_num_tokens * dim, dim, heads * dim, 1])
        self._out.set_ragged_offset(self._offsets)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A])
        graph.check_support()
        graph.build_plans()
        self._graph = graph

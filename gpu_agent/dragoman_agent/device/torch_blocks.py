"""KV blocks of a torch cache as bytes: for every device whose cache is a PagedCache."""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from dragoman_agent.device.base import BlockFormat, Int32Array, UInt8Array
from dragoman_agent.model.layers import PagedCache


def block_format(cache: PagedCache) -> BlockFormat:
    """The format of a cache's blocks."""
    num_layers, _, num_heads, page_size, head_dim = cache.keys.shape
    num_values = 2 * num_layers * num_heads * page_size * head_dim
    kind = str(cache.keys.dtype).removeprefix("torch.")
    layout = "layer, k[head, token, dim] v[head, token, dim]"
    if cache.scales:  # equal bytes are equal numbers only under equal scales
        layout += f"; scales {hashlib.sha256(repr(cache.scales).encode()).hexdigest()[:16]}"
    return BlockFormat(kind, layout, num_values * cache.keys.element_size())


def read_blocks(cache: PagedCache, blocks: Int32Array) -> UInt8Array:
    """Contents of blocks, [num_blocks, block_bytes]; waits for the copy."""
    ids = torch.from_numpy(blocks.astype(np.int64)).to(cache.keys.device)
    # [num_blocks, num_layers, 2, heads, tokens, dim]
    pages = torch.stack((cache.keys.index_select(1, ids), cache.values.index_select(1, ids)), dim=2).transpose(0, 1)
    host: UInt8Array = pages.contiguous().cpu().view(torch.uint8).numpy().reshape(len(blocks), -1)
    return host


def write_blocks(cache: PagedCache, blocks: Int32Array, data: UInt8Array) -> None:
    """Put contents of `read_blocks` into blocks. Raises ValueError when they are of another size."""
    num_layers, _, num_heads, page_size, head_dim = cache.keys.shape
    expected = (len(blocks), block_format(cache).block_bytes)
    if data.shape != expected:
        raise ValueError(f"blocks of shape {data.shape} do not fit this cache, which takes {expected}")
    ids = torch.from_numpy(blocks.astype(np.int64)).to(cache.keys.device)
    pages = torch.from_numpy(np.ascontiguousarray(data)).view(cache.keys.dtype)
    pages = pages.view(len(blocks), num_layers, 2, num_heads, page_size, head_dim).to(cache.keys.device).transpose(0, 1)
    cache.keys.index_copy_(1, ids, pages[:, :, 0].contiguous())
    cache.values.index_copy_(1, ids, pages[:, :, 1].contiguous())

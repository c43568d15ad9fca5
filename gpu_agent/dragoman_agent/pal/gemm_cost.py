"""Predicted seconds of matrix products: a library's, and those of our kernel that sums in one order. Pure."""

from __future__ import annotations

from dragoman_agent.pal.rates import Rates
from dragoman_kernels.triton.launches import FixedGemmLaunch

# Fitted to a library's products of 1 to 2,048 rows on an H200 (performance tables of 15 shapes, most within 20 %).
_TILE = 64  # rows and columns of an output tile
_PIECE = 512  # inputs under which a tile is not cut further
# Fitted to 468 products of 13 tiles of our kernel on an H200: within 10 % on average, what it chooses within 2 % of the best.
_REGISTERS = {4: 168, 8: 128}  # a thread, by warps
_STEP_LATENCIES = 1.4  # of a tile's loads, which each wait until the tile before has been used up
_PROLOGUE_LATENCIES = 3.0  # before the first product and after the last
_MATMUL_SHARE = 0.8  # of the rate of the library's products


def gemm_seconds(rates: Rates, m: int, n: int, k: int) -> float:
    """A product [m, k] x [k, n] in two bytes: phase + max(bytes / rate, operations / rate).

    Output tiles, each cut along k as far as that pays, share the multiprocessors; too few leave some without work.
    """
    pieces = -(-m // _TILE) * -(-n // _TILE) * max(k // _PIECE, 1)
    rate = rates.matmul_rate * min(1.0, pieces / rates.num_multiprocessors)
    moved = 2 * (n * k + m * k + m * n)
    return rates.phase_seconds + max(moved / rates.phase_rate, 2 * m * n * k / rate)


def fixed_gemm_seconds(rates: Rates, tile: FixedGemmLaunch, rows: int, n: int, k: int) -> float:
    """The product of `rows` rows by tiles that each sum all of `k`: waves of programs, each a row of steps whose loads wait a
    latency, pass a multiprocessor's port and feed its tensor cores (padding rows count); or memory or L2, where that is more.
    """
    programs = -(-rows // tile.block_m) * -(-n // tile.block_n)
    threads = 32 * tile.num_warps
    registers = _REGISTERS.get(tile.num_warps, 168)
    resident = max(rates.num_resident(tile.shared_bytes, threads, registers), 1)
    at_once = min(programs, rates.num_multiprocessors * resident)
    beside = -(-at_once // rates.num_multiprocessors)  # programs of the fullest multiprocessor
    step_bytes = 2 * tile.block_k * (tile.block_n + min(rows, tile.block_m))
    operations = 2 * tile.block_m * tile.block_n * tile.block_k
    step = max(
        _STEP_LATENCIES * rates.latency_seconds / (tile.num_stages - 1),
        beside * step_bytes / rates.multiprocessor_bandwidth,
        beside * operations * rates.num_multiprocessors / (_MATMUL_SHARE * rates.matmul_rate),
    )
    steps = -(-k // tile.block_k)
    waves = -(-programs // at_once) * (steps * step + _PROLOGUE_LATENCIES * rates.latency_seconds)
    from_l2 = programs * steps * step_bytes / rates.l2_bandwidth
    return rates.phase_seconds + max(waves, 2 * n * k / rates.read_bandwidth, from_l2)

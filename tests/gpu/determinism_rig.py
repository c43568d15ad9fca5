"""Steps put together by hand on one loaded device, and the logits of each sampled row: for the check of deterministic plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from tests.agent.device.conformance.steps import Part, step_of

from dragoman_agent.device.cuda import CudaDevice
from dragoman_agent.model.random_source import RandomSource
from dragoman_agent.model.registry import needed_tensors
from dragoman_agent.pal.plan import Plan

CHUNKS = (64, 97, 128, 256, 512, 1024, 2048)


class CutSource(RandomSource):
    """A random model of real shape with fewer layers."""

    def __init__(self, name: str, num_layers: int) -> None:
        super().__init__(name)
        self.config = replace(self.config, num_layers=min(num_layers, self.config.num_layers))
        self._needed = needed_tensors(self.config)


@dataclass(frozen=True)
class Stream:
    """What one request reads: a prompt, then tokens that are forced one by one."""

    tokens: list[int]
    prompt: int

    @property
    def places(self) -> range:
        """How many tokens have been read where logits are looked at."""
        return range(self.prompt, len(self.tokens) + 1)


class Rig:
    """Runs sequences in chosen cuts and company. `logits[i][n]` are those of sequence i after n tokens."""

    def __init__(self, device: CudaDevice, plan: Plan, seed: int = 0) -> None:
        self.device, self.plan = device, plan
        self.rng = np.random.default_rng(seed)

    def blocks(self, lengths: Sequence[int]) -> list[list[int]]:
        """Blocks anywhere in the arena, no two sequences' the same. Raises ValueError where the plan has too few."""
        counts = [-(-length // self.plan.page_size) for length in lengths]
        if sum(counts) >= self.plan.num_blocks:
            raise ValueError(f"{sum(counts)} blocks are needed, the plan has {self.plan.num_blocks - 1}")
        order = self.rng.permutation(self.plan.num_blocks - 1) + 1
        ends = np.cumsum(counts)
        return [order[end - count : end].tolist() for count, end in zip(counts, ends, strict=True)]

    def step(self, parts: Sequence[Part]) -> torch.Tensor:
        """Logits of the sampled parts, a copy."""
        batch = step_of(parts, self.plan.page_size)
        self.device.submit(batch).result()
        logits = self.device.last_logits()[: len(batch.sample_seqs)].clone()
        self.device._runtime.synchronize()  # the copy is in another stream than the steps, which overwrite what it reads
        return logits

    def alone(self, one: Stream, chunk: int | None = None, blocks: list[int] | None = None) -> list[torch.Tensor]:
        """Logits at each place: the prompt in chunks of `chunk` (the plan's where None), then token by token."""
        mine = blocks or self.blocks([len(one.tokens)])[0]
        size = min(chunk or self.plan.max_batch_tokens, self.plan.max_batch_tokens)
        found = []
        for start in range(0, one.prompt, size):
            part = Part(one.tokens[start : min(start + size, one.prompt)], start, mine)
            last = self.step([replace(part, sampled=part.context == one.prompt)])
            found = [last[0]] if len(last) else []
        for at in range(one.prompt, len(one.tokens)):
            found.append(self.step([Part([one.tokens[at]], at, mine)])[0])
        return found

    def together(self, sequences: Sequence[Stream]) -> list[list[torch.Tensor]]:
        """The same of each, all at once: those whose prompt is read decode beside chunks of random sizes of the others."""
        blocks = self.blocks([len(one.tokens) for one in sequences])
        done = [0] * len(sequences)
        found: list[list[torch.Tensor]] = [[] for _ in sequences]
        while any(n < len(one.tokens) for n, one in zip(done, sequences, strict=True)):
            room, decodes, prompts = self.plan.max_batch_tokens, [], []
            for i, one in enumerate(sequences):
                if one.prompt <= done[i] < len(one.tokens):
                    decodes.append(i)
                    room -= 1
            for i in self.rng.permutation(len(sequences)).tolist():
                left = sequences[i].prompt - done[i]
                if left > 0 and room > 0:
                    size = min(left, room, int(self.rng.choice(CHUNKS)))
                    prompts.append((i, size))
                    room -= size
            order = [*((i, 1) for i in decodes), *prompts]
            parts = [
                Part(
                    sequences[i].tokens[done[i] : done[i] + size], done[i], blocks[i],
                    sampled=done[i] + size >= sequences[i].prompt,
                )
                for i, size in order
            ]  # fmt: skip
            rows = self.step(parts)
            sampled = [i for (i, _), part in zip(order, parts, strict=True) if part.sampled]
            for row, i in enumerate(sampled):
                found[i].append(rows[row])
            for i, size in order:
                done[i] += size
        return found


def make_sequences(rng: np.random.Generator, count: int, vocab_size: int, longest: int, steps: int) -> list[Stream]:
    """Random prompts, mostly short, some at the edges of tiles, pages and parts, the first one long."""
    edges = (1, 2, 63, 64, 65, 128, 255, 256, 257, 511, 512, 513)
    made = []
    for i in range(count):
        length = longest if i == 0 else edges[i % 24] if i % 24 < len(edges) else int(rng.integers(1, 700))
        made.append(Stream(rng.integers(0, vocab_size, min(length, longest) + steps).tolist(), min(length, longest)))
    return made

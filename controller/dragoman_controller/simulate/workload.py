"""Arrivals: of a trace file, or drawn from a seed. Columns, so that a million requests take little memory."""

from __future__ import annotations

import hashlib
import json
import math
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from dragoman.limits import MAX_ID_BYTES
from dragoman.prefix_hash import UNIT_TOKENS
from dragoman_controller.requests import Priority

MAX_NUM_REQUESTS = 10_000_000
MAX_NUM_NAMES = 1_000_000  # of tenants, and of prefixes
NO_PREFIX = -1
_PRIORITIES = {priority.label: priority for priority in Priority}


class Arrival(NamedTuple):
    """One request. `prefix` is an index into `Workload.prefixes`, or -1; `prefix_tokens` of its prompt are shared."""

    seconds: float
    tenant: int
    priority: int
    prompt_tokens: int
    output_tokens: int
    prefix: int = NO_PREFIX
    prefix_tokens: int = 0


class Workload:
    """Requests in order of time, column by column."""

    def __init__(self, tenants: list[str], prefixes: list[str]) -> None:
        self.tenants, self.prefixes = tenants, prefixes
        self.seconds = array("d")
        self.tenant, self.prompt_tokens, self.output_tokens = array("I"), array("I"), array("I")
        self.priority = array("B")
        self.prefix, self.prefix_tokens = array("i"), array("I")

    def __len__(self) -> int:
        return len(self.seconds)

    def add(self, arrival: Arrival) -> None:
        """Appends a request; times do not fall."""
        self.seconds.append(arrival.seconds)
        self.tenant.append(arrival.tenant)
        self.priority.append(arrival.priority)
        self.prompt_tokens.append(arrival.prompt_tokens)
        self.output_tokens.append(arrival.output_tokens)
        self.prefix.append(arrival.prefix)
        self.prefix_tokens.append(arrival.prefix_tokens)

    def at(self, index: int) -> Arrival:
        """One request."""
        return Arrival(
            self.seconds[index], self.tenant[index], self.priority[index], self.prompt_tokens[index],
            self.output_tokens[index], self.prefix[index], self.prefix_tokens[index],
        )  # fmt: skip

    def means(self) -> tuple[float, float]:
        """Mean prompt and output tokens."""
        num = max(len(self), 1)
        return sum(self.prompt_tokens) / num, sum(self.output_tokens) / num


@dataclass(frozen=True, slots=True)
class Lengths:
    """Token counts, log-normal with this median and sigma, cut to `least` and `most`."""

    median: float
    sigma: float
    least: int
    most: int

    def draw(self, rng: Random) -> int:
        """One count."""
        return min(max(int(rng.lognormvariate(math.log(self.median), self.sigma)), self.least), self.most)

    @property
    def mean(self) -> float:
        """About the mean, the cuts left out."""
        return min(self.median * math.exp(self.sigma**2 / 2), float(self.most))


@dataclass(frozen=True, slots=True)
class Generator:
    """What to draw. Every request has a tenant, one of three classes, and with `prefix_share` a shared beginning.

    `burstiness` 0 is a Poisson process; above, the rate changes at random between 1 + burstiness and 1 - burstiness times
    the mean every `burst_seconds` on average. No prompt, prefix included, is over `max_prompt_tokens`. Tenant k of n has a weight of 1 / (k + 1) ** `tenant_skew`. `bursts`: (count,
    seconds) of requests that come at once. `hog_factor` x: one tenant more, with x times what a tenant has on average.
    """

    num_requests: int
    requests_per_second: float
    seed: int = 1
    prompt: Lengths = Lengths(400.0, 0.9, 8, 6000)
    output: Lengths = Lengths(180.0, 0.7, 4, 2000)
    burstiness: float = 0.0
    burst_seconds: float = 10.0
    num_tenants: int = 10
    tenant_skew: float = 0.0
    num_prefixes: int = 100
    prefix_share: float = 0.5
    prefix_length: Lengths = Lengths(512.0, 0.6, 64, 4096)
    max_prompt_tokens: int = 6000
    class_shares: tuple[float, float, float] = (0.3, 0.6, 0.1)
    bursts: tuple[tuple[int, float], ...] = field(default=())
    hog_factor: float = 0.0

    def check(self) -> None:
        """Raises ValueError that names the bad value."""
        if not 0 < self.num_requests <= MAX_NUM_REQUESTS:
            raise ValueError(f"num_requests is {self.num_requests}, must be 1 to {MAX_NUM_REQUESTS}")
        if not (math.isfinite(self.requests_per_second) and self.requests_per_second > 0):
            raise ValueError(f"requests_per_second is {self.requests_per_second}, must be over 0")
        if not 0 <= self.burstiness < 1:
            raise ValueError(f"burstiness is {self.burstiness}, must be 0 or more and below 1")
        if not 0 <= self.prefix_share <= 1:
            raise ValueError(f"prefix_share is {self.prefix_share}, must be 0 to 1")
        if self.max_prompt_tokens <= self.prefix_length.most:
            raise ValueError(f"max_prompt_tokens is {self.max_prompt_tokens}, must be over the longest prefix")
        if self.num_tenants < 1 or self.num_prefixes < 0 or self.hog_factor < 0 or self.tenant_skew < 0:
            raise ValueError("there is at least one tenant, and no count, factor or skew is below 0")
        if max(self.num_tenants, self.num_prefixes) > MAX_NUM_NAMES:
            raise ValueError(f"there are at most {MAX_NUM_NAMES} tenants and as many prefixes")
        self._check_total()

    def _check_total(self) -> None:
        """Bursts and the hog come on top of `num_requests`."""
        total: float = self.num_requests + sum(count for count, _ in self.bursts)
        total += self.hog_factor * total / self.num_tenants
        if not total <= MAX_NUM_REQUESTS:
            raise ValueError(
                f"with bursts and the hog there are {total:g} requests, must be at most {MAX_NUM_REQUESTS}"
            )

    def mean_tokens(self) -> tuple[float, float]:
        """About the mean prompt and output of a request, in tokens."""
        shared = self.prefix_share * self.prefix_length.mean if self.num_prefixes else 0.0
        return min(self.prompt.mean + shared, float(self.max_prompt_tokens)), self.output.mean

    def generate(self) -> Workload:
        """The requests; equal generators give equal ones. Raises ValueError."""
        self.check()
        rng = Random(f"workload {self.seed}")
        tenants = [f"tenant-{number:04d}" for number in range(self.num_tenants)]
        if self.hog_factor:
            tenants.append("hog")
        workload = Workload(tenants, [f"prefix-{number}" for number in range(self.num_prefixes)])
        prefix_tokens = [self.prefix_length.draw(rng) // UNIT_TOKENS * UNIT_TOKENS for _ in range(self.num_prefixes)]
        drawn = [self._draw(seconds, rng, prefix_tokens) for seconds in self._times(rng)]
        for count, at in self.bursts:
            drawn += [self._draw(at, rng, prefix_tokens) for _ in range(count)]
        if self.hog_factor:
            drawn += self._hog(drawn, prefix_tokens)
        drawn.sort(key=lambda arrival: arrival.seconds)
        for arrival in drawn:
            workload.add(arrival)
        return workload

    def _times(self, rng: Random) -> list[float]:
        now, factor, until, times = 0.0, 1.0, 0.0, []
        for _ in range(self.num_requests):
            if self.burstiness and now >= until:
                factor = 1.0 + rng.choice((-1.0, 1.0)) * self.burstiness
                until = now + rng.expovariate(1.0 / self.burst_seconds)
            now += rng.expovariate(self.requests_per_second * factor)
            times.append(now)
        return times

    def _draw(self, seconds: float, rng: Random, prefix_tokens: list[int]) -> Arrival:
        if self.tenant_skew:
            # The inverse of the continuous distribution with this density: near enough, and one draw.
            power, num = 1.0 - self.tenant_skew, self.num_tenants
            u = rng.random()
            rank = (num + 1.0) ** u if abs(power) < 1e-9 else (u * ((num + 1.0) ** power - 1.0) + 1.0) ** (1.0 / power)
            tenant = min(int(rank) - 1, num - 1)
        else:
            tenant = int(rng.random() * self.num_tenants)
        return self._request(seconds, tenant, rng, prefix_tokens)

    def _request(self, seconds: float, tenant: int, rng: Random, prefix_tokens: list[int]) -> Arrival:
        first, second, third = self.class_shares
        drawn = rng.random() * (first + second + third)
        priority = 1 if drawn < first else 2 if drawn < first + second else 3
        prompt, output = self.prompt.draw(rng), self.output.draw(rng)
        if prefix_tokens and rng.random() < self.prefix_share:
            # A few prefixes are used by most: the square of a uniform draw.
            prefix = int(rng.random() ** 2 * len(prefix_tokens))
            shared = prefix_tokens[prefix]
            total = min(prompt + shared, self.max_prompt_tokens)
            return Arrival(seconds, tenant, priority, total, output, prefix, shared)
        return Arrival(seconds, tenant, priority, min(prompt, self.max_prompt_tokens), output)

    def _hog(self, others: list[Arrival], prefix_tokens: list[int]) -> list[Arrival]:
        """Drawn apart from the others, which are the same with and without it."""
        rng = Random(f"hog {self.seed}")
        end = max(arrival.seconds for arrival in others)
        count = max(round(self.hog_factor * len(others) / self.num_tenants), 1)
        return [
            self._request(seconds, self.num_tenants, rng, prefix_tokens)
            for seconds in sorted(rng.random() * end for _ in range(count))
        ]


def prefix_units(name: str, prefix_tokens: int) -> tuple[int, ...]:
    """Wire hashes of the full units of a shared prefix: of equal names the shorter is the beginning of the longer."""
    return tuple(
        int.from_bytes(hashlib.blake2b(f"{name}:{unit}".encode(), digest_size=8).digest(), "little")
        for unit in range(prefix_tokens // UNIT_TOKENS)
    )


_TRACE_KEYS = ("seconds", "tenant", "class", "prompt_tokens", "output_tokens", "prefix_id", "prefix_tokens")


def read_trace(path: Path) -> Workload:
    """The requests of a JSONL file, one object a line; `seconds`, `prompt_tokens` and `output_tokens` are required.

    Times count from the first one. `prefix_tokens` of a `prefix_id` are the same in all requests with it; left out, the
    prompt without its last token. Raises OSError, or ValueError that names the line.
    """
    tenants: dict[str, int] = {}
    prefixes: dict[str, int] = {}
    arrivals = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                arrivals.append(_read_arrival(line, f"{path}:{number}", tenants, prefixes))
            if len(arrivals) > MAX_NUM_REQUESTS:
                raise ValueError(f"{path}: more than {MAX_NUM_REQUESTS} requests")
    if not arrivals:
        raise ValueError(f"{path} holds no request: write one JSON object a line, with {', '.join(_TRACE_KEYS)}")
    arrivals.sort(key=lambda arrival: arrival.seconds)
    begin = arrivals[0].seconds
    workload = Workload(list(tenants), list(prefixes))
    for arrival in arrivals:
        workload.add(arrival._replace(seconds=arrival.seconds - begin))
    return workload


def _read_arrival(line: str, where: str, tenants: dict[str, int], prefixes: dict[str, int]) -> Arrival:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{where}: a request is an object, not {fields!r}")
    for key in fields:
        if key not in _TRACE_KEYS:
            raise ValueError(f"{where}: unknown key {key!r}, known are {', '.join(_TRACE_KEYS)}")
    seconds = fields.get("seconds")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
        raise ValueError(f"{where}: seconds is {seconds!r}, must be a number that is not negative")
    prompt = _count(fields, "prompt_tokens", where)
    output = _count(fields, "output_tokens", where)
    priority = _PRIORITIES.get(fields.get("class", "standard"))
    if priority is None:
        raise ValueError(f"{where}: class is {fields['class']!r}, must be one of {', '.join(_PRIORITIES)}")
    tenant = fields.get("tenant", "")
    if not isinstance(tenant, str) or len(tenant.encode()) > MAX_ID_BYTES or not tenant.isprintable():
        raise ValueError(f"{where}: tenant must be a printable text of at most {MAX_ID_BYTES} bytes")
    prefix, shared = NO_PREFIX, 0
    if fields.get("prefix_id") is not None:
        prefix = prefixes.setdefault(str(fields["prefix_id"]), len(prefixes))
        shared = _count(fields, "prefix_tokens", where) if "prefix_tokens" in fields else prompt - 1
        if shared > prompt:
            raise ValueError(f"{where}: prefix_tokens is {shared}, over the prompt's {prompt}")
    return Arrival(
        float(seconds), tenants.setdefault(tenant, len(tenants)), int(priority), prompt, output, prefix, shared
    )


def _count(fields: dict[str, Any], key: str, where: str) -> int:
    value = fields.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1 << 30:
        raise ValueError(f"{where}: {key} is {value!r}, must be a whole number over 0")
    return value

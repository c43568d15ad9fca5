"""The gateway's metrics, on a registry of their own."""

from __future__ import annotations

import platform
import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from dragoman_cli.process import count_lost_records
from dragoman_gateway import VERSION
from dragoman_gateway.generation import Outcome

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# The buckets of the OpenTelemetry conventions for generative AI: gen_ai.server.time_to_first_token and _per_output_token.
TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
TPOT_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
OUTCOMES = ("ok", "cancelled", "error", "refused")
ROUTES = ("chat", "completions", "embeddings")


class GatewayMetrics:
    """What the gateway counts. Seen from the HTTP side, so that the agents' own times can be told apart from it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.requests = Counter(
            "dragoman_gateway_requests",
            "Requests for tokens or vectors by route and how they ended",
            ["route", "outcome"],
            registry=r,
        )
        self.responses = Counter("dragoman_gateway_http_responses", "Responses by status", ["status"], registry=r)
        self.running = Gauge("dragoman_gateway_requests_running", "Generation requests under way", registry=r)
        self.agents = Gauge("dragoman_gateway_agents_serving", "Agents that take requests, as last heard", registry=r)
        self.ttft = Histogram(
            "dragoman_gateway_time_to_first_token_seconds",
            "From the request's arrival to its first token, queue included",
            buckets=TTFT_BUCKETS,
            registry=r,
        )
        self.tpot = Histogram(
            "dragoman_gateway_time_per_output_token_seconds",
            "Mean time between the tokens of a request after the first",
            buckets=TPOT_BUCKETS,
            registry=r,
        )
        self.prompt_tokens = Counter("dragoman_gateway_prompt_tokens", "Prompt tokens of requests", registry=r)
        self.cached_tokens = Counter(
            "dragoman_gateway_cached_prompt_tokens", "Prompt tokens found in a prefix cache", registry=r
        )
        self.output_tokens = Counter("dragoman_gateway_output_tokens", "Tokens generated", registry=r)
        self.resumes = Counter("dragoman_resumes", "Streams continued on another agent, or not", ["result"], registry=r)
        self.ignored = Counter(
            "dragoman_gateway_requests_with_ignored_params", "Requests with a field that was ignored", registry=r
        )
        count_lost_records(r)
        build = Gauge("dragoman_build_info", "1, with the versions as labels", ["version", "python"], registry=r)
        build.labels(VERSION, platform.python_version()).set(1)
        for route in ROUTES:
            for outcome in OUTCOMES:
                self.requests.labels(route, outcome)
        for result in ("ok", "failed"):
            self.resumes.labels(result)

    def observe(self, outcome: Outcome, *, ended_well: bool) -> None:
        """Counts one generation that has ended; one that no agent accepted has used nothing."""
        if outcome.started is None:
            return
        self.prompt_tokens.inc(outcome.prompt_tokens)
        self.cached_tokens.inc(outcome.cached_tokens)
        self.output_tokens.inc(outcome.output_tokens)
        if outcome.num_resumes:
            self.resumes.labels("ok" if ended_well else "failed").inc(outcome.num_resumes)
        if outcome.first_token is not None:
            self.ttft.observe(outcome.first_token - outcome.created)
            if ended_well and outcome.output_tokens > 1:
                self.tpot.observe((time.monotonic() - outcome.first_token) / (outcome.output_tokens - 1))

    def exposition(self) -> bytes:
        """The text for a scraper."""
        return generate_latest(self.registry)

"""vLLM's gRPC interface on an agent, so that routers and load generators made for it can drive one."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

import dragoman
from dragoman.compat import vllm_engine_pb2 as vllm
from dragoman.compat import vllm_engine_pb2_grpc
from dragoman.errors import DragomanError
from dragoman.serving import Context
from dragoman.v1 import error_pb2
from dragoman_agent.engine.messages import Load, Step
from dragoman_agent.pal.plan import Plan
from dragoman_agent.rpc.acceptance import Acceptance
from dragoman_agent.rpc.embedding import EmbeddingServicer
from dragoman_agent.rpc.engine_client import EngineClient
from dragoman_agent.rpc.gate import Gate
from dragoman_agent.rpc.refusal import invalid
from dragoman_agent.rpc.served_model import ServedModel
from dragoman_agent.rpc.streaming import stream_generation
from dragoman_agent.rpc.vllm_replies import VllmReplies
from dragoman_agent.rpc.vllm_request import embed_request, generate_request, in_their_names

if TYPE_CHECKING:
    from dragoman_agent.model.source import ModelSource

_START_TIME = time.monotonic()
_SERVER_TYPE = "vllm-grpc"
_RATE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class VllmFacts:
    """What the interface reports and a ServedModel does not know."""

    model_path: str
    tokenizer_path: str  # a directory, or empty
    architecture: str
    page_size: int  # tokens
    num_blocks: int  # usable ones
    max_num_seqs: int
    is_open: bool  # without tickets, for which the interface has no field


def vllm_facts(source: ModelSource, model_spec: str, plan: Plan, *, is_open: bool) -> VllmFacts:
    """The facts of an agent that serves `source`, asked for as `model_spec`, by `plan`."""
    return VllmFacts(
        model_path=model_spec,
        tokenizer_path=str(source.path) if source.path.is_dir() else "",
        architecture=source.config.architecture,
        page_size=plan.page_size,
        num_blocks=plan.num_blocks - 1,
        max_num_seqs=plan.max_num_seqs,
        is_open=is_open,
    )


class VllmEngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):
    """Answers on an open agent. On one that takes tickets every call is refused: its callers could send none."""

    def __init__(
        self,
        engine: EngineClient,
        gate: Gate,
        acceptance: Acceptance,
        model: ServedModel,
        embedding: EmbeddingServicer,
        registry: CollectorRegistry,
        facts: VllmFacts,
    ) -> None:
        """`registry` holds the agent's own metrics."""
        self._engine = engine
        self._gate = gate
        self._acceptance = acceptance
        self._model = model
        self._embedding = embedding
        self._registry = registry
        self._facts = facts
        self._rate = TokenRate()
        self._last_receive_timestamp = 0.0
        engine.on_step(self._take_step)

    def _take_step(self, step: Step) -> None:
        self._rate.add(self._engine.num_tokens_of_step)

    async def Generate(self, request: vllm.GenerateRequest, context: Context) -> None:
        """Chunks where `stream` is set, then one complete message a choice."""
        self._check_access()
        self._last_receive_timestamp = time.time()
        try:
            await stream_generation(
                self._engine,
                self._acceptance,
                self._model.token_bytes,
                generate_request(request),
                context,
                VllmReplies(request.stream),
            )
        except DragomanError as error:
            raise in_their_names(error) from None

    async def Embed(self, request: vllm.EmbedRequest, context: Context) -> vllm.EmbedResponse:
        """The last token's hidden state, normalised."""
        self._check_access()
        try:
            response = await self._embedding.Embed(embed_request(request), context)
        except DragomanError as error:
            raise in_their_names(error) from None
        values = response.embeddings[0].values
        return vllm.EmbedResponse(embedding=values, prompt_tokens=response.prompt_tokens, embedding_dim=len(values))

    async def Abort(self, request: vllm.AbortRequest, context: Context) -> vllm.AbortResponse:
        """Cancel by id; the stream of each generation ends with `abort`."""
        self._check_access()
        for request_id in request.request_ids:
            self._engine.cancel(request_id)
            self._engine.cancel(f"{request_id}/0")  # an embedding
        return vllm.AbortResponse()

    async def HealthCheck(self, request: vllm.HealthCheckRequest, context: Context) -> vllm.HealthCheckResponse:
        """Whether a request would be taken now, and if not, why."""
        self._check_access()
        try:
            self._gate.check_open()
        except DragomanError as error:
            return vllm.HealthCheckResponse(healthy=False, message=error.message)
        return vllm.HealthCheckResponse(healthy=True, message="serving")

    async def GetModelInfo(self, request: vllm.GetModelInfoRequest, context: Context) -> vllm.GetModelInfoResponse:
        """The model as planned: its context is what the plan has room for."""
        self._check_access()
        limits, files = self._model.limits, self._model.files
        defaults = {name: value for name, value in asdict(limits.defaults).items() if value is not None}
        return vllm.GetModelInfoResponse(
            model_path=self._facts.model_path,
            is_generation=True,
            max_context_length=limits.max_context_tokens,
            vocab_size=limits.vocab_size,
            served_model_name=self._model.name,
            tokenizer_path=self._facts.tokenizer_path,
            model_type=self._facts.architecture,
            architectures=[f"{self._facts.architecture.capitalize()}ForCausalLM"],
            eos_token_ids=limits.eos_token_ids,
            bos_token_id=files.bos_token_id or 0,
            max_req_input_len=limits.max_context_tokens - 1,
            default_sampling_params_json=json.dumps(defaults) if defaults else "",
        )

    async def GetServerInfo(self, request: vllm.GetServerInfoRequest, context: Context) -> vllm.GetServerInfoResponse:
        """The server now."""
        self._check_access()
        return vllm.GetServerInfoResponse(
            active_requests=len(self._engine.live),
            is_paused=not self._gate.is_open,
            last_receive_timestamp=self._last_receive_timestamp,
            uptime_seconds=time.monotonic() - _START_TIME,
            server_type=_SERVER_TYPE,
            data_parallel_size=1,
        )

    async def GetLoads(self, request: vllm.GetLoadsRequest, context: Context) -> vllm.GetLoadsResponse:
        """The load after the last engine step."""
        self._check_access()
        if request.dp_rank:
            invalid("dp_rank", f"is {request.dp_rank}, and an agent is one rank, 0; leave it out")
        prompt, cached = (
            self._registry.get_sample_value(f"dragoman_{name}_total") or 0.0
            for name in ("prompt_tokens", "cached_prompt_tokens")
        )
        return vllm.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=f"dragoman {dragoman.__version__}",
            dp_rank_count=1,
            loads=[
                scheduler_load(
                    self._engine.load, self._facts, self._rate.per_second(), cached / prompt if prompt else 0.0
                )
            ],
        )

    def _check_access(self) -> None:
        if not self._facts.is_open:
            raise DragomanError(
                error_pb2.ERROR_REASON_TICKET_REQUIRED,
                "this agent takes requests with a ticket only, and vLLM's interface has no field for one: call the gateway or "
                "dragoman.v1.GenerationService with a ticket from the controller, or start an agent with --open on loopback",
            )


def scheduler_load(
    load: Load | None, facts: VllmFacts, tokens_per_second: float, cache_hit_rate: float
) -> vllm.SchedulerLoad:
    """The load of the one rank; before the engine's first frame nothing is in use. Pure."""
    running, waiting, used = 0, 0, 0
    if load is not None:
        running, waiting, used = load.running, load.waiting, load.total_blocks - load.free_blocks
    return vllm.SchedulerLoad(
        num_running_reqs=running,
        num_waiting_reqs=waiting,
        num_total_reqs=running + waiting,
        num_used_tokens=used * facts.page_size,
        max_total_num_tokens=facts.num_blocks * facts.page_size,
        token_usage=used / facts.num_blocks,
        gen_throughput=tokens_per_second,
        cache_hit_rate=cache_hit_rate,
        utilization=min(running / facts.max_num_seqs, 1.0),
        max_running_requests=facts.max_num_seqs,
    )


class TokenRate:
    """Output tokens over the last second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._recent: deque[tuple[float, int]] = deque()
        self._sum = 0

    def add(self, num_tokens: int) -> None:
        """The tokens of one step."""
        if num_tokens:
            self._recent.append((self._clock(), num_tokens))
            self._sum += num_tokens
        self._forget()

    def per_second(self) -> float:
        """Tokens a second."""
        self._forget()
        return self._sum / _RATE_SECONDS

    def _forget(self) -> None:
        horizon = self._clock() - _RATE_SECONDS
        while self._recent and self._recent[0][0] < horizon:
            self._sum -= self._recent.popleft()[1]

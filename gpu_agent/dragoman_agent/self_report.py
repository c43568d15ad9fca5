"""What an agent says of itself to the controllers: who it is, and how busy."""

from __future__ import annotations

import time

import dragoman
from dragoman.durations import duration_of
from dragoman.v1 import agent_pb2, hardware_pb2
from dragoman_agent.pal.plan import Plan
from dragoman_agent.prefetch import TransferRate
from dragoman_agent.rpc.engine_client import EngineClient
from dragoman_agent.rpc.kv_transfer import KvFormat
from dragoman_agent.rpc.served_model import ServedModel

_START_TIME = time.time()


def describe_agent(
    agent_id: str,
    data_address: str,
    metrics_address: str,
    devices: list[hardware_pb2.DeviceCandidate],
    model: ServedModel,
    plan: Plan,
    kv_format: KvFormat | None,
) -> agent_pb2.Agent:
    """The agent as it registers."""
    agent = agent_pb2.Agent(
        agent_id=agent_id,
        data_address=data_address,
        devices=devices,
        version=dragoman.__version__,
        metrics_address=metrics_address,
    )
    agent.start_time.FromSeconds(int(_START_TIME))
    for name in model.names:
        served = agent.models.add(
            model=name,
            model_digest=model.digest,
            max_context_tokens=model.limits.max_context_tokens,
            kv_block_tokens=plan.page_size,
            kv_block_count=plan.num_blocks - 1,
            max_running_requests=plan.max_num_seqs,
            max_waiting_requests=plan.max_num_waiting,
            step_model=plan.step_model.to_proto(),
            plan_digest=plan.digest(),
            embeds=True,
            vocabulary_size=model.limits.vocab_size,
        )
        if kv_format is not None:
            served.kv_type, served.kv_layout = kv_format.kv_type, kv_format.layout
            served.kv_bytes_per_token = kv_format.bytes_per_token
    return agent


def load_of_agent(
    engine: EngineClient, num_blocks: int, step_seconds: float, rate: TransferRate, tier_rate: float = 0.0
) -> agent_pb2.AgentLoad:
    """The load now. `num_blocks`: usable ones; before the engine's first frame none is taken.

    `tier_rate`: bytes/s at which KV comes up from the lower tiers, 0 where that is not known.
    """
    load = engine.load
    message = agent_pb2.AgentLoad(
        step_seconds=step_seconds,
        free_kv_blocks=num_blocks,
        kv_fetch_bytes_per_second=rate.bytes_per_second,
        kv_fetch_base_seconds=rate.base_seconds,
        kv_tier_bytes_per_second=tier_rate,
    )
    message.age.CopyFrom(duration_of(engine.step_age))
    message.step_age.CopyFrom(duration_of(engine.step_age))
    if load is not None:
        message.waiting_requests = load.waiting
        message.running_requests = load.running
        message.free_kv_blocks = load.free_blocks
        message.pending_prefill_tokens = load.pending_prefill_tokens
        message.running_context_tokens = load.running_context_tokens
        message.step_count = load.step_count
    return message

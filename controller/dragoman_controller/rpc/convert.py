"""Messages to the controller's own types and back."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration

from dragoman.durations import duration_of, seconds_of
from dragoman.errors import DragomanError
from dragoman.step_model import StepModel
from dragoman.v1 import admission_service_pb2, agent_pb2, agent_registry_service_pb2, error_pb2
from dragoman_controller.cell import CommandResult, Controller, Outcome
from dragoman_controller.commands import Command, Drain, Prefetch, Undrain
from dragoman_controller.fleet import AgentSpec, AgentState, KvTerms, Load, Member, ModelSpec
from dragoman_controller.quote import Quote
from dragoman_controller.requests import AdmissionRequest, Priority, Resume
from dragoman_controller.steps import StepTable

_PRIORITIES = {0: Priority.STANDARD, 1: Priority.INTERACTIVE, 2: Priority.STANDARD, 3: Priority.BATCH}
_MAX_DURATION_SECONDS = 1e9
# What is believed of an agent: far beyond any there is, and far from what would make arithmetic with it go wrong.
MAX_NUM_MODELS = 64
MAX_GRID_TIMES = 4096
MAX_CONTEXT_TOKENS = 1 << 24
MAX_NUM_SLOTS = 1 << 20
_MAX_NUMBER = 1e15
_MAX_MONOTONIC_MS = 1 << 62
_STATES = {int(state): state for state in AgentState}


def admission_request(message: admission_service_pb2.AcquireTicketRequest) -> AdmissionRequest:
    """The request of a message. Raises INVALID_REQUEST for a class this version does not know, or a malformed duration."""
    priority = _PRIORITIES.get(message.priority)
    if priority is None:
        raise invalid("priority", f"priority is {message.priority}, must be one of the named classes")
    resume = None
    if message.HasField("resume"):
        cut = message.resume
        resume = Resume(cut.origin_agent_id, cut.origin_epoch, cut.attempt, cut.from_cursor)
    has = message.HasField
    # By position, which takes half as long: there are many.
    return AdmissionRequest(
        message.request_id,
        message.model,
        message.prompt_tokens if has("prompt_tokens") else None,
        message.prompt_bytes,
        message.prompt_digest,
        message.max_output_tokens,
        message.block_hashes,
        priority,
        message.tenant,
        message.num_choices or 1,
        message.num_inputs,
        _seconds(message, "max_queue_wait") if has("max_queue_wait") else None,
        _seconds(message, "deadline") if has("deadline") else None,
        resume,
    )


def _seconds(message: admission_service_pb2.AcquireTicketRequest, name: str) -> float:
    """A duration field. The agent refuses a malformed one too: no ticket must be spent on it."""
    duration = getattr(message, name)
    if abs(duration.nanos) > 999_999_999 or duration.seconds * duration.nanos < 0:
        raise invalid(name, f"{name} is no valid duration: nanos must be within a second and of the sign of seconds")
    return seconds_of(duration)


def fill_quote(message: admission_service_pb2.LatencyQuote, quote: Quote) -> None:
    """The message of a quote."""
    for part, estimate in (
        (message.time_to_first_token, quote.time_to_first_token),
        (message.time_per_output_token, quote.time_per_output_token),
        (message.finish, quote.finish),
    ):
        expected, p10, p90 = estimate
        _fill_duration(part.expected, expected)
        _fill_duration(part.p10, p10)
        _fill_duration(part.p90, p90)


def _fill_duration(message: Duration, seconds: float) -> None:
    """As duration_of, for what is known to be 0 or more; a prediction past 30 years is cut to that."""
    if seconds >= 1.0:
        message.seconds = whole = int(min(seconds, _MAX_DURATION_SECONDS))
        seconds = min(seconds - whole, 0.999_999_999)
    message.nanos = int(seconds * 1e9)


def agent_spec(message: agent_pb2.Agent) -> AgentSpec:
    """The agent of a message. Raises INVALID_REQUEST for numbers that no device has: others are placed by them."""
    if len(message.models) > MAX_NUM_MODELS:
        raise invalid("agent.models", f"agent.models has {len(message.models)}, at most {MAX_NUM_MODELS} are allowed")
    chosen = next((candidate.device for candidate in message.devices if candidate.chosen), None)
    return AgentSpec(
        agent_id=message.agent_id,
        data_address=message.data_address,
        models=tuple(_model_spec(model) for model in message.models),
        architecture=chosen.architecture if chosen is not None else "",
        description=message.SerializeToString(),
    )


def _step_table(message: agent_pb2.ServedModel) -> StepTable:
    try:
        model = StepModel.from_proto(message.step_model)
    except ValueError as error:
        raise invalid(
            "agent.models.step_model", f"the step model of {message.model!r} is not usable: {error}"
        ) from None
    numbers = (*model.decode_seconds_grid, model.prefill_tokens_per_second, model.prefill_base_seconds)
    if len(numbers) > MAX_GRID_TIMES or not all(0.0 <= number <= _MAX_NUMBER for number in numbers):
        raise invalid(
            "agent.models.step_model",
            f"the step model of {message.model!r} is not usable: its times must be 0 or more and finite, {MAX_GRID_TIMES} "
            "of them at most",
        )
    return StepTable(model)


def _model_spec(message: agent_pb2.ServedModel) -> ModelSpec:
    steps = _step_table(message)
    context = message.max_context_tokens
    if message.kv_block_count and message.kv_block_tokens:
        context = min(context, message.kv_block_count * message.kv_block_tokens)
    if context > MAX_CONTEXT_TOKENS or message.max_running_requests > MAX_NUM_SLOTS:
        raise invalid(
            "agent.models",
            f"model {message.model!r} has a context of {context} tokens and {message.max_running_requests} running requests: "
            f"at most {MAX_CONTEXT_TOKENS} and {MAX_NUM_SLOTS} are believed",
        )
    return ModelSpec(
        name=message.model,
        digest=message.model_digest,
        max_context_tokens=context,
        max_running_requests=message.max_running_requests,
        max_waiting_requests=message.max_waiting_requests,
        steps=steps,
        plan_digest=message.plan_digest,
        kv=KvTerms(message.kv_type, message.kv_layout, message.kv_block_tokens, message.kv_bytes_per_token)
        if message.kv_type and message.kv_bytes_per_token
        else None,
    )


def agent_state(number: int) -> AgentState:
    """The state an agent reports. Raises INVALID_REQUEST for one that agents do not have."""
    state = _STATES.get(number)
    if state not in (AgentState.STARTING, AgentState.SERVING, AgentState.DRAINING):
        raise invalid("state", f"state is {number}, an agent reports STARTING, SERVING or DRAINING")
    return state


def load_of(message: agent_pb2.AgentLoad) -> Load:
    """The load of a message. Raises INVALID_REQUEST for numbers that are none."""
    step_seconds = message.step_seconds
    fetch_rate, fetch_base = message.kv_fetch_bytes_per_second, message.kv_fetch_base_seconds
    tier_rate = message.kv_tier_bytes_per_second
    if not (
        0.0 <= step_seconds <= _MAX_NUMBER
        and 0.0 <= fetch_rate <= _MAX_NUMBER
        and 0.0 <= fetch_base <= _MAX_NUMBER
        and 0.0 <= tier_rate <= _MAX_NUMBER
    ):
        numbers = step_seconds, fetch_rate, fetch_base, tier_rate
        raise invalid("load", f"the load has a number that is below 0 or not finite among {numbers}")
    # By position, which takes half as long: each agent sends five a second.
    return Load(
        message.waiting_requests,
        message.running_requests,
        message.pending_prefill_tokens,
        message.running_context_tokens,
        message.free_kv_blocks,
        seconds_of(message.age),
        seconds_of(message.step_age),
        message.step_count,
        step_seconds,
        fetch_rate,
        fetch_base,
        tier_rate,
    )


def monotonic_ms(value: int) -> int:
    """An agent's clock. Raises INVALID_REQUEST for one that tickets could not be dated by."""
    if value > _MAX_MONOTONIC_MS:
        raise invalid("agent_monotonic_ms", f"agent_monotonic_ms is {value}: no machine has been up for so long")
    return value


def load_message(member: Member, now: float) -> agent_pb2.AgentLoad:
    """The load of a member as last heard, its ages as of now."""
    load, since = member.load, now - member.heard_at
    return agent_pb2.AgentLoad(
        waiting_requests=load.waiting_requests,
        running_requests=load.running_requests,
        free_kv_blocks=load.free_kv_blocks,
        pending_prefill_tokens=load.pending_prefill_tokens,
        running_context_tokens=load.running_context_tokens,
        age=duration_of(load.age_seconds + since),
        step_age=duration_of(load.step_age_seconds + since),
        step_count=load.step_count,
        step_seconds=load.step_seconds,
    )


def outcome_of(message: agent_registry_service_pb2.RequestOutcome) -> Outcome:
    """The outcome of a message."""
    # By position, which takes half as long: there is one for each request.
    return Outcome(
        message.jti,
        seconds_of(message.time_to_first_token),
        seconds_of(message.total_time),
        message.output_tokens,
        message.incomplete,
        message.engine_lost,
        message.prompt_tokens,
        message.cached_tokens,
        message.prompt_digest,
    )


def command_result(message: agent_registry_service_pb2.CommandResult) -> CommandResult:
    """The result of a message."""
    outcome = None
    if message.hint_outcome:
        names = agent_registry_service_pb2.HintOutcome.DESCRIPTOR.values_by_number
        known = names.get(message.hint_outcome)
        outcome = known.name.removeprefix("HINT_OUTCOME_").lower() if known else "unknown"
    return CommandResult(message.command_id, message.code, message.message, outcome)


def command_message(command_id: str, command: Command) -> agent_registry_service_pb2.Command:
    """The message of a command."""
    message = agent_registry_service_pb2.Command(command_id=command_id)
    if isinstance(command, Drain):
        message.drain.grace_period.CopyFrom(duration_of(command.grace_seconds))
    elif isinstance(command, Prefetch):
        message.prefetch_prefix.model = command.model
        message.prefetch_prefix.block_hashes.extend(command.block_hashes)
        message.prefetch_prefix.source_address = command.source_address
        message.prefetch_prefix.source_agent_id = command.source_agent_id
        message.prefetch_prefix.source_ticket = command.source_ticket
        if command.limit_seconds:
            message.prefetch_prefix.time_limit.CopyFrom(duration_of(command.limit_seconds))
    elif isinstance(command, Undrain):
        message.undrain.SetInParent()
    else:
        for key_id, key in command.keys:
            message.rotate_keys.keys.add(key_id=key_id, key=key)
    return message


def controller_messages(controllers: tuple[Controller, ...]) -> list[agent_pb2.Controller]:
    """The list of a cell's controllers."""
    return [agent_pb2.Controller(controller_id=one.controller_id, address=one.address) for one in controllers]


def invalid(param: str, message: str) -> DragomanError:
    """An INVALID_REQUEST that names its field."""
    return DragomanError(error_pb2.ERROR_REASON_INVALID_REQUEST, message, metadata={"param": param})

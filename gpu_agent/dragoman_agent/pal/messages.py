"""Profile, plan and decisions as protocol messages. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from google.protobuf import timestamp_pb2

from dragoman.v1 import hardware_pb2
from dragoman_agent.pal.decisions import Decision
from dragoman_agent.pal.plan import Plan
from dragoman_agent.pal.plan_fields import plan_fields
from dragoman_agent.pal.profile import SCHEMA_VERSION, DeviceFacts, Profile, Value

_PROVENANCE = {
    "measured": hardware_pb2.PROVENANCE_MEASURED,
    "reported": hardware_pb2.PROVENANCE_REPORTED,
    "spec": hardware_pb2.PROVENANCE_SPEC,
    "derived": hardware_pb2.PROVENANCE_DERIVED,
}


def plan_to_proto(plan: Plan, decision_ids: Mapping[str, str]) -> hardware_pb2.Plan:
    """The message of a plan. `decision_ids` are those in force, by subject."""
    message = hardware_pb2.Plan(digest=plan.digest(), model=plan.model_name, step_model=plan.step_model.to_proto())
    for field in plan_fields(plan):
        entry = message.fields.add(name=field.name, unit=field.unit, decision_id=decision_ids.get(field.subject, ""))
        _set_value(entry, field.value, field.labels)
    message.memory.extend(hardware_pb2.MemoryLine(name=m.name, size_bytes=m.size_bytes) for m in plan.memory)
    return message


def device_to_proto(facts: DeviceFacts) -> hardware_pb2.Device:
    """The message of a device."""
    return hardware_pb2.Device(
        index=facts.index,
        name=facts.name,
        kind=facts.kind,
        architecture=facts.architecture,
        memory_bytes=facts.memory_bytes,
        uuid=facts.uuid,
    )


def profile_to_proto(profile: Profile) -> hardware_pb2.HardwareProfile:
    """The message of a profile."""
    created = timestamp_pb2.Timestamp()
    created.FromJsonString(profile.created.replace("+00:00", "Z"))
    return hardware_pb2.HardwareProfile(
        schema_version=SCHEMA_VERSION,
        name=profile.name,
        device=device_to_proto(profile.device),
        fingerprint=profile.fingerprint,
        values=[_value_to_proto(name, value) for name, value in sorted(profile.values.items())],
        create_time=created,
    )


def _value_to_proto(name: str, value: Value) -> hardware_pb2.ProfileValue:
    message = hardware_pb2.ProfileValue(
        name=name, unit=value.unit, provenance=_PROVENANCE[value.provenance], note=value.note, spread=value.spread
    )
    _set_value(message, value.value, value.labels)
    return message


def _set_value(
    message: hardware_pb2.ProfileValue | hardware_pb2.PlanField,
    value: float | int | str | bool | tuple[float, ...],
    labels: tuple[str, ...],
) -> None:
    match value:
        case bool():
            message.flag = value
        case str():
            message.text = value
        case tuple():
            message.numbers.CopyFrom(hardware_pb2.NumberList(values=value, labels=labels))
        case _:
            message.number = value


def decision_to_proto(decision: Decision) -> hardware_pb2.Decision:
    """The message of a decision."""
    message = hardware_pb2.Decision(
        decision_id=decision.decision_id,
        subject=decision.subject,
        inputs=[
            hardware_pb2.DecisionInput(name=i.name, value=i.value, provenance=_PROVENANCE[i.provenance])
            for i in decision.inputs
        ],
        candidates=[
            hardware_pb2.DecisionCandidate(name=c.name, predicted=c.predicted, rejected_because=c.rejected_because)
            for c in decision.candidates
        ],
        chosen=decision.chosen,
        reason=decision.reason,
        predicted=decision.predicted,
        measured=decision.measured,
        unit=decision.unit,
    )
    message.decide_time.FromNanoseconds(int(decision.unix_time * 1e9))
    return message

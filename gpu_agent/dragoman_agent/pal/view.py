"""The hardware layer as protocol messages: what the HardwareService shows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import psutil
from google.protobuf import duration_pb2, timestamp_pb2

from dragoman.v1 import hardware_pb2
from dragoman_agent.pal.decisions import Decision, DecisionLog
from dragoman_agent.pal.plan import Plan
from dragoman_agent.pal.profile import DeviceFacts, Profile, Value
from dragoman_agent.pal.select import Selection

_PROVENANCE = {
    "measured": hardware_pb2.PROVENANCE_MEASURED,
    "reported": hardware_pb2.PROVENANCE_REPORTED,
    "spec": hardware_pb2.PROVENANCE_SPEC,
    "derived": hardware_pb2.PROVENANCE_DERIVED,
}


class HardwareView:
    """Read access to profile, plan, decisions and live limits, as messages."""

    def __init__(self, profile: Profile, selection: Selection | None, plan: Plan, log: DecisionLog) -> None:
        self._profile = profile
        self._selection = selection
        self._plan = plan
        self._log = log

    def profile(self) -> hardware_pb2.HardwareProfile:
        """The profile in force."""
        return profile_to_proto(self._profile)

    def candidates(self) -> list[hardware_pb2.DeviceCandidate]:
        """Every device that was looked at, the chosen one first."""
        if self._selection is None:
            device = device_to_proto(self._profile.device)
            return [hardware_pb2.DeviceCandidate(device=device, chosen=True, reason="asked for")]
        return [
            hardware_pb2.DeviceCandidate(
                device=device_to_proto(verdict.device.facts), chosen=verdict.chosen, reason=verdict.reason
            )
            for verdict in self._selection.verdicts
        ]

    def plan(self) -> hardware_pb2.Plan:
        """The plan in force."""
        plan = self._plan
        by_subject = {decision.subject: decision.decision_id for decision in self._log.all()}
        message = hardware_pb2.Plan(digest=plan.digest(), model=plan.model_name, step_model=plan.step_model.to_proto())
        for name, subject, unit in _PLAN_FIELDS:
            if subject not in by_subject:  # a device that has no such choice
                continue
            value = getattr(plan, name)
            entry = message.fields.add(name=name, unit=unit, decision_id=by_subject[subject])
            if isinstance(value, str):
                entry.text = value
            else:
                entry.number = value
        message.memory.extend(hardware_pb2.MemoryLine(name=m.name, size_bytes=m.size_bytes) for m in plan.memory)
        return message

    def decisions(self) -> list[hardware_pb2.Decision]:
        """The decisions held, oldest first."""
        return [decision_to_proto(decision) for decision in self._log.all()]

    async def watch_decisions(self) -> AsyncIterator[hardware_pb2.Decision]:
        """The decisions held, then each new or completed one."""
        async for decision in self._log.watch():
            yield decision_to_proto(decision)

    async def live_limits(self) -> hardware_pb2.LiveLimits:
        """A fresh sample of what changes while the device runs."""
        start = time.monotonic()
        own = await asyncio.to_thread(_own_memory)
        memory = psutil.virtual_memory()
        limits = hardware_pb2.LiveLimits(
            free_memory_bytes=memory.available, foreign_memory_bytes=max(memory.used - own, 0)
        )
        limits.age.CopyFrom(duration_pb2.Duration(nanos=int((time.monotonic() - start) * 1e9)))
        return limits


_PLAN_FIELDS = (
    ("page_size", "page-size", "tokens"),
    ("num_blocks", "kv-blocks", ""),
    ("max_context_tokens", "max-context", "tokens"),
    ("max_batch_tokens", "step-tokens", "tokens"),
    ("max_num_seqs", "max-seqs", ""),
    ("num_threads", "threads", ""),
    ("road", "road", ""),
    ("kv_dtype", "road", ""),
)


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
        schema_version=1,
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
    match value.value:
        case bool():
            message.flag = value.value
        case str():
            message.text = value.value
        case tuple():
            message.numbers.CopyFrom(hardware_pb2.NumberList(values=value.value, labels=value.labels))
        case _:
            message.number = value.value
    return message


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


def _own_memory() -> int:
    """Resident bytes of this process and its children."""
    process = psutil.Process()
    total = 0
    for entry in (process, *process.children(recursive=True)):
        try:
            total += int(entry.memory_info().rss)
        except psutil.Error:  # it ended meanwhile
            continue
    return total

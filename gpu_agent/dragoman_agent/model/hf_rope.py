"""Rotary embedding of a config.json, in the spellings of old and new files."""

from __future__ import annotations

import logging
from typing import Final

from dragoman_agent.model.config import RopeScaling
from dragoman_agent.model.json_object import JsonObject

DEFAULT_ROPE_THETA: Final = 10000.0  # RoFormer's base; files older than the key mean this
MAX_POSITIONS: Final = 1 << 31

_KINDS: Final = ("default", "linear", "llama3", "yarn")
_KNOWN_KEYS: Final = frozenset(
    {"type", "rope_type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"}
    | {"original_max_position_embeddings", "attention_factor", "truncate", "partial_rotary_factor"}
)
_log = logging.getLogger(__name__)


def rope_of(config: JsonObject) -> tuple[float, RopeScaling]:
    """Base and scaling from `rope_theta` and `rope_scaling`, or from `rope_parameters`.

    The kind may be called `rope_type` or `type`. Raises ModelFileError for an unknown kind, a key its kind needs that
    is not there (never filled in: a wrong guess computes a wrong model), and two spellings that disagree.
    """
    outer = config.positive("rope_theta")
    found = [_read(config, key, outer) for key in ("rope_parameters", "rope_scaling") if key in config]
    if not found:
        return outer or DEFAULT_ROPE_THETA, RopeScaling()
    if any(other != found[0] for other in found[1:]):
        raise config.refuse("rope_scaling", "it contradicts 'rope_parameters'", "correct the file")
    return found[0]


def _read(config: JsonObject, key: str, outer_theta: float | None) -> tuple[float, RopeScaling]:
    rope = config.child(key)
    assert rope is not None
    theta = rope.positive("rope_theta")
    if theta is not None and outer_theta is not None and theta != outer_theta:
        raise config.refuse("rope_theta", f"it contradicts '{key}.rope_theta' ({theta:g})", "correct the file")
    _check_keys(rope, key)
    kind = rope.text("rope_type") or rope.text("type")
    if kind is None:
        if rope.keys - {"rope_theta"}:
            raise rope.missing("rope_type")
        kind = "default"
    if kind not in _KINDS:
        name = "rope_type" if "rope_type" in rope else "type"
        raise rope.refuse(name, f"this rotary scaling is not supported (known: {', '.join(_KINDS)})")
    return theta or outer_theta or DEFAULT_ROPE_THETA, _scaling(config, rope, kind)


def _check_keys(rope: JsonObject, key: str) -> None:
    first, second = rope.text("rope_type"), rope.text("type")
    if first and second and first != second:
        raise rope.refuse("type", f"it contradicts 'rope_type' ({first!r})", "correct the file")
    if (rope.positive("partial_rotary_factor") or 1.0) != 1.0:
        raise rope.refuse("partial_rotary_factor", "rotating a part of each head is not supported")
    if rope.flag("truncate") is False:
        raise rope.refuse("truncate", "yarn without whole pair indices is not supported")
    for other in ("mscale", "mscale_all_dim"):
        if other in rope:
            raise rope.refuse(other, "this form of yarn is not supported")
    unknown = sorted(rope.keys - _KNOWN_KEYS)
    if unknown:
        _log.warning("%s: key '%s.%s' is not known and has no effect", rope.path, key, unknown[0])


def _scaling(config: JsonObject, rope: JsonObject, kind: str) -> RopeScaling:
    if kind == "default":
        return RopeScaling()
    factor = rope.required_positive("factor")
    if factor < 1:
        raise rope.wrong("factor", "a number from 1")
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor)
    original = rope.integer("original_max_position_embeddings", most=MAX_POSITIONS) or config.integer(
        "original_max_position_embeddings", most=MAX_POSITIONS
    )
    if original is None:
        raise rope.missing("original_max_position_embeddings")
    if kind == "llama3":
        low, high = rope.required_positive("low_freq_factor"), rope.required_positive("high_freq_factor")
        if low >= high:
            raise rope.wrong("low_freq_factor", f"a number below high_freq_factor ({high:g})")
        return RopeScaling(
            kind="llama3", factor=factor, low_freq_factor=low, high_freq_factor=high, original_max_position=original
        )
    fast, slow = rope.positive("beta_fast") or 32.0, rope.positive("beta_slow") or 1.0  # the paper's values
    if fast <= slow:
        raise rope.wrong("beta_fast", f"a number above beta_slow ({slow:g})")
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_position=original,
        attention_factor=rope.positive("attention_factor"),
        beta_fast=fast,
        beta_slow=slow,
    )

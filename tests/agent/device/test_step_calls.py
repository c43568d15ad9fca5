"""What the host does for a decode step on a GPU, and what it does not do again where nothing changed."""

from __future__ import annotations

import json

from tests.agent.device.apart import printed_by


def test_what_did_not_change_is_not_looked_at_again() -> None:
    """In a process of its own: Triton's interpreter is chosen when its kernels are imported."""
    shown = json.loads(printed_by("step_calls", OMP_NUM_THREADS="1"))
    assert shown["first"] == {"stay_on": 1, "_sound_decode": 1, "_draw_others": 1}
    assert shown["next"] == {"stay_on": 1}, "entering a stream costs the host what a launch does"
    for name in ("top_ks", "top_ps", "min_ps", "num_logprobs"):
        assert shown[name]["_draw_others"] == shown[f"{name} again"]["_draw_others"] == 1, name
        assert shown[f"without {name}"]["_draw_others"] == 1
    assert shown["temperatures"]["_draw_others"] == 1
    assert "_draw_others" not in shown["temperatures again"], "greedy rows ask for nothing"
    assert "_draw_others" not in shown["as before"]
    assert shown["edited"]["_draw_others"] == 1
    assert shown["late"] == {"stay_on": 2}

"""Random values in every field: an answer or a 400 with four keys, never a 5xx."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dragoman_gateway.schema import ChatBody, CompletionBody, DetokenizeBody, TemplateBody, TokenizeBody

ROUTES = {
    "/v1/chat/completions": (ChatBody, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}),
    "/v1/completions": (CompletionBody, {"prompt": "x", "max_tokens": 2}),
    "/tokenize": (TokenizeBody, {"prompt": "x"}),
    "/detokenize": (DetokenizeBody, {"tokens": [65]}),
    "/apply-template": (TemplateBody, {"messages": [{"role": "user", "content": "x"}]}),
}
NUMBERS = st.sampled_from([0, 1, 2, -1, 0.5, 1e-30, 1e300, 2**31, 2**63 - 1, 2**64, -(2**63)])
LEAVES = st.none() | st.booleans() | NUMBERS | st.text(max_size=8) | st.integers(0, 300)
KEYS = st.sampled_from(["type", "role", "content", "text", "name", "include_usage", "65", "json_schema", "function"])
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=8
)


@pytest.mark.parametrize("path", ROUTES)
def test_no_body_gives_a_server_error(alphabet: Any, path: str) -> None:
    model, base = ROUTES[path]
    fields = sorted({*model.model_fields, "functions", "unknown", "guided_json", "modalities"} - {"max_tokens"})

    @settings(max_examples=80, deadline=None, derandomize=True, database=None,
              suppress_health_check=[HealthCheck.too_slow])  # fmt: skip
    @given(st.dictionaries(st.sampled_from(fields), VALUES, max_size=2))
    def check(extra: dict[str, Any]) -> None:
        try:
            body = orjson.dumps({**base, **extra})
        except (TypeError, orjson.JSONEncodeError):
            return
        reply = alphabet.http.post(path, content=body)
        assert reply.status_code in (200, 400, 404), (extra, reply.text)
        if reply.status_code != 200:
            assert reply.json()["error"].keys() == {"message", "type", "param", "code"}
            assert "Traceback" not in reply.text
        elif "event-stream" in reply.headers["content-type"]:
            assert reply.content.endswith(b"data: [DONE]\n\n") and b'"error"' not in reply.content

    check()

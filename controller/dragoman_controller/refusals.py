"""Why a request is refused before anybody looks for a place: nobody serves its model, or nobody's context holds it."""

from __future__ import annotations

import difflib

from dragoman.errors import DragomanError
from dragoman.v1 import error_pb2
from dragoman_controller.candidates import Candidates
from dragoman_controller.placer import Placer
from dragoman_controller.requests import AdmissionRequest

MIN_RETRY_SECONDS = 1.0
# After its start a controller gives the agents this long to find it before it says that a model is unknown.
SETTLE_SECONDS = 5.0


def check_served(placer: Placer, request: AdmissionRequest, is_settled: bool) -> None:
    """Raises DragomanError where no agent could ever take the request. `is_settled`: agents had the time to register."""
    candidates = placer.candidates(request.model)
    if candidates is None:
        raise _unknown_model(placer, request.model, is_settled)
    _check_live(request.model, candidates)
    longest = candidates.largest_context
    if request.min_context_tokens() > longest:
        raise DragomanError(
            error_pb2.ERROR_REASON_CONTEXT_EXCEEDED,
            f"the prompt has {request.prompt_tokens} tokens, and at least one more is to be generated; the longest "
            f"context of {request.model!r} is {longest} tokens: shorten the prompt",
            metadata={
                "param": "prompt_tokens",
                "prompt_tokens": str(request.prompt_tokens),
                "max_output_tokens": str(request.max_output_tokens),
                "limit": str(longest),
            },
        )


def _unknown_model(placer: Placer, model: str, is_settled: bool) -> DragomanError:
    served = placer.model_names()
    if not served and not is_settled:
        return DragomanError(
            error_pb2.ERROR_REASON_NO_AGENT,
            "the controller has just started and no agent has registered yet: ask again in 1 s",
            retry_delay=MIN_RETRY_SECONDS,
        )
    close = difflib.get_close_matches(model, served, n=1, cutoff=0.5)
    hint = f" did you mean {close[0]!r}?" if close else ""
    listing = f"served are {', '.join(map(repr, served))}" if served else "no agent has registered"
    return DragomanError(
        error_pb2.ERROR_REASON_MODEL_NOT_SERVED,
        f"no agent serves the model {model!r}: {listing}.{hint}",
        metadata={"param": "model", "served": ",".join(served)},
    )


def _check_live(model: str, candidates: Candidates) -> None:
    """Raises MODEL_LOADING or NO_AGENT when no agent of the model may be given a request, full or not."""
    if candidates.num_in_state("serving"):
        return
    if candidates.num_in_state("starting"):
        raise DragomanError(
            error_pb2.ERROR_REASON_MODEL_LOADING,
            f"the agents of {model!r} are still loading it: ask again in 2 s",
            retry_delay=2.0,
        )
    what = "draining" if candidates.num_in_state("draining") else "silent or gone"
    raise DragomanError(
        error_pb2.ERROR_REASON_NO_AGENT,
        f"every agent of {model!r} is {what}: ask again in {MIN_RETRY_SECONDS:.0f} s, and look at the agents",
        retry_delay=MIN_RETRY_SECONDS,
    )

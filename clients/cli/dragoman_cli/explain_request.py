"""`dragoman explain --request ID`: why a request went to its agent, with the seconds of every candidate."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from rich.table import Table
from rich.text import Text

from dragoman_cli.console import make_console
from dragoman_cli.failure import Failure

_SPARE = "-"


def explain_request(request_id: str, controller: str, as_json: bool) -> None:
    """Asks the controller that placed the request, and prints. Raises DragomanError where it is not remembered."""
    found = asyncio.run(_ask(request_id, controller))
    if as_json:
        from google.protobuf.json_format import MessageToDict

        print(json.dumps(MessageToDict(found, preserving_proto_field_name=True), indent=1))
    else:
        _show(found)


async def _ask(request_id: str, controller: str) -> Any:
    """The explanation, of whichever controller of the cell remembers the request."""
    from dragoman.controllers import Controllers
    from dragoman.errors import DragomanError
    from dragoman.ticket import CALL_SECONDS, Channels, ask_controller
    from dragoman.tls import environment_credentials
    from dragoman.v1 import error_pb2, fleet_service_pb2_grpc
    from dragoman.v1 import fleet_service_pb2 as pb

    try:
        controllers = Controllers(controller)
    except ValueError as error:
        raise Failure(f"--controller: {error}", exit_code=2) from None
    channels = Channels(environment_credentials())
    request = pb.ExplainPlacementRequest(request_id=request_id)
    failure: DragomanError | None = None
    try:
        for _ in controllers.addresses:
            address = controllers.current

            def ask(at: str) -> Any:
                stub = fleet_service_pb2_grpc.FleetServiceStub(channels.get(at))
                return stub.ExplainPlacement(request, timeout=CALL_SECONDS)

            try:
                return await ask_controller(controllers, ask)
            except DragomanError as error:
                # Another controller of the cell may have placed it.
                if failure is None or error.reason == error_pb2.ERROR_REASON_INVALID_REQUEST:
                    failure = error
                controllers.failed(address)
    finally:
        await channels.close()
    assert failure is not None
    raise failure


def _show(found: Any) -> None:
    from dragoman.durations import seconds_of

    console = make_console()
    console.print(
        Text(
            f"request {found.request_id}: {found.prompt_tokens} prompt and up to {found.output_tokens} output tokens of {found.model}"
        )
    )
    console.print(Text(found.reason))
    waited = seconds_of(found.queue_time)
    if waited >= 0.001:
        console.print(Text(f"it waited {waited:.3f} s in the controller's queue before that"))
    quote = found.quote
    for name, estimate in (
        ("first token", quote.time_to_first_token),
        ("token", quote.time_per_output_token),
        ("finish", quote.finish),
    ):
        expected, p10, p90 = (seconds_of(part) for part in (estimate.expected, estimate.p10, estimate.p90))
        console.print(Text(f"promised {name}: {expected:.4g} s, between {p10:.4g} and {p90:.4g} s eight times in ten"))
    console.print(_table(found))


def _table(found: Any) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("agent", "total s", "wait s", "prefill s", "decode s", "cached", "fetch s", ""):
        table.add_column(heading, justify="left" if heading in ("agent", "") else "right", overflow="fold")
    for one in found.candidates:
        total = one.queue_seconds + one.prefill_seconds + one.decode_seconds
        chosen = "chosen" if one.agent_id == found.chosen_agent_id else one.excluded_because
        numbers = [f"{value:.3f}" for value in (total, one.queue_seconds, one.prefill_seconds, one.decode_seconds)]
        fetch = f"{one.fetch_seconds:.3f}" if one.HasField("fetch_seconds") else _SPARE
        table.add_row(*(Text(cell) for cell in (one.agent_id, *numbers, str(one.cached_tokens), fetch, chosen)))
    return table

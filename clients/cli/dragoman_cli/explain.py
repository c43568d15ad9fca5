"""`dragoman explain`: the decisions of a running agent, or of a plan made offline, in plain words."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from dragoman_cli.config import did_you_mean
from dragoman_cli.console import make_console
from dragoman_cli.explain_request import explain_request
from dragoman_cli.failure import Failure
from dragoman_cli.plan_text import newest, paragraph
from dragoman_cli.planning import Request, plan_offline
from dragoman_cli.typed import is_typed, refuse_typed

app = typer.Typer(add_completion=False, rich_markup_mode=None)

DEFAULT_AGENT = "127.0.0.1:50051"
DEFAULT_CONTROLLER = "127.0.0.1:50050"


@app.command()
def explain(
    ctx: typer.Context,
    why: Annotated[str, typer.Option("--why", help="One subject, such as page-size, with its history.")] = "",
    agent: Annotated[
        str, typer.Option("--agent", envvar="DRAGOMAN_AGENT", help="Address of a running agent.")
    ] = DEFAULT_AGENT,
    agent_id: Annotated[
        str,
        typer.Option("--agent-id", envvar="DRAGOMAN_AGENT_ID", help="Its id, which its certificate names: with TLS."),
    ] = "",
    profile: Annotated[
        str, typer.Option("--profile", help="Explain a plan for this card or profile file, without an agent.")
    ] = "",
    model: Annotated[str, typer.Option("--model", help="The model of that plan.")] = "",
    context: Annotated[str, typer.Option("--context", help="Tokens of a request of that plan, such as 4k.")] = "",
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", min=1, max=4096, help="Requests at once of that plan.")
    ] = None,
    kv_dtype: Annotated[str, typer.Option("--kv-dtype", help="K and V of that plan: auto, bf16 or fp8.")] = "auto",
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="That plan with the same tokens whatever else runs.")
    ] = False,
    pal: Annotated[str, typer.Option("--pal", help="off: that plan as the one fixed configuration.")] = "on",
    request_id: Annotated[
        str, typer.Option("--request", help="Why this request went to its agent, by its id; asks the controller.")
    ] = "",
    controller: Annotated[
        str,
        typer.Option("--controller", envvar="DRAGOMAN_CONTROLLER", help="Address of the controller, for --request."),
    ] = DEFAULT_CONTROLLER,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    cache_dir: Annotated[Path | None, typer.Option("--cache-dir", help="Where models and profiles are kept.")] = None,
) -> None:
    """Explain the decisions of an agent, or of a plan, in plain words."""
    if request_id:
        if why or profile or model:
            raise Failure(
                "--request is about a placement, --why, --profile and --model are about a plan",
                remedy="ask for one of the two",
                exit_code=2,
            )
        refuse_typed(ctx, ("agent", "agent_id"), "a placement is explained by the controller")
        explain_request(request_id, controller, as_json)
        return
    if profile or model:
        refuse_typed(ctx, ("agent", "agent_id", "controller"), "nobody is asked for a plan that is made here")
        request = Request(
            profile, model, context, concurrency, switches={"pal": pal}, cache_dir=cache_dir,
            deterministic=deterministic, kv_dtype=kv_dtype,
        )  # fmt: skip
        held = _plan(request)
    else:
        refuse_typed(ctx, ("controller",), "only --request asks the controller")
        if context or concurrency or deterministic or kv_dtype != "auto" or pal != "on":
            raise Failure(
                "--context, --concurrency, --kv-dtype, --deterministic and --pal belong to a plan made here",
                "a running agent has its own",
                "add --model NAME, or leave them out",
                exit_code=2,
            )
        _check_agent(ctx, agent)
        held = asyncio.run(_ask(agent, agent_id))
    decisions = _about(why, held.decisions)
    if as_json:
        print(_to_json(held, decisions))
    else:
        _show(held, decisions)


def _plan(request: Request) -> Any:
    """The plan and decisions of a plan made here. Raises Failure."""
    if not request.model:
        raise Failure("--profile alone is no plan", "a plan is of a model", "add --model NAME", exit_code=2)
    planned = plan_offline(request, "dragoman explain")
    if planned.outlook.plan is None:
        remedy = "; ".join(planned.outlook.changes)
        raise Failure(f"there is no plan to explain: {planned.outlook.problem}", remedy=remedy)
    return planned.to_message()


def _check_agent(ctx: typer.Context, agent: str) -> None:
    """Refuses what could not be dialled, and an id that nothing would be held against. Raises Failure."""
    from dragoman.address import address_problem
    from dragoman.tls import environment_credentials

    if problem := address_problem(agent):
        raise Failure(f"--agent: the address {agent!r} {problem}", exit_code=2)
    if is_typed(ctx, "agent_id") and environment_credentials() is None:
        raise Failure(
            "--agent-id has no effect without TLS",
            "it is held against the agent's certificate, and there is none",
            "set DRAGOMAN_TLS_CERTIFICATE, DRAGOMAN_TLS_KEY and DRAGOMAN_TLS_CA, or leave --agent-id out",
            exit_code=2,
        )


async def _ask(agent: str, agent_id: str) -> Any:
    """The plan and decisions of a running agent. Raises DragomanError."""
    from dragoman.ticket import CALL_SECONDS, Channels, ask_agent
    from dragoman.tls import environment_credentials
    from dragoman.v1 import hardware_service_pb2 as pb
    from dragoman.v1 import hardware_service_pb2_grpc

    channels = Channels(environment_credentials())
    try:
        stub = hardware_service_pb2_grpc.HardwareServiceStub(channels.get(agent, agent_id))
        return await ask_agent(agent, lambda: stub.GetPlan(pb.GetPlanRequest(), timeout=CALL_SECONDS))
    finally:
        await channels.close()


def _about(subject: str, decisions: Any) -> list[Any]:
    """The newest decision on each subject; with `subject` all that are held on it, the newest last. Raises Failure."""
    by_subject = newest(decisions)
    if not subject:
        return list(by_subject.values())
    if subject not in by_subject:
        raise Failure(
            f"nothing was decided about {subject!r}{did_you_mean(subject, by_subject)}",
            remedy="ask about one of: " + ", ".join(sorted(by_subject)),
        )
    return [decision for decision in decisions if decision.subject == subject]


def _show(held: Any, decisions: list[Any]) -> None:
    console = make_console()
    told = newest(held.decisions)
    device = told["device"].chosen if "device" in told else ""
    console.print(Text(f"{held.plan.model}{' on ' + device if device else ''}, plan {held.plan.digest.hex()[:12]}"))
    for subject in ("profile", "switches"):
        if subject in told and told[subject] not in decisions:
            console.print(Text(paragraph(told[subject])))
    for decision in decisions:
        console.print()
        console.print(Text(paragraph(decision)))


def _to_json(held: Any, decisions: list[Any]) -> str:
    from google.protobuf.json_format import MessageToDict

    body = {
        "model": held.plan.model,
        "digest": held.plan.digest.hex(),
        "decisions": [MessageToDict(decision, preserving_proto_field_name=True) for decision in decisions],
    }
    return json.dumps(body, indent=1)

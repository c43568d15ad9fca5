"""`dragoman chat`: one answer, or a conversation. Streams straight from the agent, with a ticket from the controller."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from dragoman_cli.failure import Failure, report

app = typer.Typer(add_completion=False, rich_markup_mode=None)

# A small model may never end by itself, and nobody reads more than this by accident.
DEFAULT_MAX_TOKENS = 512
_HELP = "/new starts over, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


@app.command()
def chat(
    message: Annotated[list[str] | None, typer.Argument(help="What to say; without it, a conversation begins.")] = None,
    model: str | None = typer.Option(None, "--model", help="The model; may be left out when one is served."),
    system: str | None = typer.Option(None, "--system", help="The system message."),
    max_tokens: int = typer.Option(DEFAULT_MAX_TOKENS, "--max-tokens", min=1, help="Most tokens in an answer."),
    temperature: float | None = typer.Option(None, "--temperature", help="0 is greedy; default is the model's own."),
    seed: int | None = typer.Option(None, "--seed", help="Makes sampling repeatable."),
    stats: bool = typer.Option(False, "--stats", help="Say after each answer how quick it was."),
    controller: str = typer.Option(
        "127.0.0.1:50050", "--controller", envvar="DRAGOMAN_CONTROLLER", help="Address of the controller."
    ),
    agent: str | None = typer.Option(None, "--agent", help="Address of an open agent; then no controller is asked."),
) -> None:
    """Talk to a served model."""
    from dragoman import Client

    options: dict[str, Any] = {
        "model": model, "max_output_tokens": max_tokens, "temperature": temperature, "seed": seed,
    }  # fmt: skip
    opening = [{"role": "system", "content": system}] if system else []
    text = " ".join(message) if message else None
    if text is None and not sys.stdin.isatty():
        text = _read_stdin()
    if text is not None and not text.strip():
        raise Failure("there is nothing to say", "the message is empty", 'give one, as in: dragoman chat "hello"')
    with Client(controller, agent=agent) as client:
        if text is not None:
            answer(client, [*opening, {"role": "user", "content": text.strip()}], options, stats)
        else:
            converse(client, opening, options, stats)


def _read_stdin() -> str:
    """The text on stdin. Raises Failure when it is not UTF-8, which some locales tell here and others when it is sent."""
    try:
        text = sys.stdin.read()
        text.encode()
    except UnicodeError:
        why = "other bytes could not be told apart from what was meant"
        raise Failure("the text on stdin is not UTF-8", why, "convert it first, as in: iconv -t utf-8 FILE") from None
    return text


def answer(client: Any, messages: list[dict[str, str]], options: dict[str, Any], stats: bool) -> str:
    """Prints an answer while it comes, and returns it. Raises DragomanError; an interrupt stops it and is raised."""
    parts: list[str] = []
    stream = client.chat(messages, **options)
    try:
        for token in stream:
            parts.append(token.text)
            print(token.text, end="", flush=True)
    finally:
        print(flush=True)
        stream.close()
    result = stream.result()
    if result.finish_reason == "length":
        print(_cut(result.usage.output_tokens, options["max_output_tokens"]), file=sys.stderr)
    if stats:
        print(_stats(result), file=sys.stderr)
    return "".join(parts)


def converse(client: Any, opening: list[dict[str, str]], options: dict[str, Any], stats: bool) -> None:
    """A conversation at the terminal. A failed answer ends the answer, not the conversation."""
    from dragoman import DragomanError

    try:
        import readline  # noqa: F401  line editing and history for input()
    except ImportError:
        pass
    print(_HELP, file=sys.stderr)
    messages = list(opening)
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if text in ("/exit", "/quit"):
            return
        if text == "/new":
            messages = list(opening)
            continue
        if text.startswith("/"):
            print(_HELP, file=sys.stderr)
            continue
        if not text:
            continue
        messages.append({"role": "user", "content": text})
        try:
            said = answer(client, messages, options, stats)
            messages.append({"role": "assistant", "content": said})
        except KeyboardInterrupt:
            messages.pop()
        except DragomanError as error:
            messages.pop()
            report(error)


def _cut(output_tokens: int, max_tokens: int) -> str:
    if output_tokens >= max_tokens:
        return f"[cut at {max_tokens} tokens, --max-tokens for more]"
    return f"[cut after {output_tokens} tokens: the model's context is full]"


def _stats(result: Any) -> str:
    timings, usage = result.timings, result.usage
    first = timings.client_time_to_first_token_seconds or 0.0
    rest = timings.client_total_seconds - first
    pace = f", then {(usage.output_tokens - 1) / rest:.1f} tokens/s" if usage.output_tokens > 1 and rest > 0 else ""
    return (
        f"[{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached), {usage.output_tokens} generated; "
        f"first after {first * 1000:.0f} ms{pace}; {result.finish_reason}]"
    )

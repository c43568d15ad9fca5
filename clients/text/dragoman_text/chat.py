"""Chat messages to a prompt through the model's own template, with only the template's control tokens in it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import jinja2

from dragoman_text.budget import Budget, LimitExceeded, TemplateLimits, TemplateRefusal
from dragoman_text.files import TokenizerFiles
from dragoman_text.messages import ControlText, normalise_messages
from dragoman_text.sandbox import BoundedEnvironment
from dragoman_text.tokenizer import TextTokenizer

_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})


class TemplateError(ValueError):
    """A chat could not be laid out. `refused` is True when the template itself said no to these messages."""

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class ChatTemplate:
    """The chat template of one model. Threads may share it."""

    def __init__(self, files: TokenizerFiles, *, limits: TemplateLimits | None = None, is_needed: bool = True) -> None:
        """Compile. Raises TemplateError when the template is not valid; a model without one fails at `render`.

        Where it is not `is_needed`, one that is not valid fails at `render` too: `fault` says why.
        """
        self._files = files
        self._limits = limits or TemplateLimits()
        self._environment = BoundedEnvironment()
        self._template = None
        self.fault = ""
        if files.chat_template is None:
            return
        try:
            self._template = self._compile(files.chat_template)
        except TemplateError as error:
            if is_needed:
                raise
            self.fault = f"{error} with --chat-template FILE of the agent, or send a plain prompt to completions"

    @property
    def is_given(self) -> bool:
        """Whether the model has a template; without one `render` fails."""
        return self._template is not None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. Part texts are joined by a newline; `continue_final_message` leaves the last message open.

        Raises TemplateError for what the template refuses or fails at, ValueError for malformed messages.
        """
        control, variables = self._prepare(self._special_spellings, messages, tools, template_kwargs)
        return control.restore(self._lay_out(control, variables, add_generation_prompt, continue_final_message))

    def encode(
        self,
        tokenizer: TextTokenizer,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        max_num_tokens: int | None = None,
    ) -> list[int]:
        """The prompt's token ids, see `apply`."""
        return self.apply(
            tokenizer, messages, tools, add_generation_prompt, continue_final_message, template_kwargs,
            max_num_tokens=max_num_tokens,
        )[1]  # fmt: skip

    def apply(
        self,
        tokenizer: TextTokenizer,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        max_num_tokens: int | None = None,
    ) -> tuple[str, list[int]]:
        """The prompt's text as `render` gives it and its token ids, one BOS at most. Raises as `render` does.

        Control tokens come from the template only: their spelling in messages, tools or arguments stays text.
        A laid-out text that cannot fit `max_num_tokens` raises TextTooLong before it is tokenized whole.
        """
        control, variables = self._prepare(list(tokenizer.special_tokens), messages, tools, template_kwargs)
        text = self._lay_out(control, variables, add_generation_prompt, continue_final_message)
        if max_num_tokens is not None:
            tokenizer.check_size(text, max_num_tokens)
            tokenizer.check_beginning(text, max_num_tokens)
        if control.found:
            ids = encode_apart(tokenizer, text, control)
        else:
            ids = tokenizer.encode(text, add_special_tokens=False, parse_special=True)
        bos = self._files.bos_token_id
        if self._files.add_bos_token and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return control.restore(text), ids

    @cached_property
    def _special_spellings(self) -> list[str]:
        added = json.loads(self._files.tokenizer_json).get("added_tokens") or []
        return [token["content"] for token in added if token.get("special") and token.get("content")]

    def _prepare(
        self,
        spellings: Sequence[str],
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: Mapping[str, Any] | None,
    ) -> tuple[ControlText, dict[str, Any]]:
        """The template's variables with stand-ins where user text spells a control token."""
        if self.fault:
            raise TemplateError(self.fault)
        if self._template is None:
            raise TemplateError(
                "this model has no chat template, so chat messages cannot be laid out; start the agent with --chat-template "
                "FILE, set tokenizer.chat_template in the GGUF file or put chat_template.jinja into the model's directory, or "
                "send a plain prompt to completions"
            )
        extra = dict(template_kwargs or {})
        taken = sorted(_RESERVED & extra.keys())
        if taken:
            raise ValueError(f"chat_template_kwargs may not set {taken[0]!r}, the server gives it")
        normalised = normalise_messages(messages)
        control = ControlText(spellings, [normalised, list(tools or []), extra])
        variables: dict[str, Any] = {
            **control.hide(extra),
            "messages": control.hide(normalised),
            "tools": control.hide(list(tools)) if tools else None,
            "bos_token": self._files.bos_token or "",
            "eos_token": self._files.eos_token or "",
        }
        return control, variables

    def _lay_out(
        self, control: ControlText, variables: dict[str, Any], add_generation_prompt: bool, continue_final_message: bool
    ) -> str:
        """The rendered text, stand-ins still in it."""
        variables["add_generation_prompt"] = add_generation_prompt and not continue_final_message
        if not continue_final_message:
            return self._run(variables, control.num_chars)
        variables["messages"] = _with_end_mark(variables["messages"], control.end_mark)
        text, mark, _ = self._run(variables, control.num_chars).rpartition(control.end_mark)
        if not mark:
            raise TemplateError("the chat template does not show the last message's text, so it cannot be continued")
        return text

    def _run(self, variables: dict[str, Any], num_input_chars: int) -> str:
        budget = Budget(self._limits, num_input_chars)
        try:
            return self._environment.render_bounded(self._template, variables, budget)
        except TemplateRefusal as error:
            raise TemplateError(f"the model's chat template refused the messages: {error}", refused=True) from None
        except LimitExceeded as error:
            raise TemplateError(f"the chat template was stopped: {error}") from None
        except RecursionError:
            raise TemplateError("the chat template was stopped: it calls itself without end") from None
        except Exception as error:  # a template may raise anything Python can
            detail = str(error)[:300] or type(error).__name__
            raise TemplateError(
                f"the chat template failed: {detail}; check the messages' fields, or set another template"
            ) from None

    def _compile(self, source: str) -> Any:
        if len(source) > self._limits.max_source_chars:
            raise TemplateError(
                f"the chat template has {len(source)} characters, at most {self._limits.max_source_chars} are allowed"
            )
        try:
            return self._environment.from_string(source)
        except jinja2.TemplateError as error:
            line = getattr(error, "lineno", None)
            where = "" if line is None else f" at line {line}"
            raise TemplateError(f"the chat template is not valid{where}: {error.message}; set another one") from None
        except (RecursionError, SyntaxError, MemoryError, ValueError):
            raise TemplateError("the chat template is nested too deeply to compile; set another one") from None


def _with_end_mark(messages: list[dict[str, Any]], mark: str) -> list[dict[str, Any]]:
    last = messages[-1]
    if last["role"] != "assistant":
        raise ValueError(f"continue_final_message needs an assistant message at the end, found {last['role']!r}")
    return [*messages[:-1], {**last, "content": last["content"] + mark}]


def encode_apart(tokenizer: TextTokenizer, text: str, control: ControlText) -> list[int]:
    """Ids of `text`: control tokens where the template wrote them, everything between as plain text."""
    specials = tokenizer.special_tokens
    if not specials:
        return tokenizer.encode(control.restore(text), add_special_tokens=False, parse_special=False)
    pattern = re.compile("|".join(re.escape(token) for token in sorted(specials, key=len, reverse=True)))
    ids: list[int] = []
    start = 0
    strip_next = False
    for match in [*pattern.finditer(text), None]:
        segment = text[start : len(text) if match is None else match.start()]
        token_id = None if match is None else specials[match.group()]
        added = None if token_id is None else tokenizer.added_token(token_id)
        segment = segment.lstrip() if strip_next else segment
        segment = segment.rstrip() if added is not None and added.lstrip else segment
        if segment:
            ids.extend(tokenizer.encode(control.restore(segment), add_special_tokens=False, parse_special=False))
        if match is None or token_id is None:
            break
        ids.append(token_id)
        start = match.end()
        strip_next = added is not None and added.rstrip
    return ids

"""A jinja2 sandbox whose templates end: steps, time and the size of every value are counted while they run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace
from jinja2.visitor import NodeTransformer

from dragoman_text.budget import (
    WIDE_FORMAT,
    Budget,
    LimitExceeded,
    TemplateRefusal,
    check_binop,
    check_method,
    current_budget,
)
from dragoman_text.filters import TEMPLATE_FILTERS, counted

_REFUSED_METHODS = frozenset({"translate", "maketrans", "encode", "format_map", "striptags", "to_bytes", "from_bytes"})


class _CountWork(NodeTransformer):
    """Puts a counted call into every loop body and around what can grow without a call."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_attribute_call("count_step", [], node.lineno), lineno=node.lineno))
        if node.test is not None:
            node.iter = _attribute_call("counted", [node.iter], node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _attribute_call("concat_values", node.nodes, node.lineno)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _attribute_call("measured", [node], node.lineno) if node.items else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _attribute_call("measured", [node], node.lineno) if node.items else node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _attribute_call("measured", [node], node.lineno) if node.ctx == "load" and node.items else node


def _attribute_call(name: str, args: list[Any], lineno: int) -> nodes.Call:
    function = nodes.EnvironmentAttribute(name, lineno=lineno)
    return nodes.Call(function, args, [], None, None, lineno=lineno)


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant text for training; here it shows its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it an instance attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The environment chat templates run in: immutable values, no loader, a closed list of filters, counted work."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        # Unoptimised: constant folding would run filters while compiling, outside any budget.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=[LoopControlExtension, _GenerationTag],
        )
        self.filters = dict(TEMPLATE_FILTERS)
        self.globals = {
            "range": self.globals["range"],
            "dict": dict,
            "namespace": Namespace,
            "joiner": Joiner,
            "cycler": Cycler,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        counted: nodes.Template = _CountWork().visit(tree)
        return counted

    def render_bounded(self, template: Any, variables: dict[str, Any], budget: Budget) -> str:
        """Output of a compiled template. Raises LimitExceeded, TemplateRefusal or what the template raises."""
        token = current_budget.set(budget)
        try:
            pieces: list[str] = []
            num_chars = 0
            for piece in template.root_render_func(template.new_context(variables)):
                num_chars += len(piece)
                budget.size(num_chars)
                pieces.append(piece)
            return "".join(pieces)
        finally:
            current_budget.reset(token)

    def count_step(self) -> None:
        """Called at the head of every loop body; the call itself is what is counted."""

    def counted(self, values: Iterable[Any]) -> Iterator[Any]:
        """`values`, one step each, for loops whose filter may drop them all."""
        return counted(values)

    def measured(self, value: Any) -> Any:
        """`value`, a container just built, once it is known not to be too large."""
        current_budget.get().measure(value)
        return value

    def concat_values(self, *values: Any) -> str:
        """The `~` operator."""
        return self.concat([str(value) for value in values])

    def concat(self, parts: Iterable[str]) -> str:
        """Join the pieces of a macro, block or captured text."""
        pieces = list(parts)
        budget = current_budget.get()
        budget.step()
        budget.size(sum(map(len, pieces)))
        return "".join(pieces)

    def call(
        __self,
        __context: Context,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Every call in a template: counted, arguments of growing string methods checked, results measured."""
        budget = current_budget.get()
        budget.step()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            check_method(budget, owner, getattr(__obj, "__name__", ""), args)
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, (dict, list, tuple)):
            budget.measure(result)
        elif isinstance(result, str):
            budget.size(len(result))
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """`+ * ** %` with the size of the result checked first."""
        budget = current_budget.get()
        budget.step()
        check_binop(budget, operator, left, right)
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """The sandbox's rule, less the methods that can make a large value from a small one unseen."""
        if isinstance(obj, (str, int, bytes)) and attr in _REFUSED_METHODS:
            return False
        return bool(super().is_safe_attribute(obj, attr, value))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format` without widths that would fill the memory."""
        wrapped: Callable[..., str] | None = super().wrap_str_format(value)
        if wrapped is not None and WIDE_FORMAT.search(value.__self__):
            raise LimitExceeded("a format with a width above 999 or a computed width")
        return wrapped


def _raise_exception(message: Any) -> None:
    raise TemplateRefusal(str(message))


def _strftime_now(pattern: str) -> str:
    if len(pattern) > 200 or re.search(r"\d{3,}", pattern):
        raise LimitExceeded("a date format that is too long")
    return datetime.now().strftime(pattern)

"""The closed list of filters chat templates may use; what could grow without bound is checked first."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jinja2 import Environment
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.utils import pass_environment

from dragoman_text.budget import LimitExceeded, check_binop, check_method, check_percent, current_budget


def counted(values: Iterable[Any]) -> Iterator[Any]:
    """`values`, one step each."""
    budget = current_budget.get()
    for value in values:
        budget.step()
        yield value


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is, without the HTML escaping of jinja2's own filter."""
    budget = current_budget.get()
    width = len(indent) if isinstance(indent, str) else indent or 0
    if width > 32 or (separators is not None and sum(map(len, separators)) > 64):
        raise LimitExceeded("tojson with an indent above 32 or separators above 64 characters")
    budget.measure(value)
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    budget.size(len(text))
    return text


@pass_environment
def _join(environment: Environment, value: Iterable[Any], d: str = "", attribute: Any = None) -> str:
    items = counted(value)
    if attribute is not None:
        items = map(make_attrgetter(environment, attribute), items)
    parts = [str(item) for item in items]
    current_budget.get().size(sum(map(len, parts)) + len(str(d)) * len(parts))
    return str(d).join(parts)


def _replace(value: Any, old: str, new: str, count: int | None = None) -> str:
    text = str(value)
    check_method(current_budget.get(), text, "replace", (str(old), str(new)))
    return text.replace(str(old), str(new), -1 if count is None else count)


def _indent(value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    text = str(value)
    num_chars = len(width) if isinstance(width, str) else width
    current_budget.get().size(len(text) + (text.count("\n") + 2) * num_chars)
    indented: str = FILTERS["indent"](text, width, first, blank)
    return indented


def _center(value: Any, width: int = 80) -> str:
    current_budget.get().size(width)
    return str(value).center(width)


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    values = kwargs or args
    check_percent(current_budget.get(), str(value), dict(values) if kwargs else tuple(args))
    return str(value) % values


def _round(value: float, precision: int = 0, method: str = "common") -> float:
    if abs(precision) > 100:
        raise LimitExceeded("round with a precision above 100")
    rounded: float = FILTERS["round"](value, precision, method)
    return rounded


@pass_environment
def _sum(environment: Environment, iterable: Iterable[Any], attribute: Any = None, start: float = 0) -> Any:
    items = counted(iterable)
    if attribute is not None:
        items = map(make_attrgetter(environment, attribute), items)
    total: Any = start
    for item in items:
        check_binop(current_budget.get(), "+", total, item)
        total = total + item
    return total


# Filters whose result is no larger than a small multiple of what goes in.
_PLAIN_FILTERS = """
    abs attr capitalize count d default dictsort e escape filesizeformat first float int items last length list
    lower map max min reject rejectattr reverse safe select selectattr sort string title trim truncate
    unique upper urlencode wordcount
""".split()  # noqa: SIM905 - a list of words reads better as words
_BOUNDED_FILTERS: dict[str, Callable[..., Any]] = {
    "center": _center,
    "format": _format,
    "indent": _indent,
    "join": _join,
    "replace": _replace,
    "round": _round,
    "sum": _sum,
    "tojson": _tojson,
}

# Every filter a template finds, by name.
TEMPLATE_FILTERS: dict[str, Callable[..., Any]] = {name: FILTERS[name] for name in _PLAIN_FILTERS} | _BOUNDED_FILTERS

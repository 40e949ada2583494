"""The part of PromQL that the dashboard uses, evaluated on two scrapes of a page.

Grammar: `a / b`, `a + b`, parentheses, `sum`, `max` and `sum by (labels)`, `rate(x[…])`, `scalar(x)`, and a metric with
matchers of labels. Any other text is an error.
"""

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]
_SELECTOR = re.compile(r"(millstream_\w+)\{([^}]*)\}(\[[^]]*\])?")
_AGGREGATION = re.compile(r"\b(sum|max) (?:by )?\(([\w, ]+)\) \(")


def samples(page: str, instance: str) -> dict[str, Vector]:
    """Returns the samples of a page by metric and labels, with the label that Prometheus adds to a scrape."""
    found: dict[str, Vector] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels = frozenset({**sample.labels, "instance": instance}.items())
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


def evaluate(query: str, before: Mapping[str, Vector], now: Mapping[str, Vector], seconds: float) -> Vector | float:
    """Returns the value of a query, given two scrapes and the seconds between them."""
    text = _SELECTOR.sub(lambda found: f"{'delta' if found[3] else 'select'}({found[1]!r}, {found[2]!r})", query)
    text = _AGGREGATION.sub(lambda found: f"{found[1]}(({found[2]!r}), by=", text).replace("by=", "")
    functions: dict[str, Callable[..., Any]] = {
        "select": lambda name, _: now.get(name, {}),
        "delta": lambda name, _: {
            labels: value - before.get(name, {}).get(labels, 0.0) for labels, value in now.get(name, {}).items()
        },
        "rate": lambda change: {labels: value / seconds for labels, value in change.items()},
        "scalar": lambda vector: next(iter(vector.values())),
        "sum": lambda *of: _aggregated(sum, *of),
        "max": lambda *of: _aggregated(max, *of),
    }
    value: Vector | float = _value(ast.parse(text, mode="eval").body, functions)
    return value


def _aggregated(how: Callable[[list[float]], float], *of: Any) -> Vector:
    names = {name.strip() for name in of[0].split(",")} if len(of) == 2 else set()
    groups: dict[Labels, list[float]] = {}
    for labels, value in of[-1].items():
        groups.setdefault(frozenset(label for label in labels if label[0] in names), []).append(value)
    return {labels: how(values) for labels, values in groups.items()}


def _value(node: ast.expr, functions: Mapping[str, Callable[..., Any]]) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return functions[node.func.id](*(_value(argument, functions) for argument in node.args))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.Add):
        left, right = _value(node.left, functions), _value(node.right, functions)
        both = left if isinstance(right, float) else left.keys() & right.keys()
        pairs = {labels: (left[labels], right if isinstance(right, float) else right[labels]) for labels in both}
        if isinstance(node.op, ast.Add):
            return {labels: first + second for labels, (first, second) in pairs.items()}
        return {labels: first / second for labels, (first, second) in pairs.items() if second}
    raise ValueError(f"The queries of the dashboard have no {ast.unparse(node)}.")

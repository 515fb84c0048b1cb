"""Tables of settings, HTTP and metrics, made from the code that they describe. Pages quote each by
its name, as `code#settings` (docs/quotes.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from client.results import KEYS
from client.traces import Request
from compare.report.tables import markdown
from config.checks import ENGINES, EXCLUDED, FEATURES
from config.flags import GROUPS, meaning
from config.settings import flag
from scheduling.errors import Cancelled, ServingError
from server.api import answers, bodies
from server.api.openapi import PROBLEMS
from server.api.refusals import STATUSES, Refused, kind_of
from server.api.routes import ROUTES
from server.observers import metrics
from stats import DEFINITIONS, IN_RESULTS, MEASURES

LIMITS = {
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "exclusiveMaximum": "< {}",
    "maxLength": "≤ {} characters",
    "maxItems": "≤ {} items",
}
Schema = dict[str, Any]


def table(head: str, rows: Sequence[Sequence[str]]) -> str:
    """Return a table. head: its columns, separated by |."""
    return markdown([columns := head.split(" | "), *rows], left=len(columns))


def settings() -> str:
    parts = []
    for title, names in GROUPS.items():
        flags = ["MODE" if name == "mode" else flag(name) for name in names]
        rows = [(f"`{each}`", *meaning(name)[::-1]) for each, name in zip(flags, names)]
        parts.append(f"### {title}\n\n{table('flag | default | meaning', rows)}")
    return "\n\n".join(parts)


def features() -> str:
    """Return which features go together."""
    n = len(FEATURES) - 1
    lines = [f"| | {' | '.join(each.name for each in FEATURES[:-1])} |", "|---|" + "---|" * n]
    for i, row in enumerate(FEATURES[1:], 1):
        apart = [(column, row) in EXCLUDED or (column, row) == ENGINES for column in FEATURES[:i]]
        cells = ["no" if no else "yes" for no in apart] + [""] * (n - i)
        lines.append(f"| {row.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def routes() -> str:
    rows = [
        (f"`{route.name}`", route.summary, ", ".join(map(str, route.problems))) for route in ROUTES
    ]
    return table("route | what it does | errors", rows)


def errors() -> str:
    kinds = [ServingError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    errors = [kind("") for kind in kinds if kind not in (Refused, Cancelled)]
    codes = {(error.code, kind_of(error).status): None for error in errors}
    codes |= dict.fromkeys(STATUSES.items())
    rows = [
        (str(status), ", ".join(f"`{code}`" for code, of in codes if of == status), when)
        for status, when in PROBLEMS.items()
    ]
    return table("status | `code` | when", rows)


def fields(head: str, **of: Any) -> str:
    """Return the fields of models. of: the word for each in the column `of`."""
    found: dict[tuple[str, ...], list[str]] = {}
    for word, model in of.items():
        mode = "validation" if "default" in head else "serialization"
        schema = model.model_json_schema(mode=mode)
        for row in _rows(schema, schema.get("$defs", {})):
            found.setdefault(row, []).append(word.replace("_", " "))
    columns = "field", "type", "default", "meaning", "of"
    all_ = [(*row, "all" if len(w) == len(of) else ", ".join(w)) for row, w in found.items()]
    return table(head, [[row[columns.index(c)] for c in head.split(" | ")] for row in all_])


def _rows(schema: Schema, defined: Schema, path: str = "") -> Iterator[tuple[str, ...]]:
    """Yield each field of an object and of objects in it. Raises KeyError: one has no meaning."""
    for name, outer in schema["properties"].items():
        field = {**outer.get("anyOf", [{}])[0], **outer}  # what it is where null stands for it
        ref = re.search(r'("items": {)?"\$ref": "#/\$defs/(\w+)"', json.dumps(field))
        if "description" in field or not (ref or "enum" in field):
            kind, default = _kind(field), ""
            if "default" in field:
                kind, default = kind.removesuffix(" or null"), f"`{json.dumps(field['default'])}`"
            yield f"`{path}{name}`", kind, default, field["description"]
        if ref:
            yield from _rows(defined[ref[2]], defined, f"{path}{name}{'[]' if ref[1] else ''}.")


def _kind(field: Schema) -> str:
    """Return a type and its limits in words."""
    if "anyOf" in field:
        kinds = " or ".join(_kind(each) for each in field["anyOf"]).split(" or ")
        return " or ".join(dict.fromkeys(kinds))
    if values := field.get("enum") or [field[key] for key in ("const",) if key in field]:
        return " or ".join(f"`{json.dumps(each)}`" for each in values)
    kind = field.get("type", "object").replace("array", "list")
    kind += f"[{_kind(field['items'])}]" if "items" in field else ""
    if field.get("minLength") or field.get("minItems"):
        kind = f"non-empty {kind}"
    limits = [form.format(field[k]) for k, form in LIMITS.items() if abs(field.get(k, 1e18)) < 1e18]
    return f"{kind} {', '.join(limits)}".strip()


def numbers() -> str:
    of_stats = {field.alias or name for name, field in answers.Stats.model_fields.items()}
    of_stats |= {measure.key for measure in IN_RESULTS}
    headings = {name: key.heading for name, key in KEYS.items()}
    headings |= {measure.key: measure.heading for measure in MEASURES.values()}
    rows = [
        (f"`{name}`", "yes" if name in of_stats else "", headings.get(name, ""), meaning)
        for name, meaning in DEFINITIONS.items()
    ]
    return table("number | in `/stats` | heading in reports | meaning", rows)


def all_metrics() -> str:
    rows = [(m.metric, "histogram", "", m.formula_at_server) for m in MEASURES.values() if m.metric]
    rows += [(name, "histogram", "", meaning) for name, meaning in metrics.OF_TOKENS.items()]
    of_server = metrics.OF_SERVER + metrics.OF_SPECULATION
    for of, declared in (("", of_server), ("user", metrics.OF_TALLIES)):
        for each in declared:
            kind = each.kind.__name__.removesuffix("MetricFamily").lower()
            name = (f"batching_{of}_" if of else "") + each.name + "_total" * (kind == "counter")
            rows.append((name, kind, ", ".join(filter(None, (of, each.label))), each.meaning))
    name, meaning = metrics.ADAPTERS
    rows.append((name, "gauge", ", ".join(metrics.OF_ADAPTERS), meaning))
    return table("metric | type | labels | meaning", [(f"`{n}`", *rest) for n, *rest in rows])


def request_bodies() -> str:
    """Return the fields of the completion routes' bodies; `OpenAI` stands for completions, chat."""
    table = fields(
        "field | of | type | default | meaning",
        inference=bodies.InferenceRequest,
        completions=bodies.CompletionRequest,
        chat=bodies.ChatRequest,
    )
    return table.replace("| completions, chat |", "| OpenAI |")


def inference_answers() -> str:
    return fields(
        "field | of | type | meaning",
        answer=answers.InferenceAnswer,
        event=answers.InferencePiece,
        last_event=answers.InferenceEnd,
    )


TABLES: dict[str, Callable[[], str]] = {
    "features": features,
    "settings": settings,
    "routes": routes,
    "errors": errors,
    "numbers": numbers,
    "metrics": all_metrics,
    "bodies": request_bodies,
    "answers": inference_answers,
    "trace": lambda: fields("field | type | default | meaning", trace=Request),
    "error": lambda: fields("field | type | meaning", error=answers.Error),
}

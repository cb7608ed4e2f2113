"""docs/reference/fields.md: every route, and every field of bodies and answers, made of what
/openapi.json says.

`python -m tests.documents.fields_page` writes it anew; a test holds it against the description. A
schema is written once, where it is met first, and one that has most fields of an earlier one as
what it has beside it.
"""

import json
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from lean_selector.service.gate import Route
from lean_selector.service.openapi.document import DESCRIBED, service_document
from tests.documents.pages import ROOT
from tests.support.gates import routes_of

PAGE: Final = "docs/reference/fields.md"
_SECTIONS: Final = {
    "selector": ("The selector", "[its API](http-api.md)"),
    "selector_16": ("The selector with --api 1.6", "[the 1.6 dialect](http-api-16.md)"),
    "slot_tracker": ("The slot tracker", "[its API](slot-tracker-api.md)"),
}
_INTRO: Final = """\
# Routes and fields

Every route of both services, and every field of every body and answer. This page is made of what
`GET /openapi.json` says ([for programs](http-api.md#for-programs)) by
`.venv/bin/python -m tests.documents.fields_page`; a test fails when it is not what that writes.

What is required a body must have, and an answer always has. A field of an answer that is not
required is absent at times; its meaning tells when. Of bodies, unknown fields are ignored, and
`null` is the same as absent where the type has it. Errors are [ErrorBody](#errorbody), those of
requests that are shed [OverloadBody](#overloadbody), and those of `POST /route/{path}`
[OpenAiErrorBody](#openaierrorbody). The role is that of the token, [where tokens are
required](../guide/access.md).
"""
_ROUTES_HEAD: Final = ("| route | what it does | role | body | answers |", "|---|---|---|---|---|")
_ENOUGH: Final = 4  # as alike are two schemas of which the later refers to the earlier

Schema = dict[str, Any]


class Row(NamedTuple):
    """A field."""

    name: str
    kind: str
    required: str
    default: str
    meaning: str

    def line(self) -> str:
        traits = [self.kind, *filter(None, [self.required])]
        if self.default:
            traits.append(f"default {self.default}")
        return f"- `{self.name}` ({', '.join(traits)}): {self.meaning}"


def described_routes(service: str) -> list[Route]:
    """Those of a service, in the order of their descriptions."""
    order = [*DESCRIBED[service][1]]
    return sorted(routes_of(service), key=lambda route: order.index(route[:2]))


def page() -> str:
    """The whole text."""
    parts, written = [_INTRO], dict[str, list[Row]]()
    for service, (title, api) in _SECTIONS.items():
        document = json.loads(service_document(service, described_routes(service)))
        parts += [f"## {title}\n", f"What its routes take and give; more in {api}.\n"]
        parts.append("\n".join([*_ROUTES_HEAD, *_routes(document)]))
        parts.append("")
        if parameters := list(_parameters(document)):
            parts += ["\n".join(["| in the query | of | |", "|---|---|---|", *parameters]), ""]
        for name, schema in document["components"]["schemas"].items():
            if name not in written:
                parts += _schema(name, schema, written)
    return "\n".join(parts).rstrip("\n") + "\n"


def _operations(document: Schema) -> Iterator[tuple[str, Schema]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"`{method.upper()} {path}`", operation


def _routes(document: Schema) -> Iterator[str]:
    for route, operation in _operations(document):
        content = operation.get("requestBody", {}).get("content", {})
        body = _kind(content["application/json"]["schema"]) if content else ""
        if content and not operation["requestBody"]["required"]:
            body += ", or none"
        answers = [
            f"{status}: {_kind(one)}"
            for status, response in operation["responses"].items()
            if status < "300"
            for media in response.get("content", {"": {"schema": {}}}).values()
            for one in [media["schema"]]
        ]
        told = [route, operation["summary"], operation["x-role"], body, "; ".join(answers)]
        yield f"| {' | '.join(told)} |"


def _parameters(document: Schema) -> Iterator[str]:
    """A row for each field of query strings, and the routes that have it."""
    routes: dict[tuple[str, str], list[str]] = {}
    for route, operation in _operations(document):
        for one in operation.get("parameters", []):
            if one["in"] == "query":
                meaning = one["description"] + ("; required" if one["required"] else "")
                routes.setdefault((one["name"], meaning), []).append(route)
    for (name, meaning), of in routes.items():
        yield f"| `{name}` | {', '.join(of)} | {meaning} |"


def _schema(name: str, schema: Schema, written: dict[str, list[Row]]) -> list[str]:
    rows = [_row(field, shown, schema) for field, shown in schema["properties"].items()]
    lines = [f"### {name}", " ".join(schema["description"].split())]
    shown = rows
    if written:
        like = max(written, key=lambda other: _likeness(rows, written[other]))
        if _likeness(rows, written[like]) >= _ENOUGH:
            lacking = ", ".join(f"`{row.name}`" for row in _lacking(rows, written[like]))
            shown = [row for row in rows if row not in written[like]]
            without = f", without {lacking}" if lacking else ""
            lines.append(f"The fields of {_link(like)}{without}{', and:' if shown else '.'}")
    written[name] = rows
    return [*lines, "", *(row.line() for row in shown), *([""] if shown else [])]


def _lacking(rows: list[Row], other: list[Row]) -> list[Row]:
    names = {row.name for row in rows}
    return [row for row in other if row.name not in names]


def _likeness(rows: list[Row], other: list[Row]) -> int:
    """Rows that are told better by referring to the other's, less what must be said for it."""
    shared = len({*rows} & {*other})
    return shared - len(_lacking(rows, other)) if 2 * shared >= len(rows) else 0


def _row(name: str, shown: Schema, schema: Schema) -> Row:
    default = f"`{json.dumps(shown['default'])}`" if shown.get("default") is not None else ""
    required = "required" if name in schema.get("required", ()) else ""
    return Row(name, _kind(shown), required, default, shown["description"])


def _link(name: str) -> str:
    return f"[{name}](#{name.lower()})"


def _kind(schema: Schema) -> str:
    """Its type and bounds, in words."""
    if "$ref" in schema:
        return _link(schema["$ref"].rpartition("/")[2])
    if "anyOf" in schema:
        kinds = [_kind(each) for each in schema["anyOf"]]
        return (", or " if any("," in each for each in kinds) else " or ").join(kinds)
    if "enum" in schema:
        return ", ".join(f"`{each}`" for each in schema["enum"])
    match schema.get("type"):
        case "array":
            items = schema["items"]
            each = f"({_kind(items)})" if "anyOf" in items else _kind(items)
            return f"{'pair' if schema.get('minItems') == 2 else 'list'} of {each}"
        case "object":
            key = "rank" if "propertyNames" in schema else "string"
            values = schema.get("additionalProperties")
            return f"map of {key} to {_kind(values)}" if values else "object"
        case "integer" | "number" as kind:
            return f"{kind}{_bounds(schema.get('minimum'), schema.get('maximum'))}"
        case str(kind):
            return str(kind)
        case _:
            return "no body"


def _bounds(least: float | None, most: float | None) -> str:
    if least is None:
        return "" if most is None else f", at most {_number(most)}"
    return (
        f", at least {_number(least)}" if most is None else f", {_number(least)} to {_number(most)}"
    )


def _number(value: float) -> str:
    """A large one as the power of two that it is, or is just below."""
    for bits in (32, 53, 63, 64):
        for below in (0, 1):
            if abs(value) == 2**bits - below:
                return f"{'-' if value < 0 else ''}2^{bits}{'-1' if below else ''}"
    return str(int(value) if value == int(value) else value)


if __name__ == "__main__":
    (ROOT / PAGE).write_text(page(), encoding="utf-8")

#!/usr/bin/env -S .venv/bin/python
"""Writes docs/reference/fields.md and docs/reference/flags.md.

    .ci/pages.py [--check]      --check only says which of them are out of date, and ends with 1

The first has every route, and every field of bodies and answers, made of what /openapi.json says.
A schema is written once, where it is met first; a field that several have, in the first table; and
one that has most fields of an earlier schema as what it has beside it. The second has every flag of
the services, made of the classes that declare them.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NamedTuple

from lean_selector.app.flags import Field, fields_of
from lean_selector.app.gateway_flags import GatewayConfig
from lean_selector.app.picker_flags import SelectorServiceConfig
from lean_selector.app.service_flags import TrackerConfig

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.gates import described  # noqa: E402

# -- routes and fields -----------------------------------------------------------------------------

_SECTIONS: Final = {
    "selector": ("The selector", "[its API](http-api.md)"),
    "selector_16": ("The selector with --api 1.6", "[the 1.6 dialect](http-api-16.md)"),
    "slot_tracker": ("The slot tracker", "[its API](slot-tracker-api.md)"),
}
_FIELDS_INTRO: Final = """\
# Routes and fields

Every route of both services, and the fields of their bodies and answers. The page is generated from
`GET /openapi.json` ([for programs](http-api.md#for-programs)) by
`.ci/pages.py`, and a test checks that it is current.

Fields in **bold** are required: always sent in a body, always present in an answer. Unknown fields
of a body are ignored; `null` means absent if the type has it. Errors are [ErrorBody](#errorbody),
those of shed requests [OverloadBody](#overloadbody), those of `POST /route/{path}`
[OpenAiErrorBody](#openaierrorbody). Reports about replicas, discoveries and the fleet, and what
only replicas read, have no link: their fields are in `/openapi.json`. The role is that of the
[token](../guide/access.md), if tokens are enabled.

Several bodies and answers share these fields; tables below list them by name only, with their type
if it differs:
"""
_SAME_ROUTES: Final = """\
The routes are the selector's. A body or answer with a namesake that ends in `16` is replaced by
that one, except for `POST /route/{path}`.
"""
# What replicas, the page and operators read, or is constant; /openapi.json has the schemas.
_LEFT_OUT: Final = {
    "SharedCache",
    *("Fleet", "FleetWorker", "FleetRank", "FleetModel", "Finding", "PrefixTree", "UpperRun"),
    *("SyncState", "PeerState", "PublisherState", "CurveState", "DiscoveryReport"),
    *("DiscoveryState", "DiscoveredWorker", "DiscoveredPeer", "FetchAction", "FetchPayload"),
}
_ROUTES_HEAD: Final = ("| route | what it does | role | body | answers |", "|---|---|---|---|---|")
_TABLE: Final = ["| field | type, default | meaning |", "|---|---|---|"]
_ENOUGH: Final = 4  # as alike are two schemas of which the later refers to the earlier

Schema = dict[str, Any]


class Row(NamedTuple):
    """A field."""

    name: str
    kind: str
    required: str
    default: str
    meaning: str

    @property
    def shown(self) -> str:
        return f"**`{self.name}`**" if self.required else f"`{self.name}`"

    @property
    def told(self) -> tuple[str, str]:
        """What it is, whether it is required or not."""
        return ", default ".join(filter(None, [self.kind, self.default])), self.meaning


def lines_of(rows: list[Row]) -> Iterator[str]:
    """A line for those that are told alike, one after the other."""
    for (kind, meaning), alike in groupby(rows, key=lambda row: row.told):
        yield f"| {', '.join(row.shown for row in alike)} | {kind} | {meaning} |"


def fields_page() -> str:
    """The whole text."""
    documents = {service: described(service) for service in _SECTIONS}
    schemas = {
        name: (" ".join(schema["description"].split()), _rows(schema))
        for document in reversed(documents.values())  # of two the first counts
        for name, schema in document["components"]["schemas"].items()
        if name not in _LEFT_OUT
    }
    shared = _shared(rows for _, rows in schemas.values())
    parts, written = [_FIELDS_INTRO, *_TABLE, *lines_of(shared), ""], dict[str, list[Row]]()
    for service, document in documents.items():
        title, api = _SECTIONS[service]
        parts += [f"## {title}\n", f"What its routes take and give; more in {api}.\n"]
        if service == "selector_16":
            parts.append(_SAME_ROUTES)
        else:
            rows = (each for each in _routes(document) if each not in parts)
            parts += [*_ROUTES_HEAD, *rows, ""]
        if parameters := [each for each in _parameters(document) if each not in parts]:
            parts += ["| in the query | of | |", "|---|---|---|", *parameters, ""]
        parts += _TABLE
        for name in document["components"]["schemas"]:
            if name in schemas and name not in written:
                parts += _schema(name, *schemas[name], shared, written)
        parts.append("")
    return "\n".join(parts).rstrip("\n") + "\n"


def _shared(schemas: Iterable[list[Row]]) -> list[Row]:
    """The fields that several have, each with the meaning and then the type that most have, as if
    not required."""
    rows = [row._replace(required="") for rows in schemas for row in rows]
    meanings, kinds = Counter((row.name, row.meaning) for row in rows), Counter(rows)
    found = dict[str, Row]()
    for row in sorted(kinds, key=lambda row: (-meanings[row.name, row.meaning], -kinds[row])):
        if meanings[row.name, row.meaning] > 1:
            found.setdefault(row.name, row)
    return [found[name] for name in sorted(found)]


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
            if status.startswith("2")
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


def _rows(schema: Schema) -> list[Row]:
    return [_row(field, shown, schema) for field, shown in schema["properties"].items()]


def _schema(
    name: str, told: str, rows: list[Row], shared: list[Row], written: dict[str, list[Row]]
) -> list[str]:
    own, words = rows, [told]
    told_before = {(row.name, row.meaning): row.told for row in shared}
    if written:
        like = max(written, key=lambda other: _likeness(rows, written[other]))
        if _likeness(rows, written[like]) >= _ENOUGH:
            lacking = ", ".join(f"`{row.name}`" for row in _lacking(rows, written[like]))
            own = [row for row in rows if row not in written[like]]
            words.append(f"The fields of {_link(like)}{f', without {lacking}' if lacking else ''}.")
            # What it has there with another type needs no second meaning.
            told_before = {(row.name, row.meaning): row.told for row in written[like]} | told_before
    written[name] = rows
    common = [row for row in own if (row.name, row.meaning) in told_before]
    if common:
        names = [
            row.shown
            if row.told == told_before[row.name, row.meaning]
            else f"{row.shown} ({row.told[0]})"
            for row in common
        ]
        words.append(f"Has {'; '.join(names)}.")
    own = [row for row in own if row not in common]
    if len(own) == 1:  # it needs no row below its schema's
        [row] = own
        words.append(f"{'Also' if common else 'Has'} {row.shown} ({row.told[0]}): {row.meaning}.")
        own = []
    head = f'| <a id="{name.lower()}"></a>**{name}** | | {" ".join(words)} |'
    return [head, *lines_of(own)]


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
    if name in _LEFT_OUT:
        return f"`{name}`"
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
    if most is not None and most > 1e300:  # finite, as each number in JSON is
        return _bounds(None if least is not None and least < 0 else least, None)
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


# -- flags -----------------------------------------------------------------------------------------

_GUIDES: Final = {
    "Listening, logging and stopping": "[operations](../guide/operations.md), "
    "[TLS](../guide/tls.md), [access](../guide/access.md)",
    "State across restarts": "[restarts](../guide/restarts.md)",
    "Replicas": "[replicas](../guide/replicas.md), [keys](../guide/replicas.md#keys)",
    "Discovery": "[discovery](../guide/discovery.md)",
    "Requests to replicas and index peers": "[TLS](../guide/tls.md#what-we-ask-of-others)",
    "Allowed endpoints": "[operations](../guide/operations.md#where-it-connects-to)",
    "API version": "[the 1.6 dialect](http-api-16.md)",
    "Choosing a worker": "[choosing](../guide/choosing.md)",
    "Queueing": "[choosing](../guide/choosing.md#who-waits)",
    "Load shedding": "[load shedding](../guide/load-shedding.md)",
    "Sessions": "[sessions](../guide/sessions.md)",
    "Discovery of workers": "[discovery](../guide/discovery.md)",
    "Outlier detection and health checks": "[health](../guide/health.md)",
    "Raw prompts": "[prompts](../guide/prompts.md), [gateways](../guide/gateways.md)",
    "Gateways' access logs": "[gateways](../guide/gateways.md#ends)",
    "Decision log": "[choosing](../guide/choosing.md#your-own-traffic)",
    "The gateway": "[the gateway](../guide/gateway.md)",
}
_FLAGS_INTRO: Final = """\
# Flags

The flags of `lean-selector`, `lean-slot-tracker` and `lean-selector gateway`. This page is
generated from the flags' declarations by `.ci/pages.py`; a test
fails when it is out of date. `--help` shows the most used flags, `--help-all` all of them.

A flag takes precedence over its environment variable, that over the file of `--config`, that over
the default. An empty variable counts as unset. `--config FILE` names a TOML file with the same
names without `--`:

```toml
port = 8092
use-kv-events = false
replica-sync-port = 9092
replica-sync-peers = ["tcp://selector-b:9092"]
```

A name that is no flag, and a value that cannot be read or is out of range, stop the start with one
line and status 2 ([D15](../decisions.md#d15-a-bad-setting-stops-the-start)).
"""
_FLAGS_HEAD: Final = "| flag | environment | default | meaning |\n|---|---|---|---|"


def flags_page() -> str:
    """The whole text."""
    parts, known = [_FLAGS_INTRO], dict[str, Field]()
    for title, config, intro in (
        ("All services", TrackerConfig, "The default of `--port` is 8091 for the slot tracker, 8092"
         " for the selector, 8080 for the gateway."),
        ("Selector and gateway", SelectorServiceConfig, ""),
        ("Gateway", GatewayConfig, "It takes all flags above; where it has a default of its own, "
         "the flag is here again.\nWorkers are named as arguments, or as `workers` in the file."),
    ):  # fmt: skip
        parts += [f"## {title}\n", *([f"{intro}\n"] if intro else []), *_groups(config, known)]
    return "\n".join(parts).rstrip("\n") + "\n"


def _groups(config: Any, known: dict[str, Field]) -> list[str]:
    """The groups with flags that were not on the page, or are otherwise here."""
    lines, last = list[str](), ""
    for each in fields_of(config):
        name, before = each.flag.name, known.get(each.flag.name)
        if not name.startswith("--") or (before is not None and _same(before, each)):
            continue
        known[name] = each
        if each.title != last:
            guide = _GUIDES.get(each.title)
            lines.append(f"| **{each.title}** | | | {f'more: {guide}' if guide else ''} |")
            last = each.title
        env = ", ".join(f"`{variable}`" for variable in each.flag.env)
        meaning = each.help.replace("|", "\\|")
        words = "" if "|" not in each.metavar else f" ({each.metavar.replace('|', ', ')})"
        lines.append(f"| `{name}` | {env} | {each.shown_default} | {meaning}{words} |")
    return [_FLAGS_HEAD, *lines, ""]


def _same(one: Field, other: Field) -> bool:
    is_port = one.flag.name == "--port"
    return is_port or (one.help, one.default) == (other.help, other.default)


def main(argv: list[str]) -> int:
    pages = {"docs/reference/fields.md": fields_page(), "docs/reference/flags.md": flags_page()}
    old = [name for name, text in pages.items() if (ROOT / name).read_text("utf-8") != text]
    for name in old:
        if "--check" in argv:
            sys.stderr.write(f"{name} is out of date: .ci/pages.py writes it anew\n")
        else:
            (ROOT / name).write_text(pages[name], encoding="utf-8")
    return 1 if old and "--check" in argv else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""JSON Schemas of the structs that travel, made by msgspec and told what their types cannot say.

What a struct leaves to other code is written down here: lists of hashes, which are read apart, the
end of unsigned numbers, and ranges that are judged elsewhere so that their errors are worded as the
reference words them.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from inspect import cleandoc
from typing import Any, Final, get_args

import msgspec
from msgspec import Raw, UnsetType

from lean_selector.core.numbers import U64_MAX
from lean_selector.service.openapi.meanings import meaning_of
from lean_selector.wire.answer_forms import JsonText

Schema = dict[str, Any]
PLACE: Final = "#/components/schemas/{name}"

_HASHES: Final[Schema] = {
    "type": "array",
    "items": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
}
_OR_NULL: Final[Schema] = {"type": "null"}
# The text of a number up to 2**32 - 1. No other keys have a pattern.
_RANK: Final = (
    "^(0|[1-9][0-9]{0,8}|[1-3][0-9]{9}|4[01][0-9]{8}|42[0-8][0-9]{7}|429[0-3][0-9]{6}"
    "|4294[0-8][0-9]{5}|42949[0-5][0-9]{4}|429496[0-6][0-9]{3}|4294967[01][0-9]{2}"
    "|42949672[0-8][0-9]|429496729[0-5])$"
)
# By struct: which of its fields belong together.
_TOGETHER: Final[dict[str, Schema]] = {
    "ReservationRequest": {
        "anyOf": [
            {
                "required": ["reservation_id", "worker_id"],
                "properties": {"worker_id": {"type": "integer"}},
            },
            {
                "required": ["selection_id"],
                "properties": {"selection_id": {"type": "string"}, "worker_id": _OR_NULL},
            },
        ]
    }
}
# By struct and field: what its type does not say; of a struct of 1.6 unless it has its own.
_MORE: Final[dict[tuple[str, str], Schema]] = {
    ("RouterOverride", "overlap_score_credit"): {"minimum": 0, "maximum": 1},
    ("RouterOverride", "prefill_load_scale"): {"minimum": 0},
    ("RouterOverride", "overlap_score_weight"): {"minimum": 0},
    ("RouterOverride", "router_temperature"): {"minimum": 0},
    ("RouterOverride", "shared_cache_multiplier"): {"minimum": 0, "maximum": 1},
    ("RouterOverride16", "overlap_score_credit"): {"minimum": 0},
    ("OutputBlockRequest", "decay_fraction"): {"minimum": 0, "maximum": 1},
    ("ThresholdRequest", "active_decode_blocks_threshold"): {"minimum": 0, "maximum": 1},
    ("ThresholdRequest", "active_prefill_tokens_threshold_frac"): {"minimum": 0},
    ("RegisterRequest", "block_size"): {"minimum": 1},
    ("RegisterRequest", "dp_size"): {"minimum": 1},
}


def components(types: Iterable[Any]) -> tuple[list[Schema], dict[str, Schema]]:
    """The schema of each type, and the named ones that they refer to."""
    wanted = [_without_raw_default(each) for each in types]
    seen: dict[int, Any] = {}
    structs = [found for each in wanted for found in _structs_of(each, seen)]
    made, named = msgspec.json.schema_components(
        [*wanted, *structs], schema_hook=_hook_of(structs), ref_template=PLACE
    )
    for struct in structs:
        _complete(struct, named[struct.__name__])
    return list(made[: len(wanted)]), named


@cache
def _without_raw_default(kind: Any) -> Any:
    """A struct of the same name and fields, where what is left encoded may be absent: msgspec
    would show how that is, and cannot."""
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return kind
    fields = msgspec.structs.fields(kind)
    if not any(isinstance(field.default, Raw) for field in fields):
        return kind
    shown: list[tuple[str, Any, Any]] = []
    for field in fields:
        default = None if isinstance(field.default, Raw) else field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = msgspec.field(default_factory=field.default_factory)
        shown.append((field.name, field.type, default))
    return msgspec.defstruct(
        kind.__name__, shown, kw_only=True, namespace={"__doc__": kind.__doc__}
    )


def _structs_of(kind: Any, seen: dict[int, Any]) -> Iterator[type[msgspec.Struct]]:
    """The structs that a type is made of. Types in `seen`, by id, are skipped, because most
    routes share most of theirs."""
    if id(kind) in seen:
        return
    seen[id(kind)] = kind
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
        for field in msgspec.structs.fields(kind):
            yield from _structs_of(field.type, seen)
    for part in get_args(kind):
        yield from _structs_of(part, seen)


def _hook_of(structs: list[type[msgspec.Struct]]) -> Callable[[type], Schema]:
    """For what msgspec does not know: JSON text in an answer, which tells of workers."""
    names = [each.__name__ for each in structs]
    record = next((name for name in names if name.startswith("WorkerRecord")), "")

    def hook(kind: type) -> Schema:
        if kind is JsonText and record:
            return {"type": "array", "items": {"$ref": PLACE.format(name=record)}}
        raise NotImplementedError

    return hook


def _complete(struct: type[msgspec.Struct], schema: Schema) -> None:
    schema.pop("title", None)
    schema["description"] = cleandoc(schema.get("description", ""))
    required = set(schema.get("required", ()))
    for field in msgspec.structs.fields(struct):
        properties = schema["properties"]
        shown = properties[field.encode_name]
        if field.type is Raw and field.name.endswith("hashes"):
            shown = _HASHES if field.required else {"anyOf": [_HASHES, _OR_NULL]}
        elif UnsetType in get_args(field.type):
            required.discard(field.encode_name)  # an answer leaves it out
        shown = _bounded(shown)
        name, older = struct.__name__, struct.__name__.removesuffix("16")
        if more := _MORE.get((name, field.name), _MORE.get((older, field.name))):
            shown = _narrowed(shown, more)
        if meaning := meaning_of(struct.__name__, field.encode_name):
            shown = {**shown, "description": meaning}
        properties[field.encode_name] = shown
    schema.update(_TOGETHER.get(struct.__name__, {}))
    if required:
        schema["required"] = [name for name in schema["properties"] if name in required]
    else:
        schema.pop("required", None)


def _narrowed(shown: Schema, more: Schema) -> Schema:
    """With more said of the numbers in it."""
    if "anyOf" in shown:
        return {**shown, "anyOf": [_narrowed(each, more) for each in shown["anyOf"]]}
    return {**shown, **more} if shown.get("type") in ("number", "integer") else shown


def _bounded(shown: Any) -> Any:
    """With the ends that msgspec cannot check."""
    if isinstance(shown, list):
        return [_bounded(each) for each in shown]
    if not isinstance(shown, dict):
        return shown
    bounded = {name: _bounded(value) for name, value in shown.items()}
    if bounded.get("type") == "integer" and bounded.get("minimum") == 0:
        bounded.setdefault("maximum", U64_MAX)
    if "propertyNames" in bounded:
        bounded["propertyNames"] = {"type": "string", "pattern": _RANK}
    return bounded

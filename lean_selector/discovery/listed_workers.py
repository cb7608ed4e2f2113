"""Files that list workers, in YAML or JSON: registrations as POST /workers takes them, or llm-d's
`endpoints:`."""

import importlib
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

import msgspec

from lean_selector.discovery.list_shapes import Endpoints, Registrations
from lean_selector.discovery.particulars import Found, Particulars
from lean_selector.discovery.worker_ids import endpoint_key

MOST_WORKERS: Final = 16_384
_NAMED: Final = 3  # keys that cannot be such
MOST_LEVELS: Final = 100  # libyaml takes some of the C stack for each, without a limit of its own
_TOO_DEEP: Final = "lists and objects are nested too deeply, or within themselves"


def listed_workers(text: bytes, is_yaml: bool) -> Found:
    """What a file lists. Raises ValueError, saying where it is wrong; nothing of it counts then.

    The forms: a list of registrations, or an object with `workers:`, which is one, or
    `endpoints:`, which is llm-d's.
    """
    try:
        return _listed(text, is_yaml)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def _listed(text: bytes, is_yaml: bool) -> Found:
    content = _content(text, is_yaml)
    if isinstance(content, list):
        content = {"workers": content}
    if not isinstance(content, dict) or not {"workers", "endpoints"} & content.keys():
        raise ValueError("expected a list of workers, or an object with `workers` or `endpoints`")
    # By way of JSON, because YAML's keys may be numbers, as those of maps by rank.
    try:
        again = msgspec.json.encode(content)
    except TypeError:
        odd = ", ".join(islice(_odd_keys(content, "$"), _NAMED))
        raise ValueError(
            "YAML reads on, off, yes, no and ~ without quotes as true, false and null, which are "
            f"no keys: {odd}"
        ) from None
    if "workers" in content:
        entries = msgspec.json.decode(again, type=Registrations).workers or []
    else:
        listed = msgspec.json.decode(again, type=Endpoints).endpoints or []
        entries = [each.entry() for each in listed]
    return Found(_checked(entries))


def _content(text: bytes, is_yaml: bool) -> Any:
    if not is_yaml:
        return msgspec.json.decode(text)
    yaml = importlib.import_module("yaml")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        levels = 0
        for event in yaml.parse(text, Loader=loader):
            if isinstance(event, yaml.CollectionStartEvent):
                levels += 1
                if levels > MOST_LEVELS:
                    raise ValueError(_TOO_DEEP)
            elif isinstance(event, yaml.CollectionEndEvent):
                levels -= 1
        return yaml.load(text, Loader=loader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    except (AttributeError, LookupError) as error:  # its own, of a value with a tag of another kind
        raise ValueError(f"a value is not what its tag says: {error!r}") from None


def _odd_keys(content: object, where: str) -> Iterator[str]:
    """Keys that are neither text nor numbers, and where they are. Raises RecursionError for what
    holds itself."""
    if isinstance(content, dict):
        for key, value in content.items():
            if key is None or isinstance(key, bool):
                yield f"{msgspec.json.encode(key).decode()} at `{where}`"
            yield from _odd_keys(value, f"{where}.{key}")
    elif isinstance(content, list | tuple):
        for at, value in enumerate(content):
            yield from _odd_keys(value, f"{where}[{at}]")


def _checked(entries: list[Particulars]) -> tuple[Particulars, ...]:
    if len(entries) > MOST_WORKERS:
        raise ValueError(f"{len(entries)} workers, more than {MOST_WORKERS}")
    endpoints: dict[str, int] = {}
    ids: dict[int, int] = {}
    for at, entry in enumerate(entries):
        if not entry.endpoint:
            raise ValueError(f"worker {at} has no endpoint")
        before = endpoints.setdefault(endpoint_key(entry.endpoint), at)
        if before != at:
            raise ValueError(f"workers {before} and {at} have the same endpoint {entry.endpoint}")
        if entry.worker_id is not None and ids.setdefault(entry.worker_id, at) != at:
            before = ids[entry.worker_id]
            raise ValueError(f"workers {before} and {at} have the same worker_id {entry.worker_id}")
    return tuple(entries)

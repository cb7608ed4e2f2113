"""Files that list workers, in YAML or JSON: registrations as POST /workers takes them, or llm-d's
`endpoints:`."""

import importlib
from typing import Any, Final

import msgspec

from lean_selector.discovery.list_shapes import Endpoints, Registrations
from lean_selector.discovery.particulars import Found, Particulars
from lean_selector.discovery.worker_ids import endpoint_key

MOST_WORKERS: Final = 16_384


def listed_workers(text: bytes, is_yaml: bool) -> Found:
    """What a file lists. Raises ValueError, saying where it is wrong; nothing of it counts then.

    The forms: a list of registrations, or an object with `workers:`, which is one, or
    `endpoints:`, which is llm-d's.
    """
    content = _content(text, is_yaml)
    if isinstance(content, list):
        content = {"workers": content}
    if not isinstance(content, dict) or not {"workers", "endpoints"} & content.keys():
        raise ValueError("expected a list of workers, or an object with `workers` or `endpoints`")
    # By way of JSON, because YAML's keys may be numbers, as those of maps by rank.
    again = msgspec.json.encode(content)
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
        return yaml.load(text, Loader=loader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


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

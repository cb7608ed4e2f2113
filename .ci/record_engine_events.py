#!/usr/bin/env -S .venv/bin/python
"""Writes tests/data/engine_events.json: event batches made by the engines' own published classes.

    .ci/record_engine_events.py VLLM SGLANG

VLLM and SGLANG are the unpacked wheels of vllm 0.33.0 and sglang 0.5.23. Of each only the modules
that define the messages are loaded; what these import and the messages do not need is left empty.
"""

import importlib.machinery
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.events.test_engine_events import DATA, NAMES, SIGNED, SIZE, TOKENS

DIGESTS = [bytes(range(24)) + name.to_bytes(8, "big") for name in NAMES]
IMAGE = "a1b2c3d4e5f60718" + 48 * "0"

_encode = msgspec.msgpack.Encoder().encode


class _Empty(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return MagicMock()


class _Finder:
    """Stands for every module of an engine but those that are loaded."""

    def __init__(self, root: Path, wanted: set[str]) -> None:
        self.root, self.wanted = root, wanted

    def find_spec(self, name: str, path: object, target: object = None) -> Any:
        if name.split(".")[0] not in ("vllm", "sglang", "pydantic"):
            return None
        if name not in self.wanted:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        at = self.root / Path(*name.split(".")).with_suffix(".py")
        return importlib.util.spec_from_file_location(name, at)

    def create_module(self, spec: Any) -> ModuleType:
        module = _Empty(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It is empty."""


def _loaded(root: str, *names: str) -> list[Any]:
    finder = _Finder(Path(root), set(names))
    sys.meta_path.insert(0, finder)
    try:
        return [importlib.import_module(name) for name in names]
    finally:
        sys.meta_path.remove(finder)


def _as_array(event: Any) -> Any:
    """The event as the engine wrote it while its classes were `array_like`: the same fields."""
    kind = type(event)
    fields = [(field.name, Any) for field in msgspec.structs.fields(kind)]
    array = msgspec.defstruct(kind.__name__, fields, array_like=True, tag=True)
    return array(**msgspec.structs.asdict(event))


def vllm_batches(root: str) -> dict[str, Any]:
    (kv,) = _loaded(root, "vllm.distributed.kv_events")

    def stored(names: list[Any] = NAMES, parent: Any = None, **fields: Any) -> Any:
        plain = {"token_ids": TOKENS, "block_size": SIZE, "lora_id": None}
        plain |= {"medium": "GPU", "lora_name": None}
        return kv.BlockStored(block_hashes=names, parent_block_hash=parent, **(plain | fields))

    def removed(names: list[Any], **fields: Any) -> Any:
        return kv.BlockRemoved(block_hashes=names, **({"medium": "GPU"} | fields))

    first: dict[str, Any] = {"token_ids": TOKENS[:SIZE]}
    second: dict[str, Any] = {"token_ids": TOKENS[SIZE:]}
    full: dict[str, Any] = {
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        "session_id": "chat-7",
    }
    two = [[9], [9]]
    events: dict[str, list[Any]] = {
        "stored": [stored()],
        "all fields": [stored(**full, extra_keys=[None, None], locality="LOCAL")],
        "digests": [stored(DIGESTS), removed(DIGESTS[1:])],
        "child of a digest": [
            stored(DIGESTS[:1], **first),
            stored(DIGESTS[1:], DIGESTS[0], **second),
        ],
        "adapter": [stored(lora_id=1, lora_name="adapter", extra_keys=[("adapter",)] * 2)],
        "image": [stored(extra_keys=[((IMAGE, 0),), None])],
        "cache salt": [stored(extra_keys=[("dynamo-cache-salt:s",), None])],
        "cache salt of its own": [stored(extra_keys=[("s",), None])],
        "lookahead": [stored(lookahead_token_ids=two, **full)],
        "other group": [stored(group_idx=1, kv_cache_spec_kind="sliding_window")],
        "host": [stored(), stored(medium="CPU", ownership=None)],
        "storage elsewhere": [stored(medium="STORAGE", locality="REMOTE", ownership="fs")],
        "removed": [stored(), removed(NAMES[1:], group_idx=0)],
        "removed block by block": [stored(), *(removed([name]) for name in reversed(NAMES))],
        "removed elsewhere": [stored(), removed(NAMES, locality="REMOTE", ownership="fs")],
        "cleared": [stored(), kv.AllBlocksCleared(), stored(NAMES[:1], **first)],
        "a part of a block": [stored(NAMES[:1], token_ids=[1, 2], block_size=2)],
        "names alone": [stored(), stored(token_ids=[], block_size=0, medium="CPU")],
    }
    batches: dict[str, Any] = {}
    for name, told in events.items():
        arrays = [_as_array(event) for event in told]
        for form, each in (("maps", told), ("arrays", arrays)):
            batch = kv.EventBatch(ts=1.5, events=each, data_parallel_rank=0)
            batches[f"vllm 0.33.0, {form}: {name}"] = batch
    return batches


def sglang_batches(root: str) -> dict[str, Any]:
    kv, load = _loaded(
        root,
        "sglang.srt.disaggregation.kv_events",
        "sglang.srt.managers.scheduler_components.load_publisher",
    )

    def stored(names: list[int] = SIGNED, parent: int | None = None, **fields: Any) -> Any:
        plain = {"token_ids": TOKENS, "block_size": SIZE, "lora_id": None}
        plain |= {"medium": kv.StorageMedium.GPU}
        return kv.BlockStored(block_hashes=names, parent_block_hash=parent, **(plain | fields))

    events: dict[str, list[Any]] = {
        "stored": [stored()],
        "block by block": [
            stored(SIGNED[:1], token_ids=TOKENS[:SIZE], session_id="chat-7"),
            stored(SIGNED[1:], SIGNED[0], token_ids=TOKENS[SIZE:], session_id="chat-7"),
        ],
        "adapter": [stored(lora_name="adapter")],
        "cache salt": [stored(cache_salt="s")],
        "host": [stored(medium=kv.StorageMedium.CPU)],
        "removed": [stored(), kv.BlockRemoved(SIGNED[1:], medium=kv.StorageMedium.GPU)],
        "cleared": [stored(), kv.AllBlocksCleared()],
    }
    batches: dict[str, Any] = {
        f"sglang 0.5.23, maps: {name}": kv.EventBatch(ts=1.5, events=told, attn_dp_rank=0)
        for name, told in events.items()
    }
    return batches | {
        "sglang 0.5.23, load": load.LoadStat(3, 2, 1_000, 9_000, 0, 700, 1_700, 48, 12_345, 678)
    }


def main(vllm: str, sglang: str) -> None:
    batches = vllm_batches(vllm) | sglang_batches(sglang)
    recorded = {name: _encode(batch).hex() for name, batch in batches.items()}
    DATA.write_text(json.dumps(recorded, indent=0) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Traces for whole runs."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

WriteTrace = Callable[[list[tuple[int, list[int], int]]], Path]


@pytest.fixture
def write_trace(tmp_path: Path) -> WriteTrace:
    """A packed trace of (timestamp in ms, hash_ids, input_length)."""

    def write(lines: list[tuple[int, list[int], int]]) -> Path:
        path = tmp_path / "trace.jsonl.gz"
        keys = ("timestamp", "hash_ids", "input_length", "output_length")
        with gzip.open(path, "wt") as file:
            for line in lines:
                file.write(json.dumps(dict(zip(keys, (*line, 40), strict=True))) + "\n")
        return path

    return write

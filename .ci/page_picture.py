#!/usr/bin/env -S .venv/bin/python
"""Draws docs/page.png, the README's picture of the page over the demo's traffic.

It carries the digest of the page that it shows; a test fails when that has changed since.
"""

import struct
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Final

from lean_selector.api.ui import page

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.chromium import chromium  # noqa: E402
from tests.support.running_service import free_port  # noqa: E402

PICTURE: Final = ROOT / "docs" / "page.png"
SIZE: Final = (1180, 640)
_KEY: Final = b"page"


@contextmanager
def demo(workers: int) -> Iterator[int]:
    """The demo, at a port."""
    port = free_port()
    command = [sys.executable, "-m", "lean_selector", "demo", "--seconds", "600"]
    command += ["--port", str(port), "--workers", str(workers)]
    with Popen(command, stdout=DEVNULL, stderr=DEVNULL) as process:
        try:
            yield port
        finally:
            process.terminate()


def marked(png: bytes) -> bytes:
    """The picture with the digest of the page in a text chunk, before its end."""
    data = _KEY + b"\0" + sha256(page()[0]).hexdigest().encode()
    chunk = struct.pack(">I", len(data)) + b"tEXt" + data
    chunk += struct.pack(">I", zlib.crc32(b"tEXt" + data))
    return png[:-12] + chunk + png[-12:]


def main() -> None:
    with demo(4) as port, chromium() as browser:
        browser.look(*SIZE)
        browser.open(f"http://127.0.0.1:{port}/ui#decisions", patiently=True)
        browser.wait(
            "choices.length >= 20 && [...ranks.values()].every((of) => of.overlap_tokens > 0)"
        )
        browser.screenshot(PICTURE)
    PICTURE.write_bytes(marked(PICTURE.read_bytes()))


if __name__ == "__main__":
    main()

"""Screenshots of the page over the demo's traffic, each a drawing of the page as it is now.

`python -m tests.server.page_screenshots` writes the one of the README anew. It carries the digest
of the page that it shows; a test fails when that has changed since.
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

from lean_selector.service.ui import page
from tests.support.chromium import BrowserPage, chromium
from tests.support.running_service import free_port

PICTURE: Final = Path(__file__).parents[2] / "docs" / "page.png"
_KEY: Final = b"page"
# By name: the tab, width, height, dark. The README has the first.
SHOTS: Final = {
    "decisions": ("decisions", 1180, 640, False),
    "light": ("fleet", 1180, 760, False),
    "dark": ("decisions", 1180, 760, True),
    "cache": ("cache", 1180, 900, False),
    "system": ("system", 1180, 760, True),
    "phone": ("fleet", 390, 844, False),
    "phone_decisions": ("decisions", 390, 844, True),
}


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


def take(browser: BrowserPage, port: int, folder: Path) -> None:
    """All of SHOTS, once there is something to see."""
    browser.look(1180, 760)
    browser.open(f"http://127.0.0.1:{port}/ui", patiently=True)
    browser.wait("choices.length >= 20 && [...ranks.values()].every((of) => of.overlap_tokens > 0)")
    for name, (tab, width, height, dark) in SHOTS.items():
        browser.ask(f"document.getElementById('tab-{tab}').click()")
        if tab == "cache":
            browser.wait("document.querySelectorAll('#icicle button').length > 5")
        if tab == "system":
            browser.wait("answers.peers !== undefined")
        browser.look(width, height, dark=dark)
        browser.screenshot(folder / f"{name}.png")


def marked(png: bytes) -> bytes:
    """The picture with the digest of the page in a text chunk, before its end."""
    data = _KEY + b"\0" + digest()
    chunk = struct.pack(">I", len(data)) + b"tEXt" + data
    chunk += struct.pack(">I", zlib.crc32(b"tEXt" + data))
    return png[:-12] + chunk + png[-12:]


def digest() -> bytes:
    return sha256(page()[0]).hexdigest().encode()


def size_of(png: bytes) -> tuple[int, int]:
    width, height = struct.unpack(">II", png[16:24])
    return width, height


def main() -> None:
    folder = PICTURE.parent
    with demo(6) as port, chromium() as browser:
        browser.look(*SHOTS["decisions"][1:3])
        first = dict(list(SHOTS.items())[:1])
        SHOTS.clear()
        SHOTS.update(first)
        take(browser, port, folder)
    taken = folder / "decisions.png"
    PICTURE.write_bytes(marked(taken.read_bytes()))
    taken.unlink()


if __name__ == "__main__":
    main()

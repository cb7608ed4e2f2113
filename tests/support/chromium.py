"""A headless Chromium that opens a page and is asked over its DevTools protocol.

Waiting is done in the page, frame by frame; what the page logs, requests or is refused is kept.
"""

import base64
import json
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import websocket

from tests.support.programs import program
from tests.support.running_service import wait_until

PATIENCE_S = 60.0
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage"),
    *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--hide-scrollbars", "--remote-debugging-port=0"),
)


class BrowserPage:
    """One tab. `console` has errors and refusals in words, `requests` the URLs that were asked."""

    def __init__(self, url: str) -> None:
        self._socket = websocket.create_connection(url, timeout=PATIENCE_S, suppress_origin=True)
        self._number = 0
        self.console: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == self._number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self._note(message.get("method"), message.get("params", {}))

    def _note(self, method: str | None, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.console.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.console.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.console.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    def open(self, url: str, *, patiently: bool = False) -> None:
        """`patiently`: nobody may listen there yet."""
        if patiently:
            wait_until(lambda: "errorText" not in self.call("Page.navigate", url=url), url, 60)
        else:
            assert "errorText" not in self.call("Page.navigate", url=url)
        self.wait(f"document.readyState === 'complete' && location.href === {json.dumps(url)}")

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited."""
        told = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until an expression is true; fails with the page's text where it never is."""
        script = f"""new Promise((done) => {{
          const ends = performance.now() + {PATIENCE_S / 2 * 1000};
          const look = () => {{
            let is = false;
            try {{ is = {condition}; }} catch {{}}
            if (is || performance.now() > ends) done(Boolean(is)); else setTimeout(look, 20);
          }};
          look();
        }})"""
        if not self.ask(script):
            text = self.ask("document.body ? document.body.innerText.slice(0, 3000) : ''")
            raise AssertionError(f"never: {condition}\n{text}\n{self.console}")

    def press(self, key: str) -> None:
        """A key of the keyboard, such as Tab, ArrowRight or Enter."""
        codes = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowRight": 39, "ArrowDown": 40}
        more = {"text": "\r"} if key == "Enter" else {}
        code = codes[key]
        self.call(
            "Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **more
        )
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def look(self, width: int, height: int, *, dark: bool = False, scale: float = 1) -> None:
        """Draw for a screen of this size."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": height, "deviceScaleFactor": scale},
            mobile=width < 600,
        )
        value = "dark" if dark else "light"
        features = [{"name": "prefers-color-scheme", "value": value}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.ask("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def screenshot(self, path: Path) -> None:
        told = self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(told["data"]))

    def close(self) -> None:
        self._socket.close()


@contextmanager
def chromium() -> Iterator[BrowserPage]:
    """An empty tab of a browser of its own; skips the test where there is none."""
    binary = program("chromium", "chromium")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [binary, *FLAGS, f"--user-data-dir={folder}", "about:blank"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as own:
            try:
                told = Path(folder) / "DevToolsActivePort"
                wait_until(lambda: told.exists() and "\n" in told.read_text(), "it listens", 60)
                port = int(told.read_text().split("\n")[0])
                page = BrowserPage(_tab(port))
                try:
                    yield page
                finally:
                    page.close()
            finally:
                own.terminate()


def _tab(port: int) -> str:
    """Where the first tab is spoken to."""
    from urllib.request import urlopen

    with urlopen(f"http://127.0.0.1:{port}/json/list") as answer:
        tabs = json.load(answer)
    return str(next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page"))

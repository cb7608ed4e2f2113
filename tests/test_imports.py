"""Every module imports by itself, stands in a room, and imports only from rooms below it.

The rooms, from the top, are those of ROOMS: each with the rooms that its modules may import from.
"""

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

import pytest

import lean_selector

ROOT = Path(lean_selector.__file__).parent
MODULES = sorted(
    ".".join(("lean_selector", *path.relative_to(ROOT).with_suffix("").parts))
    for path in ROOT.rglob("*.py")
    if path.name not in ("__init__.py", "__main__.py")
)
PACKAGES = sorted(
    ".".join(("lean_selector", *path.parent.relative_to(ROOT).parts))
    for path in ROOT.rglob("__init__.py")
)


def path_of(module: str) -> Path:
    path = ROOT.parent / Path(*module.split("."))
    return path / "__init__.py" if module in PACKAGES else path.with_suffix(".py")


def imported(module: str) -> set[str]:
    """Full names of what a module imports, wherever the statement stands."""
    names: set[str] = set()
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


OUTSIDE = sorted(
    {name.split(".")[0] for module in MODULES for name in imported(module)}
    - {*sys.stdlib_module_names, "lean_selector"}
)


def test_every_module_imports_in_a_process_of_its_own() -> None:
    """No module leans on another having been imported first; packages of others may have been."""
    script = """
import asyncio, contextlib, importlib, os, sys
outside, names = (argument.split() for argument in sys.argv[1:])
for name in outside:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
failed = []
for name in names:
    child = os.fork()
    if not child:
        importlib.import_module(name)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        failed.append(name)
sys.exit(" ".join(failed) or 0)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, " ".join(OUTSIDE), " ".join(MODULES)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr


# -- who may import whom --------------------------------------------------------------------------

LEAVES = "core"
CORE = {
    *(LEAVES, "core.index", "core.load", "core.health", "core.replication"),
    *("core.selection", "core.sessions", "core.trackers"),
}
ROOMS: dict[str, set[str]] = {
    # commands
    "__main__": {"cli"},
    "slot_tracker": {"cli"},
    "cli": {"process", "demo", "doctor", "curve", "recipes", "form"},
    "demo": {"demo", "publisher", "wire", *CORE},
    # the selector inside another program, and what stands there for Dynamo's names
    "compat": {"bindings"},
    "bindings": {
        *("bindings", "client.aio", "client.sync", "client", "process", "services", "sockets"),
        *("wire", "tasks", *CORE),
    },
    "doctor": {"doctor", "discovery", "sockets", "curve", "outbound", "wire", *CORE},
    # wiring
    "process": {
        "form",
        "process",
        "access",
        "gateway",
        "discovery",
        "outbound",
        "prompts",
        "services",
        "route",
        "access_logs",
        "sockets",
        "curve",
        "state",
        "observing",
        "http",
        "wire",
        "tasks",
        *CORE,
    },
    # doors for gateways
    "route": {
        *("route", "prompts", "services", "access", "outbound", "http", "wire", "tasks"),
        *CORE,
    },
    "access_logs": {"access_logs", "observing", *CORE},
    # the door in front of the workers
    "gateway": {
        *("gateway", "prompts", "access", "outbound", "http", "observing", "wire", "tasks"),
        *CORE,
    },
    # what speaks HTTP, what waits for other sockets, what users import
    "services": {"services", "access", "openapi", "observing", "http", "wire", *CORE},
    "discovery": {"discovery", "outbound", "wire", "tasks", *CORE},
    "sockets": {"sockets", "curve", "outbound", "wire", "tasks", *CORE},
    "state": {"state", "wire", "tasks", *CORE},
    "prompts": {"prompts", "outbound", "wire", "tasks", *CORE},
    "client.aio": {"client.aio", "client", "wire", *CORE},
    "client.sync": {"client.sync", "client", "wire", *CORE},
    "client": {"client", "wire", *CORE},
    "publisher": {"curve", "wire", *CORE},
    # what is said of the routes, once somebody asks
    "openapi": {"openapi", "wire", *CORE},
    # who may come in
    "access": {"access", "outbound", "http"},
    # what only observes, what speaks HTTP/1.1 and nothing else, what travels
    "observing": {"observing", "tasks", *CORE},
    "http": {"http"},
    # keys of encrypted sockets
    "curve": {"curve", "outbound", "tasks"},
    "outbound": {"outbound"},
    "wire": {"wire", *CORE},
    # the state machines
    "core.trackers": {"core.replication", "core.load", LEAVES},
    "core.selection": {
        *("core.selection", "core.health", "core.replication", "core.index", "core.load"),
        *("core.sessions", LEAVES),
    },
    "core.replication": {"core.replication", "core.load", LEAVES},
    "core.health": {"core.health", LEAVES},
    "core.index": {"core.index", "core.load", LEAVES},
    "core.sessions": {"core.sessions", LEAVES},
    "core.load": {"core.load", LEAVES},
    LEAVES: {LEAVES},
    # watches whatever runs beside the requests
    "tasks": set(),
    # whether it is compiled, and the files to run it with
    "form": set(),
    "recipes": set(),
}


def room_of(name: str) -> str:
    """The room that a module, or a name in one, belongs to; empty for the package itself."""
    inside = name.removeprefix("lean_selector.")
    found = [room for room in ROOMS if inside == room or inside.startswith(room + ".")]
    return max(found, key=len, default="")


def ours(module: str) -> Iterator[str]:
    for name in imported(module):
        if name.startswith("lean_selector.") and name != "lean_selector.__version__":
            yield name


@pytest.mark.parametrize("module", MODULES)
def test_every_module_stands_in_a_room(module: str) -> None:
    assert room_of(module)


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_in_the_allowed_directions(module: str) -> None:
    allowed = ROOMS[room_of(module)]
    assert [name for name in ours(module) if room_of(name) not in allowed] == []


def test_no_rooms_import_each_other_in_a_circle() -> None:
    below: set[str] = set()
    for room in reversed(ROOMS):
        assert ROOMS[room] - {room} <= below, room
        below.add(room)


def modules_imported(module: str) -> set[str]:
    """The modules and packages of ours behind what a module imports, also only for its types."""
    known = {*MODULES, *PACKAGES}
    found = set()
    for name in imported(module):
        # The package's other names are imported when they are first used.
        if name.split(".")[0] == "lean_selector" and name != "lean_selector.__version__":
            found.add(name if name in known else name.rpartition(".")[0])
    return found - {module}


def test_no_modules_import_each_other_in_a_circle_not_even_for_their_types() -> None:
    graph = {module: modules_imported(module) for module in (*MODULES, *PACKAGES)}
    try:
        order = list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))
    assert sorted(order) == sorted(graph)  # every name was that of a module


SERVICES = {"selector", "slot_tracker"}
INSIDE = {"gateway": "selector"}  # what has one of them in its own process


def service_of(name: str) -> str | None:
    """The one service that a module of `process`, or a name in one, wires or configures."""
    stem = name.removeprefix("lean_selector.process.").split(".")[0]
    stem = stem.removesuffix("_config").removesuffix("_parts")
    stem = INSIDE.get(stem, stem)
    return stem if room_of(name) == "process" and stem in SERVICES else None


@pytest.mark.parametrize("module", [module for module in MODULES if room_of(module) == "process"])
def test_what_wires_one_service_is_not_imported_by_the_other_or_by_what_both_share(
    module: str,
) -> None:
    theirs = {name: service_of(name) for name in ours(module)}
    assert [name for name, of in theirs.items() if of not in (None, service_of(module))] == []


def test_each_service_has_its_wiring_and_its_configuration() -> None:
    found = {name.removeprefix("lean_selector.process.") for name in MODULES if service_of(name)}
    both = {f"{service}{end}" for service in (*SERVICES, *INSIDE) for end in ("", "_config")}
    assert found == both | {"selector_parts"}


def test_only_observing_modules_that_know_no_http() -> None:
    web = {"lean_selector.http", "lean_selector.services", "http", "httptools", "httpx"}
    for module in MODULES:
        if room_of(module) == "observing":
            assert not {n for n in imported(module) if n in web or n.startswith(tuple(web))}


# -- data shapes ----------------------------------------------------------------------------------

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
TREES = {module: ast.parse(path_of(module).read_text(encoding="utf-8")) for module in MODULES}
# A table of flags and the struct that they fill stand side by side, so that a flag is added in one
# place; both are used once, at the start.
FLAGS = "lean_selector.process."
SHAPES_AMONG_FLAGS = {
    *(FLAGS + "options", FLAGS + "service_options"),
    *(FLAGS + "selector_config", FLAGS + "slot_tracker_config", FLAGS + "gateway_config"),
}


def bases_of(node: Definition) -> set[str]:
    """The last parts of the names of a class's bases, without their parameters."""
    bases = node.bases if isinstance(node, ast.ClassDef) else []
    return {ast.unparse(base).split("[")[0].split(".")[-1] for base in bases}


def structs() -> set[str]:
    """Names of all classes that are msgspec structs, by their bases' names."""
    classes = [node for tree in TREES.values() for node in ast.walk(tree) if is_class(node)]
    known, found = {"Struct"}, set[str]()
    while known != found:
        found = set(known)
        known |= {node.name for node in classes if bases_of(node) & found}
    return known


def is_class(node: ast.AST) -> TypeGuard[ast.ClassDef]:
    return isinstance(node, ast.ClassDef)


STRUCTS = structs()


def definitions(module: str) -> tuple[list[Definition], list[Definition]]:
    """The structs of a module, wherever they stand, and what else it defines at its top."""
    tree = TREES[module]
    shapes = [n for n in ast.walk(tree) if is_class(n) and bases_of(n) & STRUCTS]
    others = [n for n in tree.body if isinstance(n, Definition) and n not in shapes]
    return [*shapes], others


WITH_SHAPES = [module for module in MODULES if definitions(module)[0]]


@pytest.mark.parametrize("module", [each for each in WITH_SHAPES if each not in SHAPES_AMONG_FLAGS])
def test_a_module_with_data_shapes_holds_nothing_else_but_their_kinds_and_private_helpers(
    module: str,
) -> None:
    """A module with a struct cannot be compiled, so what is worth compiling stands elsewhere."""
    shapes, others = definitions(module)
    kinds = {"Enum", "IntEnum", "StrEnum"}
    used = {node.id for shape in shapes for node in ast.walk(shape) if isinstance(node, ast.Name)}
    for other in others:
        is_helper = other.name.startswith("_") and other.name in used and not is_class(other)
        assert is_helper or bases_of(other) & kinds, other.name


def test_the_modules_where_flags_and_shapes_stand_side_by_side_still_do() -> None:
    assert {module for module in WITH_SHAPES if definitions(module)[1]} >= SHAPES_AMONG_FLAGS


def test_most_rooms_have_data_shapes() -> None:
    """The search for structs finds them."""
    assert {"core.load", "core.index", "wire", "client", "demo"} <= set(map(room_of, WITH_SHAPES))
    assert {"Reservation", "PromptFields", "SelectRequest", "KvSource"} <= STRUCTS


# -- the pure parts -------------------------------------------------------------------------------

WAITING_OR_CLOCKED = {
    *("asyncio", "uvloop", "zmq", "httptools", "httpx", "socket", "select", "selectors", "signal"),
    *("time", "datetime", "os", "sys", "logging", "threading", "subprocess", "multiprocessing"),
    *("pathlib", "tempfile", "secrets", "uuid", "http", "urllib.request", "prometheus_client"),
}
OF_THE_LOOP = {f"lean_selector.http.{name}" for name in ("protocol", "listener", "tls")}
PURE = [
    module
    for module in MODULES
    if part_of(module) in ("core", "http") and module not in OF_THE_LOOP
]
# A parser, the names of statuses, the layout of a date, and a key that is drawn once and decides
# nothing that anybody sees: nothing that waits.
MAY = {
    "lean_selector.http.credentials": {"os"},
    "lean_selector.http.header_block": {"httptools"},
    "lean_selector.http.reader": {"httptools"},
    "lean_selector.http.response": {"http"},
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

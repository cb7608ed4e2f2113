"""Every module stands in a room, and imports only from rooms below it, in no circle.

So each imports by itself, whichever is first: mypy sees to the names that it takes from others.

`ROOMS` has them from the top, each with the rooms that its modules may import from.
"""

import ast
import graphlib
import re
from functools import cache
from pathlib import Path
from typing import TypeGuard

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


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(path_of(module).read_text(encoding="utf-8"))


@cache
def imported(module: str) -> set[str]:
    """Full names of what a module imports, wherever the statement stands."""
    names: set[str] = set()
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


# -- who may import whom ---------------------------------------------------------------------------

EVERYBODYS = {"tasks", "build_info", "core", "wire"}
ROOMS: dict[str, set[str]] = {
    "cli": {"app", "tools"},
    "tools": {"discovery", "events", "links", "replicas", "http", "client", "app", "api"},
    "embedded": {"app", "api"},
    "app": {"epp", "gateway", "discovery", "parts", "api", "replicas", "events", "links", "http"},
    "epp": {"gateway", "http"},
    "gateway": {"api", "http"},
    "client": set(),
    "discovery": {"parts", "http"},
    "parts": {"api"},
    "api": {"http"},
    "replicas": {"events", "links", "http"},
    "events": {"links"},
    "links": {"http"},
    "http": set(),
    "wire": set(),
    "core": set(),
    "build_info": set(),
    "tasks": set(),
}
# The same inside of core: what its folders may import from beside its own loose modules.
CORE: dict[str, set[str]] = {
    "trackers": {"replication", "load"},
    "selection": {"sessions", "health", "replication", "index", "load"},
    "sessions": set(),
    "health": set(),
    "replication": {"load"},
    "index": {"load"},
    "load": set(),
}
# Loose modules that belong to a room, for what they may import.
BECOMES = {"compat": "embedded", "publisher": "client", "__main__": "cli", "slot_tracker": "cli"}


def room_of(name: str) -> str:
    """The room that a module, or a name in one, belongs to; empty for the package itself."""
    parts = name.split(".")
    found = parts[1] if len(parts) > 1 else ""
    return BECOMES.get(found, found)


def ours(module: str) -> set[str]:
    names = imported(module) - {"lean_selector.__version__"}
    return {name for name in names if name.startswith("lean_selector.")}


def test_every_module_stands_in_a_room_and_imports_from_rooms_below() -> None:
    wrong = [
        f"{module} imports {name}"
        for module in MODULES
        for name in ours(module)
        if room_of(name) not in ROOMS[room_of(module)] | EVERYBODYS | {room_of(module)}
    ]
    assert wrong == []


def test_the_folders_of_core_import_from_folders_below() -> None:
    def folder(name: str) -> str:
        found = name.split(".")[2]
        return found if found in CORE else ""

    wrong = [
        f"{module} imports {name}"
        for module in MODULES
        if room_of(module) == "core"
        for name in ours(module)
        if room_of(name) != "core"
        or folder(name) not in {"", folder(module)} | CORE.get(folder(module), set())
    ]
    assert wrong == []


def test_no_rooms_import_each_other_in_a_circle() -> None:
    for rooms, everybodys in ((ROOMS, EVERYBODYS), (CORE, set[str]())):
        below = set(everybodys)
        for room in reversed(rooms):
            assert rooms[room] <= below, room
            below.add(room)


def test_the_architecture_page_lists_the_rooms_in_an_order_of_the_imports() -> None:
    page = Path(__file__).parents[1] / "docs/architecture.md"
    listed = re.findall(r"^\| `(\w+)/` \|", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))
    for place, room in enumerate(listed):
        assert not ROOMS[room] & {*listed[:place]}, room


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
        raise AssertionError(" imports ".join(reversed(error.args[1]))) from None
    assert sorted(order) == sorted(graph)  # every name was that of a module


# -- data shapes -----------------------------------------------------------------------------------

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
# Where modules are compiled; setup.py has the same set.
COMPILED_ROOMS = {"core", "wire", "http", "api", "links", "events", "gateway"}


def bases_of(node: Definition) -> set[str]:
    """The last parts of the names of a class's bases, without their parameters."""
    bases = node.bases if isinstance(node, ast.ClassDef) else []
    return {ast.unparse(base).split("[")[0].split(".")[-1] for base in bases}


@cache
def structs() -> set[str]:
    """Names of all classes that are msgspec structs, by their bases' names."""
    classes = [node for name in MODULES for node in ast.walk(tree_of(name)) if is_class(node)]
    known, found = {"Struct"}, set[str]()
    while known != found:
        found = set(known)
        known |= {node.name for node in classes if bases_of(node) & found}
    return found


def is_class(node: ast.AST) -> TypeGuard[ast.ClassDef]:
    return isinstance(node, ast.ClassDef)


def definitions(module: str) -> tuple[list[Definition], list[Definition]]:
    """The structs of a module, wherever they stand, and what else it defines at its top."""
    tree = tree_of(module)
    shapes = [n for n in ast.walk(tree) if is_class(n) and bases_of(n) & structs()]
    others = [n for n in tree.body if isinstance(n, Definition) and n not in shapes]
    return [*shapes], others


@cache
def with_shapes() -> list[str]:
    return [module for module in MODULES if definitions(module)[0]]


def test_a_compiled_room_keeps_its_structs_apart_from_behaviour() -> None:
    """A module with a struct cannot be compiled, so what is worth compiling stands elsewhere."""
    wrong = []
    kinds = {"Enum", "IntEnum", "StrEnum"}
    for module in with_shapes():
        awaits = any(isinstance(node, ast.AsyncFunctionDef) for node in ast.walk(tree_of(module)))
        if module.split(".")[1] not in COMPILED_ROOMS or awaits:
            continue  # what awaits is interpreted anyway
        shapes, others = definitions(module)
        used = {n.id for shape in shapes for n in ast.walk(shape) if isinstance(n, ast.Name)}
        for other in others:
            is_helper = other.name.startswith("_") and other.name in used and not is_class(other)
            if not is_helper and not bases_of(other) & kinds:
                wrong.append(f"{module}: {other.name}")
    assert wrong == []
    assert {"core", "wire", "client"} <= set(map(room_of, with_shapes())), "structs are found"


# -- the pure parts --------------------------------------------------------------------------------

WAITING_OR_CLOCKED = {
    *("asyncio", "uvloop", "zmq", "httptools", "httpx", "socket", "select", "selectors", "signal"),
    *("time", "datetime", "os", "sys", "logging", "threading", "subprocess", "multiprocessing"),
    *("pathlib", "tempfile", "secrets", "uuid", "http", "urllib.request", "prometheus_client"),
}
EFFECTS = {"open", "print", "input", "exec", "eval", "__import__"}
PURE = [module for module in MODULES if room_of(module) == "core"]


def test_pure_modules_import_nothing_that_waits_reads_a_clock_or_draws() -> None:
    wrong = []
    for module in PURE:
        roots = {name.split(".")[0] for name in imported(module)} | imported(module)
        wrong += [f"{module}: {name}" for name in roots & WAITING_OR_CLOCKED]
        # The only random source is the one that they are given: `Random` is its type.
        wrong += [f"{module}: {name}" for name in roots if name.startswith("random.")]
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "random":
                wrong += [f"{module}: random.{node.attr}"] * (node.attr != "Random")
            if isinstance(node, ast.Call) and ast.unparse(node.func) in EFFECTS:
                wrong.append(f"{module}: {ast.unparse(node.func)}")
    assert wrong == []

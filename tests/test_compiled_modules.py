"""The rule by which modules are compiled (setup.py): it takes behaviour, and no data shapes."""

import ast
import importlib
import importlib.util
from enum import Enum
from functools import cache
from pathlib import Path
from types import ModuleType

import lean_selector
from tests.test_imports import MODULES, tree_of, with_shapes

CHECKOUT = Path(__file__).parents[1]
SOURCES = Path(lean_selector.__file__).parents[1]


def setup_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_script", CHECKOUT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


SETUP = setup_script()


@cache
def compiled() -> list[str]:
    """Names of the modules that the rule compiles."""
    return [path.removesuffix(".py").replace("/", ".") for path in SETUP.compiled_modules(SOURCES)]


ON_THE_WAY_OF_A_REQUEST = {
    *("core.hashing", "core.index.kv_index", "core.load.slots", "core.selection.selector"),
    *("http.protocol", "api.gate", "api.selection", "wire.prompt_forms"),
}


def compiled_modules() -> list[str]:
    """What the installation has compiled: modules are attributes of mypyc's library."""
    try:
        library = importlib.import_module("lean_selector__mypyc")
    except ImportError:
        return []
    return [
        name.removeprefix("init_").replace("___", ".")
        for name in vars(library)
        if name.startswith("init_")
    ]


def test_what_is_compiled_is_behaviour_of_the_rooms_where_time_goes() -> None:
    assert {module.split(".")[1] for module in compiled()} == SETUP.ROOMS
    assert {f"lean_selector.{module}" for module in ON_THE_WAY_OF_A_REQUEST} <= set(compiled())
    assert set(compiled()) <= set(MODULES) - set(with_shapes())
    # A compiled installation has compiled what the rule says.
    assert sorted(compiled_modules()) in ([], compiled())


def test_no_class_inherits_interpreted_from_a_compiled_one() -> None:
    """mypyc's classes can be made of nothing but compiled code; exceptions are not its own."""
    native = {
        (module, node.name)
        for module in compiled()
        for node in tree_of(module).body
        if isinstance(node, ast.ClassDef) and module != "lean_selector.core.errors"
    }
    assert ("lean_selector.http.protocol", "HttpProtocol") in native
    heirs = [
        f"{module}.{node.name}"
        for module in set(MODULES) - set(compiled())
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.ClassDef)
        for base in imported(tree_of(module)) & native
        if base[1] in SETUP._bases(node)
    ]
    assert heirs == []


def imported(tree: ast.AST) -> set[tuple[str, str]]:
    """(module, name) of what is imported by name."""
    return {
        (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names
    }


CALLS_IN_SLICES = {"len", "max", "min", "index", "start", "end", "_blocks"}


def test_a_bound_of_a_slice_calls_nothing_that_has_an_effect() -> None:
    """mypyc computes the bounds twice where it does not know the type that is sliced."""
    slices = [
        call
        for module in compiled()
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.Slice)
        for call in ast.walk(node)
        if isinstance(call, ast.Call)
    ]
    called = {ast.unparse(call.func).split(".")[-1] for call in slices}
    assert {"len", "index"} <= called <= CALLS_IN_SLICES


def test_the_names_of_caught_errors_have_one_type_in_a_function() -> None:
    """mypyc takes the type of the first for that of all, and raises TypeError for the others."""
    caught: dict[tuple[str, str, str], set[str]] = {}
    for module in compiled():
        for function in ast.walk(tree_of(module)):
            if isinstance(function, ast.FunctionDef):
                for node in ast.walk(function):
                    if isinstance(node, ast.ExceptHandler) and node.name and node.type:
                        place = module, function.name, node.name
                        caught.setdefault(place, set()).add(ast.unparse(node.type))
    assert len(caught) > 20
    assert [place for place, types in caught.items() if len(types) > 1] == []


def test_every_exception_from_the_rule_is_there_and_has_a_reason() -> None:
    for path, reason in SETUP.EXCEPTIONS.items():
        assert (SOURCES / path).is_file(), path
        assert len(reason.split()) > 3, path


def test_what_is_compiled_inherits_no_attributes_of_interpreted_classes() -> None:
    """A class gets a dict and a list of weak references of its own when it is compiled. With those
    of an interpreted base beside them, the end of an instance frees what is not its own."""
    wrong = []
    for name in compiled():
        for found in vars(importlib.import_module(name)).values():
            if isinstance(found, type) and found.__module__ == name and not issubclass(found, Enum):
                wrong += [
                    f"{name}.{found.__name__}: {base.__module__}.{base.__name__}"
                    for base in found.__mro__[1:]
                    if base.__module__.split(".")[0] not in ("lean_selector", "builtins", "typing")
                    and (base.__dictoffset__ or base.__weakrefoffset__)
                ]
    assert wrong == []


def test_what_is_compiled_walks_no_generator_expression_step_by_step() -> None:
    """Compiled, it is a list: what should be work in slices would be done at once."""
    wrong = [
        f"{module}:{loop.lineno}"
        for module in compiled()
        for loop in ast.walk(tree_of(module))
        if isinstance(loop, ast.For) and isinstance(loop.iter, ast.GeneratorExp)
    ]
    assert wrong == []


def test_each_form_requires_what_it_needs_to_be_made_and_to_run() -> None:
    to_compile = {each.split(">")[0] for each in SETUP.needed_to_compile(CHECKOUT)}
    assert {"mypy", "httptools", "msgspec", "pysimdjson", "pyzmq", "uvloop", "xxhash"} <= to_compile
    distribution = SETUP.CompiledDistribution({"script_name": "setup.py"})
    distribution.parse_config_files([str(CHECKOUT / "setup.cfg")])
    to_run = {requirement.split(">")[0] for requirement in distribution.install_requires}
    assert {"librt", "mypy-extensions", "msgspec"} <= to_run
    assert "mypy" not in to_run

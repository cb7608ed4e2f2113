"""Builds the package: plain Python, or its behaviour compiled by mypyc when it is asked to.

    LEAN_SELECTOR_COMPILE=1 pip wheel . --no-deps -w dist
    LEAN_SELECTOR_COMPILE=quick pip wheel . --no-deps -w dist   # in a third of the time, for tests

What is compiled is found by a rule (`compiled_modules`); both forms have the same sources. mypy,
and what the types of the sources come from, are needed only to compile.
"""

import ast
import os
import shutil
import sys
from collections.abc import Iterable
from configparser import ConfigParser
from pathlib import Path
from typing import Any

from setuptools import Distribution, Extension, setup
from setuptools.command.build_py import build_py

SWITCH = "LEAN_SELECTOR_COMPILE"
QUICK = "quick"
MYPY = "mypy>=2.4"  # from here on with lists of machine words (librt.vecs)
PACKAGE = Path("lean_selector")
DEPLOY = Path("deploy")  # lies inside the package in a wheel: see lean_selector/tools/recipes.py
# Where the time of a request or of an event goes. Commands and wiring run once; the client and the
# publisher are part of other programs.
ROOMS = {"core", "wire", "http", "api", "links", "events", "gateway"}
# Modules that the rule would take, and why they stay interpreted.
_OF_LOGGING = "its classes are kinds of logging's, whose instances mypyc lays out a second time"
_OF_RAW = "msgspec.Raw is a kind of bytes to mypy, and none when it runs"
EXCEPTIONS: dict[str, str] = {
    "lean_selector/gateway/access_logs.py": "not on the way of a request; its tests set its bounds",
    "lean_selector/gateway/model_request.py": _OF_RAW,
    "lean_selector/gateway/prompt_values.py": _OF_RAW,
    "lean_selector/api/logs.py": _OF_LOGGING,
}


def compiled_modules(root: Path = Path()) -> list[str]:
    """Paths of the modules of ROOMS that have behaviour, and neither a struct nor a coroutine.

    mypyc drops the keyword arguments of a struct's class line, with which it would lose its layout.
    What awaits has its time from the event loop, and leaves a task's name and stack behind only
    when it is interpreted.
    """
    texts = {str(path.relative_to(root)): path for path in sorted((root / PACKAGE).rglob("*.py"))}
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in texts.items()}
    shapes = _structs(trees.values())
    return [
        name
        for name, tree in trees.items()
        if Path(name).parts[1] in ROOMS
        and not name.endswith("__init__.py")
        and not any(isinstance(node, ast.AsyncFunctionDef) for node in ast.walk(tree))
        and not any(_bases(node) & shapes for node in _classes(tree))
        and name not in EXCEPTIONS
    ]


def _classes(tree: ast.AST) -> list[ast.ClassDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def _structs(trees: Iterable[ast.AST]) -> set[str]:
    """Names of all msgspec structs, by the names of their bases."""
    classes = [node for tree in trees for node in _classes(tree)]
    known, found = set[str](), {"Struct"}
    while known != found:
        known = set(found)
        found |= {node.name for node in classes if _bases(node) & known}
    return found


def _bases(node: ast.ClassDef) -> set[str]:
    return {ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases}


def extensions() -> list[Extension]:
    """One library of all compiled modules, which call each other directly, and a stub for each."""
    # What an earlier build left is in the next wheel, also of modules that are no more.
    shutil.rmtree("build", ignore_errors=True)
    from mypyc.build import mypycify

    made: list[Extension] = mypycify(
        compiled_modules(),
        opt_level="1" if os.environ[SWITCH] == QUICK else "3",
        debug_level="0",
        # A file for each module is compiled faster, and calls between modules are not inlined.
        multi_file=os.environ[SWITCH] == QUICK,
        group_name="lean_selector",
    )
    for extension in made:
        extension.extra_link_args = [*(extension.extra_link_args or []), "-s"]
    return made


def needed_to_compile(checkout: Path = Path()) -> list[str]:
    config = ConfigParser()
    config.read(checkout / "setup.cfg")
    required = config["options"]["install_requires"].strip().splitlines()  # some with a marker
    # The types of the package's own names reach into the client and, through `embedded`, into epp.
    extras = config["options.extras_require"]
    reached = [line for name in ("client", "epp") for line in extras[name].strip().splitlines()]
    return [MYPY, *required, *reached]


class WithDeploy(build_py):
    """Takes the files of `deploy/` into the package, but for an editable installation, which finds
    them where they are."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for source, target in self._of_deploy().items():
                self.mkpath(str(target.parent))
                self.copy_file(str(source), str(target))

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        own = super().get_outputs(include_bytecode)
        return [*own, *map(str, self._of_deploy().values())]

    def _of_deploy(self) -> dict[Path, Path]:
        files = sorted(path for path in DEPLOY.rglob("*") if path.is_file())
        return {path: Path(self.build_lib) / PACKAGE / path for path in files}


class CompiledDistribution(Distribution):
    """Needs at run time what the extra `compiled` names, as it was built for nothing else."""

    def parse_config_files(self, *args: Any, **options: Any) -> None:
        super().parse_config_files(*args, **options)
        needed = self.extras_require["compiled"]
        self.install_requires = [*self.install_requires, *needed]
        self._finalize_requires()


if __name__ == "__main__":
    compiles = os.environ.get(SWITCH) in {"1", QUICK}
    setup(
        distclass=CompiledDistribution if compiles else Distribution,
        cmdclass={"build_py": WithDeploy},
        setup_requires=needed_to_compile() if compiles else [],
        ext_modules=extensions() if compiles and "bdist_wheel" in sys.argv else [],
    )

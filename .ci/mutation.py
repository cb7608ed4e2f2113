#!/usr/bin/env python3
"""Changes the sources of an area, one small change at a time, and sees whether its tests notice.

    .ci/mutation.py AREA...         cost, cells, cursor, ledger, load, queue;
                                    of the index: dump, groups, holes, lower, hashes,
                                    table, routed, runs, device, index
    .ci/mutation.py AREA '*3'       a tenth of the changes: those whose number ends with 3
    .ci/mutation.py AREA --show     the changes that no test noticed, from the last run

mutmut does it, in an environment of its own (.venv-mutation) and on a copy of the sources
(.mutation/AREA); the tests are those of the area alone, so a change that only a test of the whole
service would notice counts as unnoticed. What survived, and why, is in docs/reliability.md.
"""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / ".venv-mutation" / "bin" / "python"
MUTMUT = "mutmut==3.8.1"

CORE = "lean_selector/core"
INDEX_MODEL = "tests/properties/test_kv_index_model.py"
# Left out: seconds, which every change that nobody notices would take.
REVIEWED_BY_MANY = (
    "tests/core/index/test_holes.py::"
    "test_the_steps_of_a_review_do_not_grow_with_what_is_reviewed[20]"
)
# Left out: it counts lines, of which changed sources have more.
COUNTED = "tests/core/selection/test_choice.py::test_no_temperature_leads_to_the_cost_of_every_load"
# Modules that are changed, and tests that should notice.
AREAS: dict[str, tuple[list[str], list[str]]] = {
    "cost": (
        [f"{CORE}/selection/cost.py"],
        [
            *("tests/core/selection/test_cost.py", "tests/core/selection/test_choice.py"),
            *("tests/core/selection/test_explain.py", "tests/properties/test_choice.py"),
            f"--deselect={COUNTED}",
        ],
    ),
    "cells": (
        [f"{CORE}/selection/choice.py", f"{CORE}/selection/overlap.py"],
        [
            *(f"tests/core/selection/test_{name}.py" for name in ("choice", "cells", "explain")),
            *("tests/properties/test_choice.py", "tests/properties/test_queue_model.py"),
            f"--deselect={COUNTED}",
        ],
    ),
    "queue": (
        [f"{CORE}/selection/queue.py"],
        [
            *(f"tests/core/selection/test_{name}.py" for name in ("queue", "selector")),
            "tests/api/test_queue.py",
            "tests/properties/test_queue_model.py",
        ],
    ),
    "cursor": (
        [f"{CORE}/index/kv_cursor.py", f"{CORE}/index/out_of_turn.py"],
        [
            *(f"tests/core/index/test_{name}.py" for name in ("kv_cursor", "out_of_turn")),
            "tests/properties/test_cursor_model.py",
        ],
    ),
    "groups": (
        [f"{CORE}/index/kv_groups.py"],
        ["tests/core/index/test_kv_groups.py", "tests/core/index/test_vllm_events.py"],
    ),
    "ledger": (
        [f"{CORE}/replication/ledger.py"],
        ["tests/core/replication/test_ledger.py"],
    ),
    "load": (
        [f"{CORE}/load/*.py"],
        [
            *("tests/core/load", "tests/events/test_subscriptions.py"),
            "tests/properties/test_slots_model.py",
        ],
    ),
    "holes": (
        [f"{CORE}/index/holes.py"],
        ["tests/core/index/test_holes.py", f"--deselect={REVIEWED_BY_MANY}"],
    ),
    "lower": (
        [f"{CORE}/index/lower_tiers.py"],
        [
            *(f"tests/core/index/test_{name}.py" for name in ("lower_tiers", "vllm_events")),
            *("tests/properties/test_lower_tiers_model.py", INDEX_MODEL),
        ],
    ),
    "hashes": (
        [f"{CORE}/index/{name}.py" for name in ("engine_hashes", "hashes_packed")],
        ["tests/core/index/test_engine_hashes.py"],
    ),
    "table": (
        [f"{CORE}/index/hashes_packed.py"],
        ["tests/core/index/test_hash_table.py"],
    ),
    "routed": (
        [f"{CORE}/index/routed.py"],
        ["tests/core/index/test_routed.py"],
    ),
    "runs": (
        [f"{CORE}/index/runs.py"],
        ["tests/core/index/test_runs.py", "tests/core/index/test_device_tier.py"],
    ),
    "device": (
        [f"{CORE}/index/device_tier.py"],
        [
            *(f"tests/core/index/test_{name}.py" for name in ("device_tier", "kv_index")),
            INDEX_MODEL,
        ],
    ),
    "index": (
        [f"{CORE}/index/kv_index.py"],
        [
            *(f"tests/core/index/test_{name}.py" for name in ("kv_index", "holes", "lower_tiers")),
            *(f"tests/core/index/test_{name}.py" for name in ("vllm_events", "kv_ingest")),
            *("tests/core/index/test_kv_dump.py", "tests/core/selection/test_overlap.py"),
            *(INDEX_MODEL, f"--deselect={REVIEWED_BY_MANY}"),
        ],
    ),
    "dump": (
        [f"{CORE}/index/kv_dump.py"],
        ["tests/core/index/test_kv_dump.py", "tests/properties/test_recovery_model.py"],
    ),
}
CONFIG = """
[tool.mutmut]
source_paths = ["lean_selector"]
also_copy = ["loadtest"]
only_mutate = {modules}
pytest_add_cli_args = ["-p", "no:cacheprovider", "-W", "ignore"]
pytest_add_cli_args_test_selection = {tests}
timeout_multiplier = 4.0
use_git_change_detection = false
track_dependencies = false
type_check_command = [
    "mypy", "--output", "json", "--no-warn-unused-ignores", "--no-warn-unreachable",
    "--disable-error-code", "no-redef", "lean_selector/core",
]
"""
# Nobody reads what a test found, so it is not made smaller first: that takes longer than the rest.
NOT_SHRUNK = """

from hypothesis import Phase  # noqa: E402

_FOUND = (Phase.explicit, Phase.generate)
settings.register_profile("repeatable", settings.get_profile("repeatable"), phases=_FOUND)
"""
# A change that mypy refuses would not compile.
EXIT_CODES = {0: "survived", 1: "killed", 3: "killed", 33: "no tests", 5: "no tests", 37: "typed"}
KILLED = "killed"


def environment() -> None:
    if not PYTHON.exists():
        subprocess.run([shutil.which("python3.11") or "python3", "-m", "venv", ".venv-mutation"])
        packages = [MUTMUT, "pytest>=8.4", "hypothesis>=6.130.12", "mypy>=2.0", "-e", "."]
        subprocess.run([PYTHON, "-m", "pip", "install", "--quiet", *packages], check=True)


def copied(area: str) -> Path:
    """A tree of its own, in which mutmut leaves what it found. Nothing is kept of the last run."""
    tree = ROOT / ".mutation" / area
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("lean_selector", "tests", "loadtest"):
        shutil.copytree(ROOT / name, tree / name, ignore=ignored)
    with (tree / "tests" / "conftest.py").open("a") as conftest:
        conftest.write(NOT_SHRUNK)
    modules, tests = AREAS[area]
    config = CONFIG.format(modules=json.dumps(modules), tests=json.dumps(tests))
    (tree / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text() + config)
    return tree


def outcomes(tree: Path) -> dict[str, str]:
    """What became of each change."""
    found: dict[str, str] = {}
    for path in sorted((tree / "mutants").rglob("*.meta")):
        codes = json.loads(path.read_text())["exit_code_by_key"]
        for name, code in codes.items():
            is_timeout = code in (24, 36, -24, 152, 255, -9)
            found[name] = "not run" if code is None else EXIT_CODES.get(code, "other")
            if is_timeout:
                found[name] = "time-out"
    return found


def report(area: str, tree: Path) -> None:
    by_module: dict[str, Counter[str]] = {}
    for name, outcome in outcomes(tree).items():
        by_module.setdefault(name.rpartition(".")[0], Counter())[outcome] += 1
    for module, counts in by_module.items():
        others = ", ".join(f"{n} {what}" for what, n in sorted(counts.items()) if what != KILLED)
        line = f"{area}: {module}: {counts.total()} changes, {counts[KILLED]} killed; {others}"
        sys.stdout.write(line + "\n")


def show(tree: Path) -> None:
    for name, outcome in outcomes(tree).items():
        if outcome not in (KILLED, "typed", "not run"):
            sys.stdout.write(f"\n--- {outcome}: {name}\n")
            sys.stdout.flush()
            subprocess.run([PYTHON, "-m", "mutmut", "show", name], cwd=tree, check=False)


def main(argv: list[str]) -> int:
    sample = [each for each in argv if each.startswith("*")]
    areas = [each for each in argv if each != "--show" and each not in sample]
    if not areas or set(areas) - AREAS.keys():
        sys.stderr.write(f"usage: .ci/mutation.py AREA... [--show], of {', '.join(AREAS)}\n")
        return 2
    environment()
    for area in areas:
        if "--show" in argv:
            show(ROOT / ".mutation" / area)
            continue
        tree = copied(area)
        children = os.environ.get("MUTATION_CHILDREN", str(os.cpu_count() or 1))
        command = [str(PYTHON), "-m", "mutmut", "run", "--max-children", children, *sample]
        path = f"{PYTHON.parent}{os.pathsep}{os.environ['PATH']}"
        cache = str(ROOT / ".mutation" / ".mypy_cache")  # of the sources that stay as they are
        env = {**os.environ, "PATH": path, "MYPY_CACHE_DIR": cache}
        subprocess.run(command, cwd=tree, check=False, env=env)
        report(area, tree)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""For all tests: how property tests draw, and interpreters that can run the reference services.

A run of the suite draws the same examples each time, so that green means green wherever it is run:
nothing is random, nothing is remembered from an earlier run, and no example is late. `--explore`
is the other run, for finding things: fresh examples every time, many more of them. What it finds
is mended and becomes an `@example` of its test. `--long` is the same for those that play random
requests against a reference.

With LEAN_SELECTOR_FORM set to `compiled` or `pure` nothing runs unless that is the form under test.
"""

import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from lean_selector.build_info import form
from loadtest.reference import NotInstalled, interpreter

EXPLORE_TIMES = 20  # as many examples in an exploring run
# Files that take minutes: they begin first, so that none is left over for one of several processes.
LONG = {"test_image.py"}

settings.register_profile(
    "repeatable",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],  # it asks the clock
)
settings.register_profile(
    "explore", settings.get_profile("repeatable"), derandomize=False, print_blob=True
)


# Containers often switch bytecode off. Then each start of a service compiles its modules, which
# takes as much CPU as all else that a start does.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--explore",
        action="store_true",
        help=f"property tests draw fresh examples, {EXPLORE_TIMES} times as many as otherwise",
    )
    parser.addoption(
        "--long",
        metavar="MINUTES",
        nargs="?",
        type=float,
        const=10.0,
        default=0.0,
        help="whoever plays a seed against a reference goes on with fresh ones for so long (10)",
    )


def pytest_configure(config: pytest.Config) -> None:
    wanted = os.environ.get("LEAN_SELECTOR_FORM")
    if wanted and form() != wanted:
        raise pytest.UsageError(
            f"LEAN_SELECTOR_FORM={wanted}, and what would be tested is {form()}"
        )
    # Before any test is imported: what its `@settings(...)` leaves open comes from the profile.
    settings.load_profile("explore" if config.getoption("--explore") else "repeatable")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONG)
    if config.getoption("--explore"):
        _draw_more(items)


def _draw_more(items: list[pytest.Item]) -> None:
    """A test's own `max_examples` beats a profile's, so in an exploring run it is multiplied."""
    grown: set[object] = set()
    for item in items:
        if not isinstance(item, pytest.Function) or item.obj in grown:
            continue
        if not getattr(item.obj, "is_hypothesis_test", False):
            continue
        grown.add(item.obj)
        if item.cls is not None and hasattr(item.cls, "settings"):  # a state machine's test case
            item.cls.settings = _more(item.cls.settings)
        else:
            given = item.obj
            given._hypothesis_internal_use_settings = _more(given._hypothesis_internal_use_settings)


def _more(own: settings) -> settings:
    return settings(own, max_examples=EXPLORE_TIMES * own.max_examples)


Rounds = Callable[[int], Iterator[int]]


@pytest.fixture
def rounds(pytestconfig: pytest.Config) -> Rounds:
    """From a test's own seed to those that it plays: that one, and fresh ones in a long run."""

    def seeds(own: int) -> Iterator[int]:
        yield own
        until = time.monotonic() + 60.0 * pytestconfig.getoption("--long")
        while time.monotonic() < until:
            yield random.SystemRandom().randrange(2**32)

    return seeds


def _reference(version: str) -> Path:
    try:
        return interpreter(version)
    except NotInstalled as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def reference_131() -> Path:
    return _reference("1.3.1")


@pytest.fixture(scope="session")
def reference_161() -> Path:
    return _reference("1.6.1")

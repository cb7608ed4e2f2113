"""What may be imported with what, each in a fresh interpreter."""

import subprocess
import sys

import pytest

import lean_selector


def modules_after(code: str, *prelude: str) -> set[str]:
    source = "\n".join([*prelude, "import sys", code, "print(*sys.modules)"])
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "code",
    [
        "import lean_selector",
        "import lean_selector.publisher",
        "from lean_selector import block_hashes, sequence_hashes, KvEventPublisher",
        "import lean_selector.client",
    ],
)
def test_what_engines_and_clients_use_imports_no_server(code: str) -> None:
    loaded = modules_after(code)
    assert not loaded & {"uvloop", "httptools", "lean_selector.app.selector_process"}
    assert ("httpx" in loaded) is ("client" in code)
    assert code != "import lean_selector" or not loaded & {"msgspec", "zmq", "xxhash"}


def test_without_httpx_the_client_says_what_to_install() -> None:
    hidden = "import sys; sys.modules['httpx'] = None"
    code = """
try:
    import lean_selector.client
except ImportError as error:
    assert str(error) == 'lean_selector.client needs httpx: pip install "lean-selector[client]"'
else:
    raise AssertionError("imported")
"""
    modules_after(code, hidden)


@pytest.mark.parametrize("name", sorted(lean_selector._HOME))
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(lean_selector, name).__module__.startswith(lean_selector._HOME[name])
    assert name in dir(lean_selector)


def test_other_names_are_missing_as_usual() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Router'"):
        lean_selector.__getattr__("Router")

"""The lower bounds of the dependencies, as the continuous integration installs them."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SETUP = """
[options]
install_requires =
    alpha>=1.2
    # a word on the next one
    beta-two>=0.3.1
    epsilon>=4.0; python_version < "3.14" and platform_machine in "x86_64 aarch64"

[options.extras_require]
#   gamma   with its reason
client =
    gamma>=2
test =
    gamma>=2
    {last}
"""


def printed(setup_cfg: Path) -> subprocess.CompletedProcess[str]:
    script = ROOT / ".ci" / "lowest_versions.py"
    return subprocess.run(
        [sys.executable, script, setup_cfg], capture_output=True, text=True, timeout=60, check=False
    )


def test_each_lower_bound_becomes_a_constraint_once(tmp_path: Path) -> None:
    (tmp_path / "setup.cfg").write_text(SETUP.format(last="Delta>=6"))
    run = printed(tmp_path / "setup.cfg")
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.split() == [
        "alpha==1.2",
        "beta-two==0.3.1",
        "epsilon==4.0",
        "gamma==2",
        "delta==6",
    ]


@pytest.mark.parametrize(
    ("last", "error"),
    [
        ("delta", "'delta' is not of the form name>=version"),
        ("delta~=1.0", "'delta~=1.0' is not of the form name>=version"),
        ("alpha>=1.3", "alpha has two lower bounds: 1.2 and 1.3"),
    ],
)
def test_a_dependency_without_one_lower_bound_is_named(
    tmp_path: Path, last: str, error: str
) -> None:
    (tmp_path / "setup.cfg").write_text(SETUP.format(last=last))
    run = printed(tmp_path / "setup.cfg")
    assert (run.returncode, run.stdout) == (1, "")
    assert error in run.stderr


def test_every_dependency_of_the_project_states_its_lower_bound() -> None:
    run = printed(ROOT / "setup.cfg")
    assert (run.returncode, run.stderr) == (0, "")
    names = [line.partition("==")[0] for line in run.stdout.split()]
    assert {"uvloop", "httptools", "pyzmq", "msgspec", "xxhash", "httpx", "pysimdjson"} <= set(
        names
    )

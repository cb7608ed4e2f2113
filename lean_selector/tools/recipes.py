"""`lean-selector deploy`: prints files to deploy the services with, for example for Kubernetes.

In a checkout, these files are in `deploy/`; in a wheel, inside the package (see `setup.py`)."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
# The first one that exists is used. A checkout has only the second, a wheel only the first.
_HOMES = (_PACKAGE / "deploy", _PACKAGE.parent / "deploy")


def recipes() -> dict[str, Path]:
    """Return name -> path of each file, such as `systemd/lean-selector.service`, sorted."""
    home = next(home for home in _HOMES if home.is_dir())
    return {
        str(path.relative_to(home)): path
        for path in sorted(home.rglob("*"))
        if path.is_file() and path.suffix != ".pyc"
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--list", action="store_true", help="print the names of all files, one per line"
    )
    what.add_argument(
        "--print", metavar="NAME", choices=list(recipes()), help="a file name from --list"
    )


def main(argv: Sequence[str]) -> int:
    """Prints one file, or the names of all files. Return 0."""
    parser = argparse.ArgumentParser(
        prog="lean-selector deploy",
        description="Files to run the services with: a container image, Kubernetes, systemd, "
        "Prometheus, Grafana, and gateways in front of them: nginx, HAProxy, Envoy. The files are "
        "only printed; nothing is installed.",
    )
    add_arguments(parser)
    args = parser.parse_args(argv)
    if args.list:
        sys.stdout.writelines(f"{name}\n" for name in recipes())
    else:
        sys.stdout.write(recipes()[args.print].read_text(encoding="utf-8"))
    return 0

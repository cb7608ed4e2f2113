#!/usr/bin/env python3
"""Prints the lower bounds of setup.cfg as constraints for pip: `name>=1.2` becomes `name==1.2`,
whatever marker follows it.

    .ci/lowest_versions.py [setup.cfg]

Ends with 1 for a dependency that states no lower bound, or two.
"""

import configparser
import re
import sys
from pathlib import Path

BOUND = re.compile(r"(?P<name>[A-Za-z0-9._-]+)(?:\[[a-z]+\])?\s*>=\s*(?P<version>[0-9][0-9.]*)")


def lowest(setup_cfg: Path) -> dict[str, str]:
    """The lowest version by name, of what is always needed and of all extras. Raises ValueError."""
    config = configparser.ConfigParser()
    config.read_string(setup_cfg.read_text())
    groups = [config["options"].get("install_requires", "")]
    if config.has_section("options.extras_require"):
        groups += config["options.extras_require"].values()
    found: dict[str, str] = {}
    for line in "\n".join(groups).splitlines():
        requirement = line.partition("#")[0].strip()
        if not requirement:
            continue
        bound = BOUND.fullmatch(requirement.partition(";")[0].rstrip())
        if bound is None:
            raise ValueError(f"{requirement!r} is not of the form name>=version")
        name, version = bound["name"].lower(), bound["version"]
        if found.setdefault(name, version) != version:
            raise ValueError(f"{name} has two lower bounds: {found[name]} and {version}")
    return found


def main(argv: list[str]) -> int:
    setup_cfg = Path(argv[0]) if argv else Path(__file__).parent.parent / "setup.cfg"
    try:
        bounds = lowest(setup_cfg)
    except ValueError as error:
        sys.stderr.write(f"{setup_cfg}: {error}\n")
        return 1
    sys.stdout.writelines(f"{name}=={version}\n" for name, version in bounds.items())
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

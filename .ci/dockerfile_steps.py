#!/usr/bin/env python3
"""Carries out the steps of a Dockerfile in a clean folder, where no daemon is: so it cannot rot.

    .ci/dockerfile_steps.py DOCKERFILE OUT [NAME=VALUE ...]

The build arguments are those of `docker build --build-arg`. Everything is done for real but this:
a base image `python:3.11-...` is an environment of python3.11; every absolute path of a step lies
in OUT/root; and `apt-get install` only looks whether there are such packages. OUT/image.json tells
what `docker inspect` would: entrypoint, env, user, working_dir. OUT/stages/NAME is what the named
stages have left.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from string import Template

CONTEXT = Path(__file__).resolve().parents[1]
# A path of the image: at the beginning of a word, or behind what may stand before one in a shell.
ABSOLUTE = re.compile(r"""(?<![^\s"'=:(|;&>])/(?=[a-z])""")
APT_GET = """#!/bin/sh
# Names of packages are looked up; nothing is installed.
[ "$1" = install ] || exit 0
command -v /usr/bin/apt-get >/dev/null || { echo "no apt-get here: $* not looked up"; exit 0; }
exec /usr/bin/apt-get --simulate --quiet=2 "$@"
"""


class Build:
    """One run through a Dockerfile. Steps that it does not know end it."""

    def __init__(self, out: Path, arguments: dict[str, str]) -> None:
        self.out, self.root = out, out / "root"
        self._given = arguments
        self._global: dict[str, str] = {}
        self._args: dict[str, str] = {}
        self._stage = ""
        self._tools = out / "tools"
        self._begin()

    def _begin(self) -> None:
        self.env: dict[str, str] = {}
        self.user, self.working_dir, self.entrypoint = "", "/", list[str]()

    def step(self, word: str, rest: str) -> None:
        sys.stdout.write(f"{word} {rest}\n")
        sys.stdout.flush()
        getattr(self, f"_{word.lower()}")(rest)

    def _known(self) -> dict[str, str]:
        path = {"PATH": "${PATH}"}  # resolved when a step runs
        return {**path, **self._args, **self.env}

    def _from(self, rest: str) -> None:
        words = Template(rest).substitute(self._global).split()
        image, self._stage = words[0], words[2] if words[1:2] == ["AS"] else ""
        if self.root.exists():
            raise SystemExit("only a stage with a name may stand before another")
        self._begin()
        self._args = {}
        self.root.mkdir(parents=True)
        found = re.fullmatch(r"python:(3\.\d+)(-.*)?", image)
        if found is None:
            raise SystemExit(f"{image}: only images of Python are known")
        if not self._tools.exists():
            name = f"python{found[1]}"
            subprocess.run([shutil.which(name) or "python3", "-m", "venv", self._tools], check=True)
            apt_get = self._tools / "bin" / "apt-get"
            apt_get.write_text(APT_GET)
            apt_get.chmod(0o755)

    def end_of_stage(self) -> None:
        if self._stage:
            (self.out / "stages").mkdir(exist_ok=True)
            self.root.rename(self.out / "stages" / self._stage)

    def _arg(self, rest: str) -> None:
        name, _, default = rest.partition("=")
        scope = self._args if self.root.exists() else self._global
        scope[name] = self._given.get(name, default or self._global.get(name, ""))

    def _env(self, rest: str) -> None:
        for pair in shlex.split(rest):
            name, _, value = pair.partition("=")
            self.env[name] = Template(value).safe_substitute(self._known())

    def _workdir(self, rest: str) -> None:
        self.working_dir = rest
        self._inside(rest).mkdir(parents=True, exist_ok=True)

    def _user(self, rest: str) -> None:
        self.user = rest

    def _expose(self, rest: str) -> None:
        assert all(port.isdigit() for port in rest.split())

    def _entrypoint(self, rest: str) -> None:
        self.entrypoint = json.loads(rest)

    def _copy(self, rest: str) -> None:
        *sources, target = rest.split()
        home = CONTEXT
        if sources[0].startswith("--from="):
            home = self.out / "stages" / sources.pop(0).removeprefix("--from=")
        for source in sources:
            path = home / source.lstrip("/")
            to = self._inside(target)
            if target.endswith("/"):
                to /= path.name
            to.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
                shutil.copytree(path, to, symlinks=True, ignore=ignored, dirs_exist_ok=True)
            else:
                shutil.copy(path, to)

    def _run(self, rest: str) -> None:
        subprocess.run(
            ["sh", "-ec", self.placed(rest)],
            cwd=self._inside(self.working_dir),
            env=self.environment(),
            check=True,
        )

    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if "PYTHON" not in name}
        tools = f"{self._tools / 'bin'}:{os.environ['PATH']}"
        own = {name: self.placed(value) for name, value in self._known().items()}
        own = {name: Template(value).safe_substitute(PATH=tools) for name, value in own.items()}
        return {**kept, **own}

    def placed(self, text: str) -> str:
        """With every absolute path inside the image."""
        return ABSOLUTE.sub(f"{self.root}/", text)

    def _inside(self, path: str) -> Path:
        return self.root / (Path(self.working_dir) / path).relative_to("/")


def steps(text: str) -> list[tuple[str, str]]:
    lines = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))
    found = [
        line.split(None, 1) for line in lines.replace("\\\n", " ").splitlines() if line.strip()
    ]
    return [(word, rest.strip()) for word, rest in found]


def main(argv: list[str]) -> None:
    dockerfile, out = Path(argv[0]), Path(argv[1]).resolve()
    if out.exists() and any(out.iterdir()):
        raise SystemExit(f"{out} is not empty")
    build = Build(out, dict(pair.split("=", 1) for pair in argv[2:]))
    for word, rest in steps(dockerfile.read_text(encoding="utf-8")):
        if word == "FROM" and build.root.exists():
            build.end_of_stage()
        build.step(word, rest)
    image = {
        "entrypoint": build.entrypoint,
        "env": {name: build.environment()[name] for name in build.env},
        "user": build.user,
        "working_dir": str(build.root / build.working_dir.lstrip("/")),
    }
    (out / "image.json").write_text(json.dumps(image, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])

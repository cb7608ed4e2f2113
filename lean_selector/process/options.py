"""One option of a command line: its flag, its environment names, how its text is read.

A flag goes before the environment, that before the default; an empty variable counts as unset; a
value that cannot be read or is out of range ends the start with one line and status 2 (decision
D15). Which options there are is for `selector_config` and `slot_tracker_config` to
say.
"""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, TypeVar

import msgspec

from lean_selector.core.endpoints import check_endpoint

T = TypeVar("T")
TRUE_WORDS = frozenset({"true", "1", "yes", "on"})
FALSE_WORDS = frozenset({"false", "0", "no", "off"})


class Option(msgspec.Struct, frozen=True):
    """One row: `read` turns text into the value and raises ValueError saying what was expected."""

    flag: str
    read: Callable[[str], object]
    default: object
    help: str
    env: tuple[str, ...] = ()
    metavar: str = "N"
    repeats: bool = False  # may be given several times: the texts are joined with commas

    @property
    def name(self) -> str:
        return self.flag.removeprefix("--").replace("-", "_")


# -- reading one value ----------------------------------------------------------------------------


def boolean(text: str) -> bool:
    word = text.strip().lower()
    if word in TRUE_WORDS:
        return True
    if word in FALSE_WORDS:
        return False
    raise ValueError("expected true or false (also 1, yes, on, 0, no, off)")


def number(
    least: float = -math.inf, most: float = math.inf, *, infinite: bool = False
) -> Callable[[str], float]:
    """A float within [least, most]; never NaN, infinite only where that means something."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError("expected a number") from None
        if math.isnan(value) or (math.isinf(value) and not infinite):
            raise ValueError("expected a finite number")
        if not least <= value <= most:
            bounds = f"at least {least:g}" if most == math.inf else f"{least:g} to {most:g}"
            raise ValueError(f"expected {bounds}")
        return value

    return read


def integer(least: int, most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError("expected a whole number") from None
        if not least <= value <= most:
            raise ValueError(f"expected {least} to {most}")
        return value

    return read


def word(*allowed: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text.lower() not in allowed:
            raise ValueError(f"expected one of {', '.join(allowed)}")
        return text.lower()

    return read


def text(value: str) -> str:
    return value


def path(value: str) -> str:
    """Of a file. The empty one means to the kernel an address that it chooses."""
    if not value:
        raise ValueError("expected a path")
    return value


def urls(value: str) -> list[str]:
    """Comma-separated base URLs; blanks around them and one trailing slash are dropped."""
    items = [item.strip().removesuffix("/") for item in value.split(",") if item.strip()]
    for item in items:
        if not item.startswith(("http://", "https://")):
            raise ValueError(f"`{item}` is not an http:// or https:// URL")
        if "@" in item.split("/")[2]:  # they would not be sent, and stand in every log line
            raise ValueError("credentials in a URL are not supported: give --peer-token-file")
    return items


def zmq_port(text: str) -> int:
    if text.strip() == "0":
        raise ValueError("port must be greater than zero")
    return integer(1, 65535)(text)


def endpoint(value: str) -> str:
    check_endpoint(value.strip())
    return value.strip()


def peer_endpoints(value: str) -> list[str]:
    """Comma-separated ZMQ endpoints, each once; blanks around them and empty items are dropped."""
    items = list(dict.fromkeys(item.strip() for item in value.split(",") if item.strip()))
    for item in items:
        try:
            check_endpoint(item)
        except ValueError as error:
            raise ValueError(f"invalid replica peer endpoint `{item}`: {error}") from None
    return items


def or_none(read: Callable[[str], T]) -> Callable[[str], T | None]:
    """Also takes the word `None`, as the reference does for what is off."""
    return lambda text: None if text.lower() == "none" else read(text)


def status(*allowed: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if text not in map(str, allowed):
            raise ValueError(f"expected one of {', '.join(map(str, allowed))}")
        return int(text)

    return read


def unsupported(_: str) -> NoReturn:
    raise ValueError("router policy files are not supported yet")


# -- a parser of options -------------------------------------------------------------------------


class OneLineParser(argparse.ArgumentParser):
    """Complains in one line, exit status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def add_options(parser: argparse.ArgumentParser, options: Sequence[Option]) -> None:
    for option in options:
        env = f" [env {', '.join(option.env)}]" if option.env else ""
        default = "" if option.default in (None, []) else f" (default {_shown(option.default)})"
        parser.add_argument(
            option.flag,
            action="append" if option.repeats else "store",
            nargs="?" if option.read is boolean else None,
            const="true" if option.read is boolean else None,
            metavar=option.metavar,
            help=f"{option.help}{default}{env}".replace("%", "%%"),
        )


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value}"


def resolve(
    parser: argparse.ArgumentParser,
    options: Sequence[Option],
    args: argparse.Namespace,
    environ: Mapping[str, str],
) -> dict[str, object]:
    """Every option's value by name; a bad one ends the process through `parser.error`."""
    values: dict[str, object] = {}
    for option in options:
        source, given = option.flag, getattr(args, option.name)
        if option.repeats and given is not None:
            given = ",".join(given)
        for name in option.env if given is None else ():
            if environ.get(name):
                source, given = name, environ[name]
                break
        if given is None:
            values[option.name] = option.default
            continue
        try:
            values[option.name] = option.read(given)
        except ValueError as error:
            parser.error(f"{source}: invalid value `{given}`: {error}")
    return values

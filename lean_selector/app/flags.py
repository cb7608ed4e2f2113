"""Flags as fields of frozen dataclasses: `name: type = flag(default, "--name", "VARIABLE", ge=0)`.

A group of flags is a subclass of Group. The first line of its docstring is the title, followed by
`name: help` for each field. A configuration is a dataclass whose fields are groups. The command
line, the environment, the TOML file, the help and the page of flags are generated from these fields
alone.

The command line takes precedence over the environment, the environment over the file, the file over
the default. An empty variable counts as unset. An invalid value stops the start with one line and
status 2 (D15). Three more mistakes stop the start: a flag that was removed, a flag that has no
effect because another flag is missing, and an empty value that would lift a restriction."""

import argparse
import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from inspect import cleandoc
from types import NoneType
from typing import (
    Any,
    ClassVar,
    Final,
    Literal,
    NoReturn,
    TypeVar,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
)

T = TypeVar("T")
FILE: Final = "--config"
FLAG: Final = "flag"
# Flags that earlier releases had, and what to do without each.
DROPPED: Final = {
    "--worker-ejection-secs": "the n-th ejection in a row lasts n times 30 s; leave the flag out",
    "--worker-ejection-max-secs": "an ejection lasts at most 300 s; leave the flag out",
    "--worker-ejection-max-percent": "at most half of a model's ranks are ejected; leave the flag "
    "out, or switch ejections off by --worker-ejection-failures 0",
    "--worker-health-timeout-secs": "a health check may take 2 s; leave the flag out, or name a "
    "faster path by --worker-health-path",
    "--worker-health-failures": "the third failed health check in a row counts; set how soon that "
    "is by --worker-health-interval-secs",
    "--recovery-timeout-secs": "a recovery takes at most 10 s; leave the flag out",
    "--kv-source-grace-secs": "a source's fault is logged after 60 s; leave the flag out, and see "
    "GET /kv_sources, which shows it at once",
    "--prompts-tokenize-timeout-secs": "a tokenizer may take 2 s; leave the flag out, or set which "
    "prompts are tokenized by --prompts-tokenize-from",
    "--prompts-memory-mb": "known prompts take at most 128 MiB; leave the flag out",
    "--decision-log-mb": "the file is renamed at 512 MiB; leave the flag out, or log fewer "
    "requests by --decision-log-share",
    "--state-interval-secs": "live reservations are written every second; leave the flag out",
    **dict.fromkeys(
        ("--kv-events-curve-server-keys-file", "--kv-events-curve-secret-key-file"),
        "no engine encrypts its events; leave the flag out, and keep their ports within a network "
        "that only engines and selectors reach",
    ),
    "--session-affinity-bonus-blocks": "the bonus is 64 blocks; leave the flag out, or set "
    "--session-affinity hard",
}
_WORDS: Final = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}


@dataclass(frozen=True, kw_only=True)
class Flag:
    """A flag's name, limits and parser. If `each` is None, the field's type says how to parse."""

    name: str  # with --; without --, a list of positional arguments
    env: tuple[str, ...] = ()
    ge: float = -math.inf
    le: float = math.inf
    infinite: bool = False  # whether inf is accepted
    none: bool = False  # whether `none` is accepted, which disables the feature
    filled: bool = (
        False  # whether an empty value is refused, because it would allow more than intended
    )
    # Refused unless one of these flags is set, because it would have no effect.
    needs: tuple[str, ...] = ()
    each: Callable[[str], Any] | None = None  # parses the text, or each item of a list
    common: bool = False  # shown in --help; the others only in --help-all


def flag(default: Any, name: str, *env: str, **more: Any) -> Any:
    """Declares a dataclass field that a flag or a variable (`env`) sets. `more`: fields of Flag."""
    made: dict[str, Any] = {"metadata": {"flag": Flag(name=name, env=env, **more)}}
    if isinstance(default, list):
        return field(default_factory=default.copy, **made)
    return field(default=default, **made)


def dyn_flag(default: Any, name: str, *env: str, **more: Any) -> Any:
    """Declares a flag that Dynamo has too. Dynamo's variable (DYN_ and the name) also sets it."""
    return flag(default, name, f"DYN_{name[2:].upper().replace('-', '_')}", *env, **more)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
class Group:
    """Base class of a group of flags. Its subclasses are frozen dataclasses."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)


class Config(Group):
    """Base class of a program's configuration. A subclass has one field per group of flags."""

    defaults: ClassVar[Mapping[str, Any]] = {}  # by flag, in place of the groups' own
    # Flag -> source of its value: FLAG, the variable, or the file.
    given: dict[str, str] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Field:
    """A flag of a configuration, and the name and type of the dataclass field that it sets."""

    flag: Flag
    help: str
    title: str
    group: str
    name: str
    kind: Any
    default: Any

    def read(self, text: str) -> Any:
        """Parses a value of the flag. Raises ValueError, which says what was expected."""
        flag, kind = self.flag, self.kind
        if flag.filled and not text.strip(", "):
            raise ValueError("expected a value")
        if flag.none and text.lower() == "none":
            return None
        if get_origin(kind) is list:
            items = (item.strip() for item in text.split(",") if item.strip())
            return list(dict.fromkeys(map(flag.each, items) if flag.each else items))
        if flag.each is not None:
            return flag.each(text)
        if get_origin(kind) is Literal:
            allowed = {str(value): value for value in get_args(kind)}
            if text.lower() not in allowed:
                raise ValueError(f"expected one of {', '.join(allowed)}")
            return allowed[text.lower()]
        if kind is bool:
            if text.strip().lower() not in _WORDS:
                raise ValueError("expected true or false (also 1, yes, on, 0, no, off)")
            return _WORDS[text.strip().lower()]
        return text if kind is str else self._number(text)

    def _number(self, text: str) -> int | float:
        flag, is_whole = self.flag, self.kind is int
        value: int | float = whole_number(text) if is_whole else _decimal(text)
        if math.isnan(value) or (math.isinf(value) and not flag.infinite):
            raise ValueError("expected a finite number")
        if not flag.ge <= value <= flag.le:
            least, most = (f"{end}" if is_whole else f"{end:g}" for end in (flag.ge, flag.le))
            is_open = flag.le == math.inf
            raise ValueError(f"expected {f'at least {least}' if is_open else f'{least} to {most}'}")
        return value

    @property
    def metavar(self) -> str:
        if get_origin(self.kind) is Literal:
            return "|".join(map(str, get_args(self.kind)))
        if self.flag.each is not None:
            return self.flag.each.__name__.strip("_").upper()
        return {bool: "BOOL", str: "TEXT"}.get(self.kind, "N")

    @property
    def shown_default(self) -> str:
        value = self.default
        if value is None or value == []:
            return ""
        return str(value).lower() if isinstance(value, bool) else f"{value}"

    def help_text(self, *, briefly: bool) -> str:
        """Return the flag's help text. If `briefly`, the text is cut at the first semicolon."""
        default = f" (default {self.shown_default})" if self.shown_default else ""
        env = f" [env {', '.join(self.flag.env)}]" if self.flag.env else ""
        return self.help.partition(";")[0] + default if briefly else self.help + default + env


def fields_of(config: Any) -> Iterator[Field]:
    """Yields the flags of a configuration in the order of their declaration."""
    for part in fields(config):
        if not is_dataclass(part.type):
            continue
        group: Any = part.type
        said = dict[str, str]()
        for each in reversed(group.__mro__[:-1]):
            title, _, text = cleandoc(each.__doc__ or "").partition("\n")
            said |= dict(re.findall(r"^(\w+): (.*(?:\n .*)*)", text, re.M))
        for each in fields(group):
            if "flag" not in each.metadata:
                continue
            kind: Any = each.type
            if NoneType in get_args(kind):
                (kind,) = (one for one in get_args(kind) if one is not NoneType)
            default = each.default if each.default_factory is MISSING else each.default_factory()
            meaning = " ".join(said.get(each.name, "").split())
            declared: Flag = each.metadata["flag"]
            default = config.defaults.get(declared.name, default)
            yield Field(declared, meaning, title, part.name, each.name, kind, default)


def whole_number(text: str) -> int:
    """Parses a whole number. (Python's int would also accept 1_0 and digits of other scripts.)"""
    if re.fullmatch(r"\s*[+-]?[0-9]+\s*", text, re.ASCII) is None:
        raise ValueError("expected a whole number")
    return int(text)


def _decimal(text: str) -> float:
    try:
        if "_" in text or not text.isascii():
            raise ValueError
        return float(text)
    except ValueError:
        raise ValueError("expected a number") from None


class OneLineParser(argparse.ArgumentParser):
    """An argument parser that reports an error in one line, and exits with status 2."""

    def error(self, message: str) -> NoReturn:
        _, is_unknown, rest = message.partition("unrecognized arguments: ")
        if is_unknown:
            from difflib import get_close_matches

            flag = rest.split()[0].partition("=")[0]
            close = get_close_matches(flag, self._option_string_actions, 1)
            message += f": is `{close[0]}` meant?" if close else ""
        self.exit(2, f"{self.prog}: error: {message}\n")


def add_flags(parser: argparse.ArgumentParser, config: Any, *, briefly: bool = False) -> None:
    """Adds a configuration's flags to `parser`. If `briefly`, the help shows only common flags."""
    parser.formatter_class = _Lines
    parser.add_argument(
        FILE, metavar="PATH", help="TOML file of flags, named without --; flags and "
        "environment take precedence"
    )  # fmt: skip
    found = list(fields_of(config))
    titles = dict.fromkeys(each.title for each in found)
    groups = {title: parser if briefly else parser.add_argument_group(title) for title in titles}
    for each in found:
        names, is_list = {}, get_origin(each.kind) is list
        if not each.flag.name.startswith("--"):
            names = {"nargs": "*"}
        elif each.kind is bool:
            names = {"dest": each.flag.name, "nargs": "?", "const": "true"}
        else:
            names = {"dest": each.flag.name, "action": "append" if is_list else "store"}
        is_shown = each.flag.common or not briefly
        says = each.help_text(briefly=briefly).replace("%", "%%") if is_shown else argparse.SUPPRESS
        cast(Any, groups[each.title]).add_argument(
            each.flag.name, metavar=each.metavar, help=says, **names
        )


class _Lines(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36, width=100)

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any = None) -> None:
        words = [each.metavar for each in actions if not each.option_strings]
        super().add_usage(" ".join(["%(prog)s [FLAG ...]", *(f"[{w} ...]" for w in words)]),
                          actions, groups, prefix)  # fmt: skip


def refuse_dropped(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    """Ends the process if the command line has a removed flag."""
    for name in (each.partition("=")[0] for each in argv):
        if name in DROPPED:
            parser.error(f"{name} was removed: {DROPPED[name]}")


def load(
    parser: argparse.ArgumentParser,
    config: Callable[..., T],
    argv: Sequence[str],
    environ: Mapping[str, str],
) -> T:
    """Reads the command line, environment and TOML file. Invalid values end the process."""
    refuse_dropped(parser, argv)
    args = vars(parser.parse_args(argv))
    found, file = list(fields_of(config)), args[FILE.removeprefix("--")]
    in_file = _read_file(parser, file, found)
    given: dict[str, str] = {}
    values: dict[str, dict[str, Any]] = {each.group: {} for each in found}
    for each in found:
        values[each.group][each.name] = each.default
        name, text = each.flag.name, args[each.flag.name]
        source = where = name
        if text is not None and text != []:
            text, source = ",".join(text) if isinstance(text, list) else text, FLAG
        else:
            variable = next((it for it in each.flag.env if environ.get(it)), None)
            if variable is not None:
                source = where = variable
                text = environ[variable]
            elif name in in_file:
                source, where, text = file, f"{file}: {name.removeprefix('--')}", in_file[name]
            else:
                continue
        given[name] = source
        try:
            values[each.group][each.name] = each.read(text)
        except ValueError as error:
            is_flag = where.startswith("--") or source != FLAG
            parser.error(f"{where}: invalid value `{text}`: {error}" if is_flag else f"{error}")
    told = {each.flag.name: values[each.group][each.name] for each in found}
    for each in found:
        name, needs = each.flag.name, [need for need in each.flag.needs if need in told]
        if name not in given or given[name] not in (FLAG, file):
            continue  # variables may be set for a whole fleet
        if needs and all(told[need] in (None, []) for need in needs):
            parser.error(f"{name} requires {' or '.join(needs)}")
    kinds: dict[str, Any] = {part.name: part.type for part in fields(cast(Any, config))}
    try:
        groups = {name: kinds[name](**those) for name, those in values.items()}
        return config(given=given, **groups)
    except ValueError as error:
        parser.error(str(error))


def _read_file(
    parser: argparse.ArgumentParser, path: str | None, found: Sequence[Field]
) -> dict[str, str]:
    """Reads a TOML file. Return its values as a map from flag names to texts."""
    if path is None:
        return {}
    try:
        with open(path, "rb") as file:
            said = tomllib.load(file)
    except (OSError, ValueError) as error:
        parser.error(f"{FILE}: {path}: {getattr(error, 'strerror', None) or error}")
    by_key = {each.flag.name.removeprefix("--"): each for each in found}
    texts = dict[str, str]()
    for key, value in said.items():
        if f"--{key}" in DROPPED:
            parser.error(f"{path}: {key} was removed: {DROPPED[f'--{key}']}")
        if key not in by_key:
            parser.error(f"{path}: {key}: no flag has this name")
        items = value if isinstance(value, list) else [value]
        is_list = get_origin(by_key[key].kind) is list
        if isinstance(value, list) and not is_list:
            parser.error(f"{path}: {key}: expected one value, not a list")
        if any(isinstance(item, list | dict) for item in items):
            parser.error(f"{path}: {key}: expected a value, not a table")
        texts[by_key[key].flag.name] = ",".join(map(_text, items))
    return texts


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def made_of(kind: type[T], *groups: object, **more: Any) -> T:
    """Creates a struct of type `kind` from `more` and those fields of `groups` that `kind` has."""
    names = cast(Any, kind).__struct_fields__
    told = {name: value for group in groups for name, value in vars(group).items() if name in names}
    return kind(**told | more)

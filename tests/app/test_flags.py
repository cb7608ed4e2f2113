"""Flags as fields: the rules that hold for each of them, whichever it is."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from lean_selector.app.flags import (
    FILE,
    FLAG,
    Config,
    Field,
    Group,
    OneLineParser,
    add_flags,
    fields_of,
    flag,
)
from lean_selector.app.gateway_flags import GatewayConfig
from lean_selector.app.selector_flags import SelectorConfig
from lean_selector.app.service_flags import TrackerConfig
from tests.support.configured import configured, refusal


def _half(text: str) -> float:
    if text == "odd":
        raise ValueError("expected no odd one")
    return float(text) / 2


class Named(Group):
    """A group

    name: what it is
      called; this is said in the long help alone, with a 50 % chance
    size: how large it is
    """

    name: str = flag("it", "--name", "NAME", "OLD_NAME", common=True)
    size: int = flag(3, "--size", "SIZE", ge=1, le=9, common=True)
    is_on: bool = flag(False, "--on", "ON")
    ratio: float | None = flag(None, "--ratio", "RATIO", ge=0, none=True)
    limit: float = flag(1.0, "--limit", le=5, infinite=True)
    mode: Literal["fast", "slow"] = flag("fast", "--mode", "MODE")
    status: Literal[503, 429] | None = flag(None, "--status")
    half: float | None = flag(None, "--half", "HALF", each=_half)
    names: list[str] = flag([], "--names", "NAMES")
    halves: list[float] = flag([], "--halves", each=_half)

    def __post_init__(self) -> None:
        if self.is_on and self.mode == "slow":
            raise ValueError("--on excludes --mode slow")


class Derived(Named):
    """Another group

    size: how large this one is
    """

    size: int = flag(4, "--size", ge=1, le=9)


class Told(Config):
    group: Named


class ToldOther(Config):
    group: Derived


def told(*argv: str, of: Any = Told, **environ: str) -> Any:
    return configured(of, argv, **environ)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The one line with which a start ends."""

    def line(*argv: str, of: Any = Told, **environ: str) -> str:
        return refusal(capsys, of, argv, **environ)

    return line


VALUES = [
    *(("name", "x", "x"), ("size", "9", 9), ("size", " 1 ", 1), ("is_on", "YES", True)),
    *(("is_on", "off", False), ("ratio", "0.5", 0.5), ("ratio", "None", None)),
    *(("limit", "-inf", -math.inf), ("mode", "SLOW", "slow"), ("status", "429", 429)),
    *(("half", "3", 1.5), ("names", " a,b,, a ", ["a", "b"]), ("halves", "2,4", [1.0, 2.0])),
]
FLAG_OF = {each.name: each.flag for each in fields_of(Told)}


@pytest.mark.parametrize(("name", "text", "value"), VALUES)
def test_a_text_means_the_same_wherever_it_is_given(
    name: str, text: str, value: object, tmp_path: Path
) -> None:
    declared, file = FLAG_OF[name], tmp_path / "it.toml"
    file.write_text(f"{declared.name.removeprefix('--')} = '{text}'\n")
    ways: list[tuple[tuple[str, ...], dict[str, str]]] = [
        ((declared.name, text), {}) if text[0] != "-" else ((f"{declared.name}={text}",), {}),
        ((f"{declared.name}={text}",), {}),
        ((FILE, str(file)), {}),
        *(((), {variable: text}) for variable in declared.env),
    ]
    for argv, environ in ways:
        assert getattr(told(*argv, **environ).group, name) == value


@pytest.mark.parametrize(
    ("flag", "text", "fault"),
    [
        ("--size", "0", "expected 1 to 9"),
        ("--size", "1.0", "expected a whole number"),
        ("--ratio", "-1", "expected at least 0"),
        ("--ratio", "inf", "expected a finite number"),
        ("--limit", "nan", "expected a finite number"),
        ("--ratio", "x", "expected a number"),
        ("--on", "2", "expected true or false (also 1, yes, on, 0, no, off)"),
        ("--mode", "", "expected one of fast, slow"),
        ("--status", "500", "expected one of 503, 429"),
        ("--half", "odd", "expected no odd one"),
        ("--halves", "2,odd", "expected no odd one"),
    ],
)
def test_what_cannot_be_read_is_refused_by_the_name_of_its_source(
    flag: str, text: str, fault: str, tmp_path: Path, refused: Callable[..., str]
) -> None:
    assert refused(f"{flag}={text}") == f"{flag}: invalid value `{text}`: {fault}"
    declared = next(each for each in FLAG_OF.values() if each.name == flag)
    for variable in declared.env if text else ():
        assert refused(**{variable: text}) == f"{variable}: invalid value `{text}`: {fault}"
    (tmp_path / "it.toml").write_text(f"{flag.removeprefix('--')} = '{text}'\n")
    line = refused(FILE, str(tmp_path / "it.toml"))
    key = flag.removeprefix("--")
    assert line == f"{tmp_path}/it.toml: {key}: invalid value `{text}`: {fault}"


def test_a_flag_goes_before_the_environment_that_before_the_file_that_before_the_default(
    tmp_path: Path,
) -> None:
    file = tmp_path / "it.toml"
    file.write_text('name = "file"\nnames = ["a", "b"]\non = true\nratio = 0.5\n')
    of_file = told(FILE, str(file))
    assert (of_file.group.name, of_file.group.names) == ("file", ["a", "b"])
    assert (of_file.group.is_on, of_file.group.ratio, of_file.group.size) == (True, 0.5, 3)
    assert told(FILE, str(file), OLD_NAME="old").group.name == "old"
    assert told(FILE, str(file), OLD_NAME="old", NAME="new").group.name == "new"
    assert told(FILE, str(file), OLD_NAME="old", NAME="").group.name == "old"
    assert told(FILE, str(file), NAME="").group.name == "file"
    by_flag = told("--name", "flag", FILE, str(file), NAME="new", SIZE="4")
    assert by_flag.group.name == "flag"
    assert by_flag.given["--name"] == FLAG
    assert by_flag.given["--size"] == "SIZE"
    assert by_flag.given["--on"] == str(file)
    assert "--mode" not in by_flag.given


def test_a_list_may_be_given_in_pieces_and_a_boolean_alone() -> None:
    group = told("--names", "a", "--on", "--names=b,a").group
    assert (group.names, group.is_on) == (["a", "b"], True)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("nme = 1", "nme: no flag has this name"),
        ("config = 'x'", "config: no flag has this name"),
        ("name = [1, 2]", "name: expected one value, not a list"),
        ("[name]\nx = 1", "name: expected a value, not a table"),
        ("names = [[1]]", "names: expected a value, not a table"),
        ("size = 3.0", "size: invalid value `3.0`: expected a whole number"),
    ],
)
def test_a_file_has_names_of_flags_and_values(
    text: str, fault: str, tmp_path: Path, refused: Callable[..., str]
) -> None:
    (tmp_path / "it.toml").write_text(text)
    assert refused(FILE, str(tmp_path / "it.toml")) == f"{tmp_path}/it.toml: {fault}"


def test_a_file_that_cannot_be_read_ends_the_start(
    tmp_path: Path, refused: Callable[..., str]
) -> None:
    missing = f"{tmp_path}/none.toml"
    assert refused(FILE, missing) == f"{FILE}: {missing}: No such file or directory"
    (tmp_path / "it.toml").write_text("name = ")
    assert "it.toml: Invalid value" in refused(FILE, str(tmp_path / "it.toml"))


@pytest.mark.parametrize(
    "argv",
    [["--nope"], ["--size"], ["--siz", "1"], ["extra"], ["--name"]],
    ids=["unknown", "no number", "abbreviated", "positional", "no text"],
)
def test_a_usage_error_is_one_line(argv: list[str], refused: Callable[..., str]) -> None:
    refused(*argv)


def test_a_negative_number_can_follow_its_flag() -> None:
    assert told("--limit", "-1").group.limit == -1.0


def test_what_does_not_go_together_ends_the_start(refused: Callable[..., str]) -> None:
    assert refused("--on", MODE="slow") == "--on excludes --mode slow"


def test_a_derived_group_has_its_own_default_and_help_and_what_it_inherits() -> None:
    found = {each.name: each for each in fields_of(ToldOther)}
    assert told(of=ToldOther).group == Derived()
    assert (found["size"].default, found["size"].help) == (4, "how large this one is")
    assert found["name"].help.startswith("what it is called; this")
    assert {each.title for each in found.values()} == {"Another group"}


def test_the_short_help_has_what_is_common_and_its_first_words(
    capsys: pytest.CaptureFixture[str],
) -> None:
    brief, full = (OneLineParser(prog="it") for _ in range(2))
    add_flags(brief, Told, briefly=True)
    add_flags(full, Told)
    short, long = (" ".join(each.format_help().split()) for each in (brief, full))
    assert "--name TEXT what it is called (default it)" in short
    assert "--on" not in short
    assert "A group" not in short
    assert "A group: --name TEXT what it is called; this is said in the long help alone" in long
    assert "with a 50 % chance (default it) [env NAME, OLD_NAME]" in long
    assert "--mode fast|slow" in long
    assert "--half HALF" in long


# -- the flags that there are ----------------------------------------------------------------------

CONFIGS = [TrackerConfig, SelectorConfig, GatewayConfig]
# Where no text is good by itself: what its reader asks for.
SAMPLES = {
    **dict.fromkeys(("ENDPOINT", "PEER"), "tcp://a:1"),
    **dict.fromkeys(("PATH", "URL_PATH"), "/x"),
    **{"URL": "http://a:1", "PORT": "5", "HOST": "a:1-2", "NAME": "public-xxh3-v1"},
    **{"WHERE": "dns:a:80", "JSON": "{}", "BYTES": "5", "MODE": "off", "NETWORK": "10.0.0.0/8"},
    "ADDRESS": "unixgram:/x",
    **{"SELECTOR_URL": "http://a:1", "HEADER": "x-id"},
    **{"MODEL_POLICY": "m=latency", "COLLECTOR": "http://a:1", "WEIGHT": "a=2"},
}


def samples(each: Field) -> Iterator[str]:
    if each.kind is bool:
        yield "true"
    elif get_origin(each.kind) is Literal:
        yield from map(str, get_args(each.kind))
    elif each.flag.each is not None:
        yield SAMPLES[each.metavar]
    elif each.kind in (int, float):
        yield str(each.default or max(1, int(max(each.flag.ge, 0))) if each.flag.le >= 1 else 0)
    else:
        yield "x"


@pytest.mark.parametrize("config", CONFIGS)
def test_every_flag_is_read_says_what_it_means_and_has_a_name_of_its_own(config: Any) -> None:
    found = list(fields_of(config))
    names = [each.flag.name for each in found]
    variables = [name for each in found for name in each.flag.env]
    assert len(names) == len(set(names))
    assert len(variables) == len(set(variables))
    for each in found:
        assert each.help, each.flag.name
        assert each.title, each.flag.name
        if "policy-config" not in each.flag.name:
            for text in samples(each):
                each.read(text)


@pytest.mark.parametrize("config", CONFIGS)
def test_the_short_help_is_one_screen(config: Any) -> None:
    parser = OneLineParser(prog="lean-selector", description="x" * 300)
    add_flags(parser, config, briefly=True)
    assert parser.format_help().count("\n") <= 50


class Careful(Group):
    """A careful group"""

    only: list[str] = flag([], "--only", "ONLY", filled=True)
    extra: int = flag(1, "--extra", "EXTRA", needs=("--only", "--other"))


class ToldCareful(Config):
    careful: Careful


def test_what_is_given_empty_is_refused_where_that_would_allow_everything(
    refused: Callable[..., str], tmp_path: Path
) -> None:
    file = tmp_path / "flags.toml"
    for text in ('only = ""', "only = []", 'only = [""]'):
        file.write_text(text)
        assert "only" in refused(FILE, str(file), of=ToldCareful)
    assert "--only" in refused("--only", "", of=ToldCareful)
    assert told(of=ToldCareful, ONLY="").careful.only == []  # an empty variable is an unset one
    assert told("--only", "a", of=ToldCareful).careful.only == ["a"]


def test_a_flag_that_needs_another_is_refused_without_it(
    refused: Callable[..., str], tmp_path: Path
) -> None:
    file = tmp_path / "flags.toml"
    file.write_text("extra = 2")
    for argv in (("--extra", "2"), (FILE, str(file))):
        line = refused(*argv, of=ToldCareful)
        assert "--extra" in line
        assert "--only" in line
    assert told("--extra", "2", "--only", "a", of=ToldCareful).careful.extra == 2
    assert told("--extra", "2", of=ToldCareful, ONLY="a").careful.extra == 2
    assert told(of=ToldCareful, EXTRA="2").careful.extra == 2

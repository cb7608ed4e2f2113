"""What the documents and the code refer to is there: laws, sections, pages, routes, figures."""

import configparser
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import lean_selector
from tests.documents.pages import OURS, PAGES, ROOT

PACKAGE = Path(lean_selector.__file__).parent  # an installed one stands elsewhere than its tests
TEXTS = {
    **PAGES,
    **{
        str(path.relative_to(part.parent)): path.read_text(encoding="utf-8")
        for part in (PACKAGE, *(ROOT / name for name in ("tests", "loadtest", "deploy", ".ci")))
        for path in sorted(part.rglob("*"))
        if path.suffix in {".py", ".md", ".yml", ".lua", ".sh", ""} and path.is_file()
    },
    "CHANGELOG.md": (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"),
    "setup.cfg": (ROOT / "setup.cfg").read_text(encoding="utf-8"),
    "tests/data/deviations.json": (ROOT / "tests/data/deviations.json").read_text(encoding="utf-8"),
}
SPEC = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs/spec").glob("*.md")}


# -- extras ---------------------------------------------------------------------------------------


def test_every_extra_that_is_named_can_be_asked_for() -> None:
    config = configparser.ConfigParser()
    config.read_string(TEXTS["setup.cfg"])
    named = {
        extra
        for text in TEXTS.values()
        for found in re.findall(r"lean-selector\[([a-z,]+)\]|extra `\[([a-z]+)\]`", text)
        for extra in "".join(found).split(",")
    }
    assert {"client", "gateway"} <= named <= set(config["options.extras_require"])


# -- laws -----------------------------------------------------------------------------------------


def decisions() -> list[int]:
    return [int(n) for n in re.findall(r"^### D(\d+) ", PAGES["docs/decisions.md"], re.M)]


def test_decisions_rise_and_no_number_is_used_twice() -> None:
    assert decisions() == sorted(set(decisions()))


def cited_decisions() -> Iterator[tuple[str, int]]:
    for name, text in TEXTS.items():
        for found in re.finditer(r"\bD([1-9]\d?)\b(?! ?=)", text):
            yield name, int(found[1])


def test_every_decision_that_is_cited_is_written_down() -> None:
    known = set(decisions())
    cited = list(cited_decisions())
    assert len(cited) > 100
    assert sorted({(name, n) for name, n in cited if n not in known}) == []


def sections(page: str) -> set[str]:
    """Numbers of a page's headings, and of the items of its numbered lists below them."""
    numbers, heading = set(), ""
    for line in SPEC[page].split("\n"):
        if found := re.match(r"#+ (?:Appendix )?([0-9A-Z](?:\.?\d+)*)[. ]", line):
            heading = found[1]
            numbers.add(heading)
        elif found := re.match(r"(\d+)\. ", line):
            numbers.add(f"{heading}.{found[1]}")
    return numbers


CITATION = re.compile(
    r"\b(selection|indexer|slot_tracker|selection_16)\.md`?,? (?:sections? )?"
    r"((?:\d+(?:\.\d+)*)(?:(?:, | and )\d+(?:\.\d+)*)*)"
)


def test_every_section_of_the_specification_that_is_cited_exists() -> None:
    missing, seen = [], 0
    for name, text in TEXTS.items():
        for page, numbers in CITATION.findall(text):
            for number in re.findall(r"\d+(?:\.\d+)*", numbers):
                seen += 1
                if number not in sections(f"{page}.md"):
                    missing.append((name, f"{page}.md", number))
    assert seen > 40
    assert missing == []


# -- pages ----------------------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", sorted({*PAGES, "CHANGELOG.md", "loadtest/README.md"}))
def test_links_lead_somewhere(page: str) -> None:
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", TEXTS[page]):
        if re.match(r"https?:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (ROOT / page).parent / path if path else ROOT / page
        if not there.exists() or (
            anchor and anchor not in anchors(there.read_text(encoding="utf-8"))
        ):
            dead.append(target)
    assert dead == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, waiting = set(), ["README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached or page not in PAGES:
            continue
        reached.add(page)
        for target in re.findall(r"\]\(([^)#\s]+\.md)", PAGES[page]):
            there = ((ROOT / page).parent / target).resolve()
            waiting.append(str(there.relative_to(ROOT)))
    assert reached == set(PAGES)


def test_the_readme_is_short() -> None:
    assert len(PAGES["README.md"].splitlines()) <= 250


@pytest.mark.parametrize("page", sorted(OURS))
def test_files_named_in_the_documents_exist(page: str) -> None:
    """`core/selection/cost.py` is one of the package, `loadtest/versus.py` one of the project."""
    named = set(re.findall(r"`((?:[a-z0-9_]+/)+[a-z0-9_]+\.(?:py|md|json|yml|lua))`", OURS[page]))
    homes = (ROOT, PACKAGE, PACKAGE.parent, ROOT / "docs")
    assert sorted(n for n in named if not any((home / n).exists() for home in homes)) == []


# -- tests ----------------------------------------------------------------------------------------

CITED_TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(test_\w+))?`")


def functions_of(path: str) -> set[str]:
    text = (ROOT / path).read_text(encoding="utf-8") if (ROOT / path).exists() else ""
    return set(re.findall(r"^(?:async )?def (test_\w+)", text, re.M))


@pytest.mark.parametrize("page", sorted(OURS))
def test_the_tests_that_the_documents_name_exist(page: str) -> None:
    named = [(path, test) for path, test in CITED_TEST.findall(OURS[page]) if test]
    assert [(path, test) for path, test in named if test not in functions_of(path)] == []


def test_every_claim_of_the_threat_model_names_its_test() -> None:
    page = OURS["docs/threat-model.md"]
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    claims = [
        row for row in rows if not row.startswith(("| who ", "| could ", "| secret ", "| a str"))
    ]
    assert len(claims) > 25
    # `the same` is that of the row above; nothing is promised of those who own the machine.
    bare = [row for row in claims if not CITED_TEST.search(row) and "| the same |" not in row]
    assert bare == [row for row in rows if row.startswith("| the machine's root")]


# -- paths -----------------------------------------------------------------------------------------


def test_no_document_names_a_path_of_a_machine() -> None:
    private = re.compile(r"(?<![\w.])/(?:home|root|work)/")
    assert [name for name, text in PAGES.items() if private.search(text)] == []


def test_the_drawings_are_there() -> None:
    assert Path(ROOT / "loadtest/figures.svg").is_file()

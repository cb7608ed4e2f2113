"""What the documents and the code refer to exists: extras, decisions, sections, files, tests."""

import re
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
    **{
        name: (ROOT / name).read_text(encoding="utf-8")
        for name in ("CHANGELOG.md", "setup.cfg", "tests/data/deviations.json")
    },
}


CITED_TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(test_\w+))?`")


def test_every_decision_that_is_cited_is_written_down_once() -> None:
    numbers = re.findall(r"^### D(\d+) ", PAGES["docs/decisions.md"], re.M)
    assert len(set(numbers)) == len(numbers)
    cited = [
        (name, number)
        for name, text in TEXTS.items()
        for number in re.findall(r"\bD([1-9]\d?)\b(?! ?=)", text)
    ]
    assert len(cited) > 100
    assert sorted({each for each in cited if each[1] not in numbers}) == []


def sections(page: str) -> set[str]:
    """Numbers of a page's headings, and of the items of its numbered lists below them."""
    numbers, heading = set(), ""
    for line in PAGES[f"docs/spec/{page}.md"].split("\n"):
        if found := re.match(r"#+ (?:Appendix )?([0-9A-Z](?:\.?\d+)*)[. ]", line):
            heading = found[1]
            numbers.add(heading)
        elif found := re.match(r"(\d+)\. ", line):
            numbers.add(f"{heading}.{found[1]}")
    return numbers


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    headings += re.findall(r'<a id="([^"]+)"></a>', text)
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


@pytest.mark.parametrize("page", sorted({*OURS, "CHANGELOG.md", "loadtest/README.md"}))
def test_markdown_wraps_at_100(page: str) -> None:
    """All but tables, blocks, and what has no blank to break at."""
    text = re.sub(r"^\s*```.*?^\s*```$", "", TEXTS[page], flags=re.M | re.S)
    text = re.sub(r"`[^`\n]+`", lambda code: code[0].replace(" ", "_"), text)
    lines = [line for line in text.split("\n") if not line.lstrip().startswith("|")]
    assert [line for line in lines if len(line) > 100 and " " in line.strip()[:100]] == []


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


@pytest.mark.parametrize("page", sorted(OURS))
def test_files_and_tests_named_in_a_document_exist(page: str) -> None:
    """`core/selection/cost.py` is one of the package, `loadtest/versus.py` one of the project."""
    named = set(re.findall(r"`((?:[a-z0-9_]+/)+[a-z0-9_]+\.(?:py|md|json|yml|lua))`", OURS[page]))
    homes = (ROOT, PACKAGE, PACKAGE.parent, ROOT / "docs")
    assert sorted(n for n in named if not any((home / n).exists() for home in homes)) == []
    for path, test in CITED_TEST.findall(OURS[page]):
        text = (ROOT / path).read_text(encoding="utf-8") if test else ""
        assert not test or re.search(rf"^(?:async )?def {test}\(", text, re.M), (path, test)

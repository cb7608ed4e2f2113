"""The page of prompts has every reason for which blocks are not known, and no other."""

import re

from lean_selector.gateway.prompt_shapes import Why
from tests.documents.pages import OURS

PAGE = OURS["docs/guide/prompts.md"]


def test_the_page_has_each_reason_and_no_other() -> None:
    table = PAGE.partition("| `x-lean-prompt` |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `([a-z]+)`", table, re.M) == [why.value for why in Why]

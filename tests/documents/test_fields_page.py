"""The page of fields is what its command writes of the description as it is."""

import json
import re

import pytest

from lean_selector.service.gate import Route
from lean_selector.service.openapi.document import service_document
from tests.documents import fields_page
from tests.documents.pages import OURS


def test_the_page_is_what_its_command_writes() -> None:
    assert OURS[fields_page.PAGE] == fields_page.page(), (
        "a field, its meaning or a route has changed: .venv/bin/python -m tests.documents"
        ".fields_page writes the page anew"
    )


def test_a_field_that_is_added_to_the_description_changes_the_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = fields_page.page()

    def more(service: str, routes: list[Route]) -> bytes:
        document = json.loads(service_document(service, routes))
        field = {"type": "integer", "minimum": 1, "description": "seconds"}
        document["components"]["schemas"]["Ok"]["properties"]["took_s"] = field
        return json.dumps(document).encode()

    monkeypatch.setattr(fields_page, "service_document", more)
    added = set(fields_page.page().splitlines()) - set(before.splitlines())
    assert added == {"- `took_s` (integer, at least 1): seconds"}


def test_no_schema_is_on_the_page_twice() -> None:
    headings = re.findall(r"^### (\w+)$", OURS[fields_page.PAGE], re.M)
    assert len(headings) > 60
    assert len(headings) == len(set(headings))

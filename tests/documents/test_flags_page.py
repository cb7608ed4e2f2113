"""The page of flags is what its command writes of the flags as they are."""

from lean_selector.server.flags import fields_of
from lean_selector.server.gateway_flags import GatewayConfig
from tests.documents import flags_page
from tests.documents.pages import OURS


def test_the_page_is_what_its_command_writes() -> None:
    assert OURS[flags_page.PAGE] == flags_page.page(), (
        "a flag has changed: .venv/bin/python -m tests.documents.flags_page writes the page anew"
    )


def test_every_flag_is_on_the_page_with_its_meaning() -> None:
    page = flags_page.page()
    for each in fields_of(GatewayConfig):
        assert each.help, each.flag.name
        assert f"| `{each.flag.name}` |" in page or not each.flag.name.startswith("--")


def test_every_group_that_has_a_guide_is_a_group() -> None:
    assert set(flags_page._GUIDES) <= {each.title for each in fields_of(GatewayConfig)}

"""Who is reached by others, and what that is warned of."""

import pytest

from lean_selector.app.host import exposure_warnings, is_beyond_loopback


@pytest.mark.parametrize(
    ("host", "is_beyond"),
    [
        *(("0.0.0.0", True), ("::", True), ("[::]", True), ("", True), ("10.0.0.1", True)),
        *(("engine.example", True), ("127.0.0.1", False), ("127.8.8.8", False), ("::1", False)),
        *(("[::1]", False), ("localhost", False), ("LocalHost.", False)),
    ],
)
def test_only_loopback_is_reached_by_nobody_else(host: str, is_beyond: bool) -> None:
    assert is_beyond_loopback(host) is is_beyond


def test_a_warning_is_for_those_who_close_nothing() -> None:
    def warnings(
        host: str = "0.0.0.0", *, asks_who: bool = False, has_allowed: bool = False
    ) -> str:
        return "; ".join(exposure_warnings(host, asks_who=asks_who, has_allowed=has_allowed))

    assert "--auth-token-file or --allow-endpoint" in warnings()
    assert not warnings(asks_who=True)
    assert "every route: set --auth-token-file" in warnings(has_allowed=True)
    assert not warnings("127.0.0.1")

"""Arguments of Python callers: what counts as a number, and how the error names what does not."""

from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from lean_selector.core.numbers import number, optional, switch, whole


class Four:
    """As NumPy's integers are: no int, and good for one."""

    def __index__(self) -> int:
        return 4


class Several:
    """As NumPy's arrays are: they could be a number, and these are not."""

    def __index__(self) -> int:
        raise TypeError("only integer scalar arrays can be converted to a scalar index")

    def __float__(self) -> float:
        raise TypeError("only length-1 arrays can be converted to Python scalars")


def test_whatever_counts_as_a_number_is_taken_as_one() -> None:
    assert [whole("n", given) for given in (3, Four())] == [3, 4]
    taken = [number("x", given) for given in (3, 0.25, Fraction(1, 2))]
    assert (taken, list(map(type, taken))) == ([3.0, 0.25, 0.5], [float] * 3)
    assert [switch("on", given) for given in (True, False)] == [True, False]


@pytest.mark.parametrize(
    ("taken", "given", "said"),
    [
        (whole, True, "name: expected an int, got bool"),
        (whole, 1.0, "name: expected an int, got float"),
        (whole, "1", "name: expected an int, got str"),
        (whole, Several(), "name: expected an int, got Several"),
        (number, Several(), "name: expected a number, got Several"),
        (whole, None, "name: expected an int, got NoneType"),
        (number, False, "name: expected a number, got bool"),
        (number, "0.5", "name: expected a number, got str"),
        (number, None, "name: expected a number, got NoneType"),
        (switch, 1, "name: expected a bool, got int"),
        (switch, None, "name: expected a bool, got NoneType"),
    ],
)
def test_what_is_none_is_named_with_its_type(taken: Any, given: object, said: str) -> None:
    with pytest.raises(TypeError) as raised:
        taken("name", given)
    assert str(raised.value) == said


@pytest.mark.parametrize("given", [10**400, Decimal("snan")])
def test_a_number_that_no_float_can_stand_for_is_named(given: object) -> None:
    with pytest.raises(ValueError, match=r"^name: (int too large|cannot convert signaling NaN)"):
        number("name", given)


def test_what_is_optional_may_be_none_and_nothing_else_of_another_type() -> None:
    assert optional(whole, "name", None) is None
    assert optional(whole, "name", 0) == 0
    with pytest.raises(TypeError, match="name: expected an int, got str"):
        optional(whole, "name", "")

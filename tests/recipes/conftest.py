"""What tests of recipes share."""

import pytest

from tests.recipes.gateways import GATEWAYS


@pytest.fixture(params=GATEWAYS)
def gateway(request: pytest.FixtureRequest) -> str:
    name = request.param
    assert isinstance(name, str)
    return name

from collections.abc import Iterator

import pytest
from workers import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    started = Ranks()
    yield started
    started.stop()

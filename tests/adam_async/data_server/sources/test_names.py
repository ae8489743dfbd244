"""Names of sources."""

from adam_async.data_server.sources.datasets import PUBLISHED
from adam_async.data_server.sources.names import NAMES


def test_every_published_data_set_has_its_name() -> None:
    assert set(PUBLISHED) <= set(NAMES)

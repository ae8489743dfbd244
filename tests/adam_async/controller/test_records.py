"""Limits of a record of the cluster map."""

from typing import Any

import pytest

from adam_async.controller.records import check_node
from adam_async.run.cluster_map import NodeRecord


@pytest.mark.parametrize(
    ("role", "info", "said"),
    [
        ("worker", {"threads": "many"}, "threads"),
        ("worker", {"threads": 0}, "threads"),
        ("worker", {"in_flight": -1}, "in_flight"),
        ("data", {"train_images": 1 << 40}, "train_images"),
        ("data", {"shape": [1, 8]}, "shape"),
        ("data", {"classes": None}, "classes"),
        ("data", {"name": 7}, "name"),
    ],
)
def test_fields_that_other_roles_calculate_with_have_their_types(
    role: str, info: dict[str, Any], said: str
) -> None:
    record = NodeRecord(role=role, address="local://1", incarnation=1, info=info)
    assert said in check_node(record)


def test_other_roles_and_other_fields_may_say_anything() -> None:
    for role, info in (("ps", {"threads": "many"}), ("worker", {"n": "many"}), ("data", {})):
        assert check_node(NodeRecord(role=role, address="local://1", incarnation=1, info=info)) == ""

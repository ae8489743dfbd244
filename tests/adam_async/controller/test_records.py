"""Limits of a record of the cluster map."""

from typing import Any

import pytest

from adam_async.controller.records import check_node
from adam_async.run.cluster_map import NodeRecord


@pytest.mark.parametrize(
    ("role", "info", "said"),
    [
        ("ps", {"memory_bytes": "much"}, "memory_bytes"),
        ("ps", {"memory_bytes": -1}, "memory_bytes"),
        ("ps", {"memory_bytes": 1 << 60}, "memory_bytes"),
    ],
)
def test_the_memory_of_a_server_has_its_type(role: str, info: dict[str, Any], said: str) -> None:
    record = NodeRecord(role=role, address="local://1", incarnation=1, info=info)
    assert said in check_node(record)


def test_other_roles_and_other_fields_may_say_anything() -> None:
    for role, info in (("ps", {"threads": "many"}), ("worker", {"n": "many"}), ("data", {})):
        assert check_node(NodeRecord(role=role, address="local://1", incarnation=1, info=info)) == ""

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


@pytest.mark.parametrize(
    ("copies", "said"),
    [
        (7, "copies"),
        ("10.0.0.1:7070", "is not of the form"),
        ("tcp://10.0.0.1", "is not of the form"),
        (f"tcp://{'a' * 1024}:1", "is not of the form"),
    ],
)
def test_the_address_of_a_server_for_others_can_be_dialled(copies: Any, said: str) -> None:
    record = NodeRecord(role="ps", address="local://1", incarnation=1, info={"copies": copies})
    assert said in check_node(record)
    right = NodeRecord(role="ps", address="local://1", incarnation=1, info={"copies": "tcp://10.0.0.1:7070"})
    assert check_node(right) == ""


def test_other_roles_and_other_fields_may_say_anything() -> None:
    for role, info in (("ps", {"threads": "many"}), ("worker", {"n": "many"}), ("data", {})):
        assert check_node(NodeRecord(role=role, address="local://1", incarnation=1, info=info)) == ""

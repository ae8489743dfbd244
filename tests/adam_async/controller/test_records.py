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


@pytest.mark.parametrize("name", ["copies", "elsewhere"])
@pytest.mark.parametrize(
    ("address", "said"),
    [
        (7, "expected `str`"),
        ("10.0.0.1:7070", "is not of the form"),
        ("tcp://10.0.0.1", "is not of the form"),
        (f"tcp://{'a' * 1024}:1", "is not of the form"),
    ],
)
def test_a_second_address_of_a_server_can_be_dialled(name: str, address: Any, said: str) -> None:
    record = NodeRecord(role="ps", address="local://1", incarnation=1, info={name: address})
    assert said.lower() in check_node(record).lower()
    right = NodeRecord(role="ps", address="local://1", incarnation=1, info={name: "tcp://10.0.0.1:7070"})
    assert check_node(right) == ""


def test_other_roles_and_other_fields_may_say_anything() -> None:
    for role, info in (("ps", {"threads": "many"}), ("worker", {"n": "many"}), ("data", {})):
        assert check_node(NodeRecord(role=role, address="local://1", incarnation=1, info=info)) == ""


@pytest.mark.parametrize(
    "address",
    [
        *("tcp://a..b:1", f"tcp://{'a' * 64}:1", "tcp://a\0b:1", "tcp://0.0.0.0:1", ""),
        *("tcp://[::1:1", "tcp://u@h:1", "tcp:// h:1", "ftp://h:1", "tcp://h:0", "tcp://h:65536", "h:1"),
    ],
)
def test_an_address_that_no_role_could_dial_is_refused(address: str) -> None:
    for role in ("ps", "data", "worker"):
        assert check_node(NodeRecord(role=role, address=address, incarnation=1)).startswith("address: ")
    for role in ("driver", "client", "reader"):  # these have no listener
        assert check_node(NodeRecord(role=role, address=address, incarnation=1)) == ""
    if address:
        record = NodeRecord(role="ps", address="tcp://h:1", incarnation=1, info={"copies": address})
        assert check_node(record).startswith("copies: ")


def test_the_info_of_a_role_with_little_to_report_is_small() -> None:
    info = {"text": "x" * 1100, "train_images": 1}
    for role in ("worker", "client", "reader"):
        record = NodeRecord(role=role, address="tcp://h:1", incarnation=1, info=info)
        assert f"1024 are the most for a {role}" in check_node(record)
    for role in ("ps", "data", "driver"):
        assert check_node(NodeRecord(role=role, address="tcp://h:1", incarnation=1, info=info)) == ""


def test_a_role_sets_only_fields_of_its_own() -> None:
    for role in ("data", "worker", "driver", "client", "reader"):
        record = NodeRecord(role=role, address="tcp://h:1", incarnation=1, serves=("s/1",))
        assert check_node(record) == f"only a parameter server serves stores, and this node is a {role}"
    for role in ("client", "reader"):
        for field in ("ready", "failed"):
            record = NodeRecord(role=role, address="", incarnation=1, **{field: "run-1"})
            assert check_node(record) == f"ready and failed are of a run, in which a {role} has no part"

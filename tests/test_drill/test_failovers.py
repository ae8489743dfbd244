"""A failover is told from a handover, and from one that a fault explains."""

from adam_async.run.store_record import BundleRecord
from tests.drill.injection import FailoverCount

A, B, C = ("ps-0", 1), ("ps-1", 2), ("ps-2", 3)


def record(*in_sync: tuple[str, int], generation: int = 1, store: str = "s") -> dict[str, BundleRecord]:
    return {"ps-0": BundleRecord(store=store, generation=generation, in_sync=in_sync)}


def test_a_failover_during_a_fault_of_its_primary_is_caused() -> None:
    count = FailoverCount()
    count.observe(record(A, B, C))
    count.begin_fault("ps-0")
    count.observe(record(B, C, generation=2))

    assert (count.caused, count.false) == (1, [])


def test_a_failover_from_another_server_is_false() -> None:
    count = FailoverCount()
    count.observe(record(A, B, C))
    count.begin_fault("ps-1")
    count.observe(record(B, C, generation=2))

    assert count.caused == 0
    assert count.false == ["ps-0 from ps-0 to ps-1, generation 2"]


def test_a_failover_after_the_end_of_a_fault_is_false() -> None:
    count = FailoverCount()
    count.observe(record(A, B, C))
    count.begin_fault("ps-0")
    count.end_fault("ps-0")
    count.observe(record(B, C, generation=2))

    assert len(count.false) == 1


def test_the_loss_of_the_last_copy_is_a_failover_to_no_server() -> None:
    count = FailoverCount()
    count.observe(record(A))
    count.observe(record(generation=1))

    assert count.false == ["ps-0 from ps-0 to no server, generation 1"]


def test_a_handover_and_a_lost_secondary_are_no_failovers() -> None:
    count = FailoverCount()
    for bundles in (record(A, B, C), record(A, B), record(B, A, generation=2)):
        count.observe(bundles)

    assert (count.caused, count.false) == (0, [])


def test_another_store_under_the_same_name_begins_anew() -> None:
    count = FailoverCount()
    count.observe(record(A, B))
    count.observe(record(B, C, store="t"))

    assert (count.caused, count.false) == (0, [])

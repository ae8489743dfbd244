"""Entries of other servers on their way to the disk: only valid ones of the primary get there."""

from types import SimpleNamespace

import numpy as np
import pytest

from adam_async.messages.replication import Copy as CopyMessage
from adam_async.model.rules import Sgd
from adam_async.parameter_server.bundle_copy import BundleCopy
from adam_async.parameter_server.bundle_saver import BundleSaver
from adam_async.parameter_server.log_entries import entry_bytes
from adam_async.parameter_server.replication.local_copy import Bundle as BundleFacts
from adam_async.run.store_record import BundleRecord
from tests.adam_async.parameter_server.copies import PIECES, TABLE, Copy, RandomPrimary
from transport import RemoteProtocolError

ME, PRIMARY, OTHER = ("ps-0", 1), ("ps-1", 1), ("ps-2", 1)


class Shards:
    def __init__(self):
        self.bundle = Copy(Sgd()).bundle


class HeldDisk:
    async def append(self, key, parts, *, of_primary):
        raise AssertionError("no task runs here")


class Started(list):
    """The names of the tasks of a server, which do not run."""

    def __call__(self, name, work):
        work.close()
        self.append(name)


def copy_on_disk():
    """A secondary with durable entries, and the tasks that it started."""
    started = Started()
    host = SimpleNamespace(
        links=None,
        now=lambda: 0.0,
        call_soon=lambda work: None,
        spawn=started,
        set_record=None,
        next_member=lambda may_join: None,
        is_live=lambda member: True,
        notice=pytest.fail,
        observe=None,
    )
    saver = BundleSaver(
        "ps-0", PIECES, state_arrays=0, mark=lambda *_: None, disk=HeldDisk(), is_durable=True
    )
    record = BundleRecord(store="a-store", generation=3, in_sync=(PRIMARY, ME))
    facts = BundleFacts(store="a-store", home="ps-0", pieces=len(PIECES))
    copy = BundleCopy(
        ME, facts, record, copies=2, shards=Shards(), pieces=PIECES, table=TABLE, host=host, saver=saver
    )
    return copy, started


def entry_of(parts, **fields):
    return CopyMessage(
        **{
            "store": "a-store",
            "home": "ps-0",
            "generation": 3,
            "session": 1,
            "position": 1,
            "origin": 3,
            "nbytes": entry_bytes(parts),
            "committed": 0,
            "applied_by_all": 0,
            **fields,
        }
    )


def valid_parts():
    primary = RandomPrimary(Copy(Sgd()), 1)
    while not primary.log:
        primary.step()
    return primary.log[0]


def test_an_entry_of_the_primary_is_written():
    (copy, started), parts = copy_on_disk(), valid_parts()
    assert len(parts) == 1
    copy.received(PRIMARY, entry_of(parts), parts[0])
    assert started == ["appends-1"]


def test_an_invalid_entry_is_not_written():
    copy, started = copy_on_disk()
    parts = [[np.frombuffer(b"nothing", np.uint8)]]
    with pytest.raises(RemoteProtocolError, match="its details"):
        copy.received(PRIMARY, entry_of(parts), parts[0])
    assert started == []


@pytest.mark.parametrize(("sender", "generation"), [(OTHER, 3), (ME, 3), (PRIMARY, 4), (OTHER, 1 << 40)])
def test_an_entry_of_another_member_or_generation_is_not_written(sender, generation):
    (copy, started), parts = copy_on_disk(), valid_parts()
    with pytest.raises(RemoteProtocolError, match=r"not the primary|the record is"):
        copy.received(sender, entry_of(parts, generation=generation, origin=generation), parts[0])
    assert started == []

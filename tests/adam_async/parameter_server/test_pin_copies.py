"""A pin keeps the shards at its place of the log, while later entries change them."""

import numpy as np
import pytest

from adam_async.model.rules import Sgd
from adam_async.parameter_server import clock_snapshot, pin_copies
from adam_async.parameter_server.bundle import MOST_KNOWN_PINS
from adam_async.parameter_server.events import KeepPin, Pin, QueuedPin
from adam_async.parameter_server.log_entries import decode_entry, encode_entry
from adam_async.parameter_server.shard_transfer import state_of
from tests.adam_async.parameter_server.copies import HERE, PIECES, TABLE, Copy, RandomPrimary
from tests.adam_async.parameter_server.test_bundle import MODES
from transport import RemoteProtocolError

STEPS = 60
BY_NUMBER = {number: specs for number, specs in enumerate(PIECES) if specs}


def states_in(bundle):
    """Everything of the shards that a pin keeps."""
    found = {}
    for number, shard in bundle.shards.items():
        clock = shard.applied_clock() if shard.pending is not None else None
        arrays = {name: array.tobytes() for name, array in shard.rule_state.items()}
        found[number] = state_of(shard, clock=clock), shard.values.tobytes(), arrays
    return found


def taken(copies, *, pieces=None):
    """All shards of a pin, as the disk takes them."""
    left, found = dict(pieces or BY_NUMBER), {}
    while left:
        for shard in copies.take(left.pop(copies.next_of(left))):
            arrays = {name: array.tobytes() for name, array in shard.rule_state.items()}
            found[shard.spec.id] = state_of(shard), shard.values.tobytes(), arrays
    return found


def pin_of(number, **options):
    return QueuedPin("pin", Pin("a-name", number, **options))


def copy_of(mode):
    copy = Copy(Sgd(momentum=0.9), **MODES[mode])
    copy.bundle.keeps_pins = True
    return copy


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("mode", MODES)
def test_all_members_keep_the_state_after_the_entries_before_the_pin(mode, seed):
    """The primary has entries in flight, the model applies one at a time, a third member none at a pin."""
    primary, model, member = RandomPrimary(copy_of(mode), seed), copy_of(mode), copy_of(mode)
    model.bundle.keeps_pins = False
    primary.live()
    for _ in range(STEPS):
        primary.step()
    primary.note(primary.copy.state.handle(pin_of(7)))
    for _ in range(STEPS):
        primary.step()
    primary.settle()
    expected = None
    for parts in primary.log:
        if isinstance(decode_entry(parts, model.bundle, TABLE), QueuedPin):
            expected = states_in(model.bundle)
        model.take(parts)
        member.take(parts)
    assert expected is not None
    assert expected != states_in(model.bundle), "entries after the pin have changed shards"
    for each in (primary.copy, member):
        assert taken(each.bundle.pinning) == expected
        assert each.bundle.pinning.copied_bytes == 0
    assert model.digest() == member.digest() == primary.copy.digest()


def test_in_bsp_a_pin_waits_for_the_sums_before_it_and_entries_wait_behind_it():
    primary = RandomPrimary(copy_of("bsp"), 3)
    primary.live()
    bundle = primary.copy.bundle
    while not bundle.ready:
        primary.push()
        primary.commit()
    clocks = {number: dict(shard.clocks) for number, shard in bundle.shards.items()}
    bundle.commit(pin_of(7))
    assert bundle.pinning is None
    primary.tick()
    while primary.proposed:
        primary.commit()
    assert any(isinstance(entry, QueuedPin) for entry in bundle.unfinished())
    assert not bundle.idle
    assert {number: dict(shard.clocks) for number, shard in bundle.shards.items()} == clocks
    while not bundle.idle:
        primary.work()
    assert bundle.pinning is not None


def some(copy, seed=1):
    """A primary with one replica that pushes to all shards."""
    primary = RandomPrimary(copy, seed)
    primary.live()
    primary.settle()
    return primary


def test_work_waits_while_the_copies_have_no_room(monkeypatch):
    sizes = [sum([clock_snapshot.bytes_of(shard)]) for shard in copy_of("asp").bundle.shards.values()]
    monkeypatch.setattr(clock_snapshot, "COPIES_BYTES", max(sizes))
    monkeypatch.setattr(pin_copies, "COPIES_BYTES", max(sizes))
    primary = some(copy_of("asp"))
    bundle = primary.copy.bundle
    primary.note(primary.copy.state.handle(pin_of(7)))
    primary.settle()
    while bundle.has_work or not bundle.ready:
        primary.push()
        primary.commit()
        primary.work()
    before, copies = bundle.entries_applied, bundle.pinning
    assert copies.copied_bytes > 0
    primary.work()
    assert bundle.entries_applied == before, "it waits for the disk"
    taken(copies)
    assert bundle.has_work
    primary.settle()
    assert bundle.entries_applied > before


def test_a_repeated_pin_has_no_effect_and_one_that_was_given_up_does_not_come_back():
    copy = copy_of("asp")
    assert isinstance(copy.state.committed(pin_of(7))[-1], KeepPin)
    first = copy.bundle.pinning
    copy.state.committed(pin_of(7))
    assert copy.bundle.pinning is first
    copy.bundle.pinning = None
    copy.state.committed(pin_of(7))
    assert copy.bundle.pinning is None
    copy.state.committed(pin_of(7, removes=True))
    copy.state.committed(pin_of(7))
    assert copy.bundle.pinning is None
    assert copy.bundle.pins == {7: True}
    for number in range(100, 100 + MOST_KNOWN_PINS):
        copy.state.committed(pin_of(number, removes=True))
    assert len(copy.bundle.pins) == MOST_KNOWN_PINS
    assert 7 not in copy.bundle.pins


def test_the_removal_of_a_pin_ends_its_copies():
    copy = copy_of("asp")
    copy.state.committed(pin_of(7))
    copies = copy.bundle.pinning
    copy.state.committed(pin_of(7, removes=True))
    assert copies.is_given_up
    assert copies.take(HERE) == []


def test_a_member_with_shards_of_another_position_keeps_no_pin():
    copy = copy_of("asp")
    copy.bundle.absent = frozenset({HERE[0].id})
    copy.state.committed(pin_of(7))
    assert copy.bundle.pinning is None
    assert copy.bundle.pins == {7: False}


@pytest.mark.parametrize(
    "pin",
    [
        Pin("a/../b", 7),
        Pin("", 7),
        Pin("x" * 65, 7),
        Pin("a\n", 7),
        Pin("a-name", 1 << 60),
        Pin("a-name", -1),
    ],
)
def test_a_pin_out_of_bounds_in_an_entry_is_refused(pin):
    with pytest.raises(RemoteProtocolError, match="details"):
        decode_entry(encode_entry(QueuedPin(None, pin)), copy_of("asp").bundle, TABLE)


def test_a_pin_in_an_entry_is_read():
    pin = Pin("Best-1.0_x", 7, removes=True)
    parts = encode_entry(QueuedPin(None, pin))
    assert decode_entry(parts, copy_of("asp").bundle, TABLE).pin == pin
    assert all(isinstance(tensor, np.ndarray) for part in parts for tensor in part)

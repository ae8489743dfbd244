"""Every number, text and tuple of every message has bounds, which refuse NaN and infinities too."""

import math
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from adam_async.messages import (
    TABLE,
    Finished,
    Lease,
    LeaseGroups,
    Leases,
    Pull,
    ReadFile,
    ReportGroups,
    ReportSteps,
    StepReport,
    WatchMap,
    body,
    pack,
    unpack,
)
from transport import RemoteProtocolError


def unbounded(type_, path):
    """Paths of all fields without a bound."""
    match type_:
        case inspect.Metadata():
            return [] if (type_.extra or {}).get("diverges") else unbounded(type_.type, path)
        case inspect.IntType() | inspect.FloatType():
            return [] if type_.ge is not None and type_.le is not None else [path]
        case inspect.StrType() | inspect.BytesType():
            return [] if type_.max_length is not None else [path]
        case inspect.VarTupleType() | inspect.ListType():
            own = [] if type_.max_length is not None else [path]
            return own + unbounded(type_.item_type, f"{path}[]")
        case inspect.DictType():
            own = [] if type_.max_length is not None else [path]
            return own + unbounded(type_.key_type, f"{path} key") + unbounded(type_.value_type, f"{path}[]")
        case inspect.TupleType():
            return [p for n, each in enumerate(type_.item_types) for p in unbounded(each, f"{path}[{n}]")]
        case inspect.StructType():
            return [p for each in type_.fields for p in unbounded(each.type, f"{path}.{each.name}")]
        case inspect.UnionType():
            return [p for each in type_.types for p in unbounded(each, path)]
        case inspect.BoolType() | inspect.NoneType():
            return []
    return [path]


@pytest.mark.parametrize("kind", sorted(TABLE, key=lambda each: each.__name__))
def test_every_field_of_a_message_is_bounded(kind):
    assert unbounded(inspect.type_info(kind), kind.__name__) == []


@pytest.mark.parametrize("bare", [int, float, str, bytes, tuple[bool, ...], dict[str, int], Any])
def test_a_field_without_bounds_is_found(bare):
    kind = msgspec.defstruct("New", [("field", bare)])
    assert "New.field" in unbounded(inspect.type_info(kind), "New")


NOT_FINITE = [math.nan, math.inf, -math.inf]

LEASE = LeaseGroups(
    run="r", replica=0, replica_generation=1, partition=0, epoch=0, position=0, count=1, wait_s=0.0
)


@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize(
    "body",
    [
        WatchMap(after=0, group="", wait_s=0.0),
        Pull(store="r", generation=1, shards=(0,)),
        ReadFile(digest="", file=0, offset=0),
        LEASE,
    ],
    ids=lambda body: type(body).__name__,
)
def test_a_wait_that_is_not_finite_is_refused(body, value):
    wrong = msgspec.structs.replace(body, wait_s=value)
    with pytest.raises(RemoteProtocolError, match=rf"malformed {type(body).__name__}: .*\$\.wait_s"):
        unpack(pack(wrong), type(body))


NUMBERS = ("Seconds", "Rate", "Progress", "Finite")


@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize("name", NUMBERS)
def test_every_type_of_a_number_with_a_fraction_refuses_what_is_not_finite(name, value):
    kind = getattr(body, name)
    with pytest.raises(msgspec.ValidationError, match=r"Expected `float` [<>]="):
        msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=kind)


def test_only_a_loss_may_be_not_finite():
    floats = {
        name
        for name, kind in vars(body).items()
        if getattr(kind, "__origin__", None) is float and name != "Loss"
    }
    assert floats == set(NUMBERS)


@pytest.mark.parametrize("value", NOT_FINITE)
def test_a_number_within_a_record_is_refused_with_its_path(value):
    answer = Leases(leases=(Lease(1, 0, 1, 16, 0.5), Lease(1, 1, 1, 16, value)))
    with pytest.raises(RemoteProtocolError, match=r"malformed Leases: .*leases\[(1|\.\.\.)\]"):
        unpack(pack(answer), Leases)


@pytest.mark.parametrize("value", NOT_FINITE)
def test_a_diverged_loss_is_accepted(value):
    report = ReportGroups(
        run="r", replica=0, replica_generation=1, partition=0, finished=(Finished(1, 0, 1, 16, value, 3),)
    )
    (found,) = unpack(pack(report), ReportGroups).finished
    assert repr(found.loss) == repr(value)


def test_an_invalid_count_is_refused():
    record = ReportSteps(
        store="r",
        session=1,
        incarnation=1,
        replica=0,
        generation=1,
        shards=(0,),
        number=1,
        steps=(StepReport(1, 16, 1 << 40),),
    )
    with pytest.raises(RemoteProtocolError, match=r"malformed ReportSteps: .*steps"):
        unpack(pack(record), ReportSteps)

"""Pure: the bad messages of hostile peers, and those among them that no receiver may accept."""

from dataclasses import replace

import msgspec

from adam_async.messages import CompareAndSet
from adam_async.simulation.scenarios.bad_fields import BadMessage
from adam_async.simulation.scenarios.valid_messages import fields_of
from transport import Message

DIVERGED = ("nan", "inf", "-inf", "2**63")
"""Names of bad values that the loss of a diverged model may have."""

NEVER_RIGHT = (
    "nan",
    "inf",
    "-inf",
    "2**63",
    "below",
    "above",
    "missing",
    "type-text",
    "type-number",
    "repeated",
    "torn",
    "noise",
    "deep",
    "large",
    "unknown-tag",
    "wrong-run",
)
"""Names of bad values that no receiver may accept."""

CLOCKED = ("Push", "Tick", "ReportSteps", "Pull")
"""Types of questions whose clocks a server compares with the possible clocks of a replica."""

GIVEN = tuple(f"tensor.{name}" for name in ("before", "replica", "partition", "placed", "changed"))
"""Fields of a node's record that the controllers set themselves."""


def numbered(bad: BadMessage, number: int) -> BadMessage:
    """Give a numbered question the next number of its session, unless the number is the bad field."""
    if bad.message.type != CompareAndSet.__name__ or bad.field == "number":
        return bad
    message = bad.message
    meta = msgspec.msgpack.encode({**fields_of(message), "number": number})
    return replace(bad, message=Message(type=message.type, meta=meta, tensors=message.tensors))


def is_poison(bad: BadMessage) -> bool:
    """Return whether a permitted message harms the model: a worker may push large gradients."""
    return bad.message.type == "Push" and bad.value == "largest"


def must_be_refused(bad: BadMessage, *, member: bool) -> bool:
    """Return whether a receiver must not let a question wait, because the awaited event can never come.

    Args:
        member: Whether the cluster map names the sender.
    """
    if bad.message.type == "CopyLedger":
        return not member
    return bad.field == "epoch" and bad.value == "far" and bad.message.type in ("Push", "Tick")


def is_never_right(bad: BadMessage) -> bool:
    """Return whether no receiver may accept a message."""
    if bad.message.type == "GetStatistics" and bad.value == "wrong-run":
        return False  # a role answers a driver of any run, which may be the next one
    if bad.name == "CompareAndSet(node).tensor.store=wrong-run":
        return False  # a client names the store that it opens, whose record may be gone
    if bad.field.endswith("loss") and bad.value in DIVERGED:
        return False  # a diverging run reports such losses
    if bad.field == "tensor.role" and bad.value == "anothers":
        return True
    if bad.field in GIVEN:
        return False
    if bad.value == "2**40" and bad.field.endswith("clock"):
        return bad.message.type in CLOCKED
    if bad.value == "repeated":
        return not {"shards", "states"}.isdisjoint(fields_of(bad.message))
    if bad.field == "tensors" and bad.value in DIVERGED:
        return False  # a server answers such a push, refuses its values and counts it
    return bad.value in NEVER_RIGHT

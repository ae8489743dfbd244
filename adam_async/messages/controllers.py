"""Pure: controller and controller: who they are, and what their consensus cores say."""

from adam_async.messages.body import Body, Rows
from adam_async.messages.bounds import (
    Name,
    Names,
    Packed,
)


class Introduce(Body, frozen=True, kw_only=True):
    """Say to another controller who we are, and ask the same; see `controller.founding`."""

    identity: Name
    """Its name, and the number of its disk."""


class Introduced(Body, frozen=True, kw_only=True):
    """Who that is."""

    identity: Name
    members: Names
    """The identities in its group, as far as it knows; empty if it belongs to none."""


class Agree(Body, frozen=True, kw_only=True):
    """Something that a controller's consensus core says to another's; it may be lost.

    Tensor: the message (`consensus.Message`) as MessagePack, where it is too large for `said`.
    """

    group: Name
    """Of the sender; empty where it knows of none. What one group agrees on means nothing in another."""
    said: Packed = b""
    """The same, if it is small."""


ROWS: Rows = {
    Introduce: frozenset({("controller", "controller")}),
    Introduced: frozenset({("controller", "controller")}),
    Agree: frozenset({("controller", "controller")}),
}

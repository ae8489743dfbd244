"""Pure: bootstrap of a group: controllers with empty disks begin a group, or join an existing one.

Theory of operation
-------------------
Each controller gets the names of all. Each controller draws an identity (its name, and a number of its disk)
and makes it durable before it sends it. The first controller by name decides. The deciding controller asks
all others for their identities. Once each has answered that it belongs to no group, it begins the group with
all these identities. Only this controller decides the first members, and its decision is durable, so all
controllers get the same group. The other controllers begin without a state. The leader sends the state to
first voters and to controllers that it adds later. A first voter may count as a voter before it has the
state: only a node with the member list asks for votes, and at first only the deciding controller has this
list.

A deciding controller that lost its disk asks the others again. If the group has committed its first entry, a
majority has the state, and another controller answers that it belongs to the group. The deciding controller
then joins that group with its new identity, like any other controller.
"""

from collections.abc import Iterable
from hashlib import blake2b


class Bootstrap:
    """Progress of one controller without a state toward the membership in a group.

    Args:
        name: Name of the controller, one of `names`.
        names: Names of all the group's controllers.

    Attributes:
        voters: First voters of the group; empty if undecided, or if another controller decides.
        joins: Whether the controller waits for a leader.
    """

    def __init__(self, me: str, *, name: str, names: Iterable[str]) -> None:
        self._me = me
        self._others = set(names) - {name}
        self._known: dict[str, str] = {}
        self.joins = name != min((name, *self._others))
        self.voters: tuple[str, ...] = ()
        self._decide()

    @property
    def is_decided(self) -> bool:
        """Whether the controller needs no further identities."""
        return bool(self.voters) or self.joins

    def introduced(self, name: str, identity: str, *, belongs: bool) -> None:
        """Record another controller's identity, and whether it belongs to a group."""
        if self.is_decided or name not in self._others:
            return
        self.joins = belongs
        self._known[name] = identity
        self._decide()

    def _decide(self) -> None:
        if not self.joins and set(self._known) == self._others:
            self.voters = tuple(sorted((self._me, *self._known.values())))

    @property
    def missing(self) -> list[str]:
        """Names of the controllers without a known identity."""
        return sorted(self._others - set(self._known))


def group_name(voters: Iterable[str]) -> str:
    """Return the name of the group with these first voters."""
    return blake2b(" ".join(sorted(voters)).encode(), digest_size=8).hexdigest()


def name_of(identity: str) -> str:
    """Return the name in an identity; see `consensus.membership.identity`."""
    return identity.rpartition("/")[0]

"""Pure: how controllers that have nothing on their disks become a group, or part of one that there is.

Theory of operation
-------------------
All are told the same names. Each draws an identity (its name, and a number that names its disk) and writes it
down before it says it to anybody. The *founder* is the first by name. It asks all others who they are, and
founds the group with their identities once all of them have said that they belong to none; as one node alone
decides it, and writes it down, there is one answer. The others begin with nothing: whoever leads sends them
the state, whether they are among its voters or have yet to be taken in. That they count as voters before they
have it does no harm: only who knows the members asks for votes, and the first of them is the founder.

A founder that lost its disk asks again. As soon as anything was committed, a majority had the state, and one
of the others says that it belongs to a group: then the founder joins it like anybody else, with its new
identity.
"""

from collections.abc import Iterable
from hashlib import blake2b


class Founding:
    """What one controller without a state knows on its way into a group.

    Args:
        me: Its identity.
        name: Its name, one of `names`.
        names: Of all controllers that are to found the group.

    Attributes:
        voters: With whom to found it; empty if that is not decided, or somebody else's to decide.
        joins: Whether to wait for a leader.
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
        """Whether there is nothing more to ask."""
        return bool(self.voters) or self.joins

    def heard(self, name: str, identity: str, *, belongs: bool) -> None:
        """Another one said who it is, and whether it belongs to a group."""
        if self.is_decided or name not in self._others:
            return
        self.joins = belongs
        self._known[name] = identity
        self._decide()

    def _decide(self) -> None:
        if not self.joins and set(self._known) == self._others:
            self.voters = tuple(sorted((self._me, *self._known.values())))

    @property
    def lacking(self) -> list[str]:
        """Who has not been heard."""
        return sorted(self._others - set(self._known))


def group_name(voters: Iterable[str]) -> str:
    """Name the group that these founded."""
    return blake2b(" ".join(sorted(voters)).encode(), digest_size=8).hexdigest()


def name_of(identity: str) -> str:
    """The name in an identity; see `consensus.membership.identity`."""
    return identity.rpartition("/")[0]

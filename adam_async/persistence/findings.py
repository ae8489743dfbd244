"""Pure: the result of reading a folder of segment files: states, entries, damage and losses."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from adam_async.errors import listed
from adam_async.persistence.keys import EntryKey, StateKey, StateName
from adam_async.persistence.records import ENTRIES

MOST_SHOWN = 5
"""Maximum number of lost states that a text names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TornTail:
    """The end of a segment file that was never confirmed to be on disk, and was cut off."""

    segment: str
    """Name of the file."""
    position: int
    """Size of the file now, in bytes."""
    nbytes: int
    """Number of bytes cut off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A segment file that has lost bytes that were on disk. The file has another name now."""

    segment: str
    """Name of the file before the opening."""
    quarantined_as: str
    """Name of the file now; empty if the whole file is missing."""
    position: int
    """Position of the first damaged byte."""

    @property
    def has_entries(self) -> bool:
        """Whether the file has log entries, not states."""
        return self.segment.startswith(ENTRIES)

    def __str__(self) -> str:
        if not self.quarantined_as:
            return f"{self.segment} is missing"
        return f"{self.segment} is damaged at byte {self.position}, and is {self.quarantined_as} now"


@dataclass(frozen=True, slots=True, kw_only=True)
class LostState:
    """A state that was confirmed to be on disk and is not there any more, or that damage may hide."""

    name: StateName
    order: tuple[int, int]
    """Generation and position of the state that was on disk; if damage may hide the state, the greatest ones
    that it can have had."""
    found: StateKey | None
    """Key of the newest state that is still on disk, which is older; None if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """Contents of a folder.

    Attributes:
        states: Key of the newest whole state of each name.
        entries: Keys of the log entries of each bundle that no round of states has covered, by position. Of
            one position the newest generation's last entry counts, and an entry of a newer generation ends
            older ones at and after its position, as in the log of a member.
        floors: Position up to which every state has all entries, by home; a state in `lost` may lack some.
            Entries up to this position may be absent.
        as_of: Wall-clock time of the last complete round of states, in seconds since 1970; updates up to this
            time are in `states`. None if there is no such round.
        torn: Tails that were cut off, which is normal after a crash in the middle of a write.
        damages: Damage found. After any damage, each state may be older than the one that was on disk, and
            entries may be missing.
        lost: States that the damage has or may have cost; another server's copy has to fill in.
    """

    states: Mapping[StateName, StateKey] = field(default_factory=dict)
    entries: Mapping[str, tuple[EntryKey, ...]] = field(default_factory=dict)
    floors: Mapping[str, int] = field(default_factory=dict)
    as_of: float | None = None
    torn: tuple[TornTail, ...] = ()
    damages: tuple[Damage, ...] = ()
    lost: tuple[LostState, ...] = ()

    def damage_text(self) -> str:
        """Return a text on damage and losses, for the operator; empty without damage."""
        if not self.damages:
            return ""
        shown = [_state_text(each.name) for each in self.lost[:MOST_SHOWN]]
        if len(self.lost) > MOST_SHOWN:
            shown.append(f"{len(self.lost) - MOST_SHOWN} more")
        losses = f"the newest state of {listed(shown)} is lost" if shown else "no state is lost"
        entries = ", and log entries may be missing" if any(each.has_entries for each in self.damages) else ""
        return f"{'; '.join(map(str, self.damages))}; {losses}{entries}; other copies have to fill in"


def _state_text(name: StateName) -> str:
    return f"piece {name.shard} of {name.home}"

"""Pure: the contents of a folder of segment files, from the scans of its files.

For each name the state with the greatest generation and position counts, whichever file has it: no file is
newer than another. The last `RoundRecord` has the facts of the folder: how far the files were on disk, the
positions up to which no entries are needed, and the homes that the owner forgot.

A file is *damaged* if whole frames in it, or the newest round, prove that bytes after its last good frame
were on disk. Otherwise these bytes were in flight at a crash: the tail is *torn*, and has no confirmed
record. The whole frames behind the damage still count. The rounds list the states that they have confirmed,
so a reader can name the states that damage has cost.

Damage may also hide a state together with its round. Each round has the numbers of the previous two rounds,
so that a reader notices hidden rounds. Each round also lists the previous round's states again. If two rounds
in a row are hidden, and no later round lists a name, that name's state may be older than the newest floor
says. So a state below the floor counts as lost. A state also counts as lost if a readable round lists a newer
one. This holds even if the newest round was in flight, because that round's floor counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from adam_async.errors import listed
from adam_async.persistence.records import (
    ENTRIES,
    LEADING,
    EntryKey,
    EntryRecord,
    RoundRecord,
    StateKey,
    StateName,
    StateRecord,
    SyncedRecord,
)
from adam_async.persistence.scan import Found, Scan, SegmentName, segment_name

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
    """A state that was confirmed to be on disk and is no longer there, or that damage may hide."""

    name: StateName
    order: tuple[int, int]
    """Generation and position of the state that was on disk; if damage may hide the state, the greatest that
    it can have had."""
    found: StateKey | None
    """Key of the newest, older state that is still on disk; None if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """Contents of a folder.

    Attributes:
        states: Key of the newest whole state of each name.
        entries: Keys of each bundle's log entries that no round of states has covered, by position. At one
            position the newest generation's last entry counts; an entry of a newer generation ends older ones
            at and after its position, as in a member's log.
        floors: By home, position up to which every state has all entries; a state in `lost` may lack some.
            Entries up to this position may be absent.
        as_of: Wall-clock time of the last complete round of states, in seconds since 1970; updates up to then
            are in `states`. None if there is no such round.
        torn: Tails that were cut off, as is normal after a crash in the middle of a write.
        damages: Damage found. After any damage, each state may be older than the one that was on disk, and
            entries may be missing.
        lost: States that damage has cost or may have cost; another server's copy must fill in.
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
        cure = "; other copies have to fill in" if shown or entries else ""
        return f"{'; '.join(map(str, self.damages))}; {losses}{entries}{cure}"


def _state_text(name: StateName) -> str:
    return f"piece {name.shard} of {name.home}" if name.home != LEADING else f"record {name.shard}"


@dataclass(frozen=True, slots=True)
class Location:
    """Place of a record and its content in the folder."""

    segment: str
    position: int
    """First byte of the frame."""
    content: int
    """First byte of the content."""
    end: int
    """Position after the frame."""
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the frame, in bytes."""
        return self.end - self.position


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The contents of a folder.

    Attributes:
        states: For each name the newest whole state, as its key and its place.
        entries: Places of the needed entries, by their keys.
        files: Size of each undamaged file after its torn tail is cut off, in bytes.
        torn, damages, lost: See `Recovery`.
        floors, forgotten, as_of: Fields of the newest round.
        number: Greatest number of a record.
        next_files: Number of the next file, by kind.
    """

    states: Mapping[StateName, tuple[StateKey, Location]] = field(default_factory=dict)
    entries: Mapping[EntryKey, Location] = field(default_factory=dict)
    files: Mapping[str, int] = field(default_factory=dict)
    torn: tuple[TornTail, ...] = ()
    damages: tuple[Damage, ...] = ()
    lost: tuple[LostState, ...] = ()
    floors: Mapping[str, int] = field(default_factory=dict)
    forgotten: Mapping[str, int] = field(default_factory=dict)
    as_of: float | None = None
    number: int = 0
    next_files: Mapping[str, int] = field(default_factory=dict)

    def recovery(self) -> Recovery:
        """Return the contents as the owner sees them."""
        entries: dict[str, list[EntryKey]] = {}
        for key in self.entries:
            entries.setdefault(key.home, []).append(key)
        return Recovery(
            states={name: key for name, (key, _) in self.states.items()},
            entries={home: tuple(keys) for home, keys in entries.items()},
            floors=self.floors,
            as_of=self.as_of,
            torn=self.torn,
            damages=self.damages,
            lost=self.lost,
        )


def contents_of(scans: Sequence[Scan], names: Sequence[SegmentName]) -> Contents:
    """Return the contents of a folder.

    Args:
        scans: The files that are not in quarantine, for each kind in the order in which they were made.
        names: The names of all segment files, including those in quarantine.
    """
    newest = next(reversed(_rounds(scans)), None)
    on_disk = dict(newest.files) if newest is not None else {}
    damaged = [each for each in scans if _durable(each, on_disk) > each.end]
    whole = [each for each in scans if _durable(each, on_disk) <= each.end]
    missing = sorted(on_disk.keys() - {each.segment for each in scans})
    forgotten = dict(newest.forgotten) if newest is not None else {}
    floors = dict(newest.floors) if newest is not None else {}

    readable = [found for each in whole for found in each.records]
    readable += [found for each in damaged for found in (*each.records, *each.beyond)]
    states = _newest_states(readable, forgotten)
    expected = _expected(scans, on_disk, damaged, forgotten)
    if damaged or missing:
        listed, is_complete = _listed(scans, forgotten)
        for name, (key, _) in states.items():
            floor = 0 if is_complete else floors.get(name.home, 0)
            order = listed.get(name, (key.generation, floor))
            expected[name] = max(expected.get(name, (0, 0)), order)
    return Contents(
        states=states,
        entries=_needed_entries(readable, floors, forgotten),
        files={each.segment: each.end for each in whole if each.end},
        torn=tuple(
            TornTail(segment=each.segment, position=each.end, nbytes=each.nbytes - each.end)
            for each in whole
            if each.nbytes > each.end
        ),
        damages=(
            *[_damage(each) for each in damaged],
            *[Damage(segment=name, quarantined_as="", position=0) for name in missing],
        ),
        lost=tuple(
            LostState(name=name, order=order, found=found)
            for name, order in sorted(expected.items())
            if (found := states[name][0] if name in states else None) is None or found.order < order
        ),
        floors=floors,
        forgotten=forgotten,
        as_of=newest.as_of if newest is not None else None,
        number=max([_number(found) for found in readable], default=0),
        next_files=_next_files(names),
    )


def _number(found: Found) -> int:
    return 0 if isinstance(found.record, SyncedRecord) else found.record.number


def _readable(each: Scan) -> tuple[Found, ...]:
    """Return the records that count; beyond a bad frame, only if the file's own frames prove damage."""
    return (*each.records, *each.beyond) if each.durable > each.end else each.records


def _durable(each: Scan, on_disk: Mapping[str, int]) -> int:
    return max(each.durable, on_disk.get(each.segment, 0))


def _damage(each: Scan) -> Damage:
    name = segment_name(each.segment)
    assert name is not None
    return Damage(
        segment=each.segment, quarantined_as=str(name._replace(is_quarantined=True)), position=each.end
    )


def _location(found: Found, sizes: tuple[int, ...]) -> Location:
    return Location(found.segment, found.frame.position, found.content, found.frame.end, sizes)


def _newest_states(
    readable: Sequence[Found], forgotten: Mapping[str, int]
) -> dict[StateName, tuple[StateKey, Location]]:
    states: dict[StateName, tuple[StateKey, Location]] = {}
    for found in readable:
        record = found.record
        if not isinstance(record, StateRecord) or record.number <= forgotten.get(record.key.home, 0):
            continue
        known = states.get(record.key.name)
        # Files without damage come first: of two equal states theirs stays.
        if known is None or known[0].order < record.key.order:
            states[record.key.name] = record.key, _location(found, record.sizes)
    return states


def _needed_entries(
    readable: Sequence[Found], floors: Mapping[str, int], forgotten: Mapping[str, int]
) -> dict[EntryKey, Location]:
    """Return the entries above the floors, by home and position, one of each position.

    An entry of a newer generation ends the older ones at and after its position, as in a member's log.
    """
    known: dict[tuple[str, int], tuple[int, int, EntryKey, Location]] = {}
    for found in readable:
        record = found.record
        if not isinstance(record, EntryRecord) or record.number <= forgotten.get(record.key.home, 0):
            continue
        key = record.key
        if key.position <= floors.get(key.home, -1):
            continue
        place = key.home, key.position
        if place not in known or (key.generation, record.number) > known[place][:2]:
            known[place] = key.generation, record.number, key, _location(found, record.sizes)
    needed: dict[EntryKey, Location] = {}
    newest: dict[str, int] = {}
    for (home, _), (generation, _, key, location) in sorted(known.items(), key=lambda item: item[0]):
        if generation >= newest.get(home, generation):
            newest[home] = generation
            needed[key] = location
    return needed


def _expected(
    scans: Sequence[Scan], on_disk: Mapping[str, int], damaged: Sequence[Scan], forgotten: Mapping[str, int]
) -> dict[StateName, tuple[int, int]]:
    """Return generation and position of the states that rounds have confirmed."""
    rounds: list[RoundRecord] = []
    for each in scans:
        rounds += [found.record for found in each.records if isinstance(found.record, RoundRecord)]
        if each in damaged:
            rounds += [
                found.record
                for found in each.beyond
                if isinstance(found.record, RoundRecord) and found.frame.position < _durable(each, on_disk)
            ]
    expected: dict[StateName, tuple[int, int]] = {}
    for record in rounds:
        if record.is_directory:
            expected.clear()
        for key in record.states:
            if record.number > forgotten.get(key.home, 0):
                expected[key.name] = max(expected.get(key.name, (0, 0)), key.order)
    return expected


def _listed(
    scans: Sequence[Scan], forgotten: Mapping[str, int]
) -> tuple[dict[StateName, tuple[int, int]], bool]:
    """Return each name's newest listed state, from the newest round back to two hidden ones in a row.

    Returns also whether the walk has ended at a list of all states instead, or at the first round of all.
    """
    rounds = _rounds(scans)
    by_number = {record.number: record for record in rounds}
    newest_list = max([record.number for record in rounds if record.is_directory], default=0)
    listed: dict[StateName, tuple[int, int]] = {}
    record = rounds[-1] if rounds else None
    while record is not None:
        for key in record.states:
            if record.number > forgotten.get(key.home, 0):
                listed[key.name] = max(listed.get(key.name, (0, 0)), key.order)
        last_but_one, last = record.previous
        if record.is_directory or not (last_but_one or newest_list):
            return listed, True
        # A round lists the states of the last one, too, so one hidden round hides nothing.
        earlier = [newest_list] if newest_list > last_but_one else [last, last_but_one]
        known = [by_number[number] for number in earlier if number in by_number]
        record = next((each for each in known if each.is_directory or each.number < record.number), None)
    return listed, False


def _rounds(scans: Sequence[Scan]) -> list[RoundRecord]:
    """Return the readable rounds and lists of all states, by place."""
    return [
        found.record for each in scans for found in _readable(each) if isinstance(found.record, RoundRecord)
    ]


def _next_files(names: Sequence[SegmentName]) -> dict[str, int]:
    following: dict[str, int] = {}
    for name in names:
        following[name.kind] = max(following.get(name.kind, 1), name.number + 1)
    return following

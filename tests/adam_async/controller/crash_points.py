"""An account of the records that a controller wrote and promised, for every state of its disk."""

from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from adam_async.controller.consensus import Saved
from adam_async.controller.consensus.messages import Snapshot
from adam_async.controller.consensus.records import Ballot, Born, LogFileRecord
from adam_async.controller.log_file import LogFile


def follows(saved: Saved, records: tuple[LogFileRecord, ...]) -> Saved:
    """Return the state of a controller after these records, without the code that reads files."""
    for record in records:
        match record:
            case Born(me):
                saved = Saved(me=me)
            case Ballot(term, vote):
                saved = replace(saved, term=term, vote=vote)
            case Snapshot(index):
                later = tuple(entry for entry in saved.entries if entry.index > index)
                saved = replace(saved, snapshot=record, entries=later)
            case _:
                first = record.entries[0].index
                kept = tuple(entry for entry in saved.entries if entry.index < first)
                saved = replace(saved, entries=kept + record.entries)
    return saved


@dataclass(frozen=True)
class Noted:
    """How far an account had come."""

    promised: int
    written: int
    answered: int


@dataclass
class Account:
    """States written to a file, one after the other, and the last one that is promised."""

    states: list[Saved] = field(default_factory=lambda: [Saved(me="")])
    promised: int = 0
    answered: int = 0
    """Highest place of the log that was answered."""

    def note(self) -> "Noted":
        """Return how far it has come."""
        return Noted(self.promised, len(self.states) - 1, self.answered)

    def found(self, saved: Saved) -> None:
        """The process was killed, and this is what it had given to the disk: what would follow never will."""
        del self.states[self.states.index(saved, self.promised) + 1 :]


class Witnessed(LogFile):
    """A file that keeps account."""

    def __init__(self, account: Account, *arguments) -> None:
        super().__init__(*arguments)
        self._account = account

    @asynccontextmanager
    async def opened(self):
        async with super().opened() as saved:
            self._account.promised = len(self._account.states) - 1
            yield saved

    async def append(self, batches):
        account = self._account
        for records in batches:
            account.states.append(follows(account.states[-1], records))
        await super().append(batches)
        account.promised = len(account.states) - 1

    async def begin_anew(self, records):
        account = self._account
        account.states.append(follows(Saved(me=""), records))
        await super().begin_anew(records)
        account.promised = len(account.states) - 1

"""The replication core without one of its safeguards: the rows with a direct test, and those without one."""

from functools import partial

from tests.ablations.ablation import Ablation
from tests.ablations.copies import COPIES, CORE, PRIMARY, SECONDARY
from tests.adam_async.parameter_server.replication.scenarios import (
    a_joining_member_has_the_tail_of_earlier_primaries_before_it_is_added,
    another_entry_takes_the_place_of_an_uncommitted_one_and_of_all_behind_it,
)

_row = partial(Ablation, seed=0)

ABLATIONS = (
    *[ablation for ablation in COPIES if ablation.seed is not None],
    _row(
        "the entries after a replaced one go",
        CORE + "local_copy.py",
        "        self._drop_from(entry.position)\n        self._add(entry)\n",
        "        later = self.after(entry.position) if known is not None else []\n"
        "        self._drop_from(entry.position)\n"
        "        for each in (entry, *later):\n"
        "            self._add(each)\n",
        story=another_entry_takes_the_place_of_an_uncommitted_one_and_of_all_behind_it,
    ),
    _row(
        "a member's own tail does not count as the primary's",
        SECONDARY,
        "self._equal = max(self._equal, copy.log.committed)",
        "self._equal = copy.log.last",
        seed=51,
    ),
    _row(
        "only a member in sync takes over",
        SECONDARY,
        "if copy.me not in record.in_sync or copy.proposed is not None:",
        "if copy.proposed is not None:",
        seed=6,
    ),
    # A piece waits for the entries in it, so a correct member has the tail soon after its first piece.
    _row(
        "a joining member is added with the tail of earlier primaries",
        PRIMARY,
        "needed = max(self._copy.log.committed, self._tail)",
        "needed = self._copy.log.committed",
        story=a_joining_member_has_the_tail_of_earlier_primaries_before_it_is_added,
    ),
    _row(
        "a joining member applies no entry before the piece that lacks it",
        PRIMARY,
        "            committed = min(committed, peer.piece_at)\n",
        "            pass\n",
        seed=1,
    ),
    _row(
        "a piece is sent once the entries in it are held",
        PRIMARY,
        "if peer.unsent is None or peer.held < peer.unsent[0].position:",
        "if peer.unsent is None:",
        seed=2,
    ),
    _row(
        "applied entries stay until all have applied them",
        PRIMARY,
        "return max(applied, self._copy.log.start)",
        "return self._copy.log.applied",
    ),
    _row(
        "applied entries stay until joining members apply them",
        PRIMARY,
        "self._counted() | {member for member, peer in self._peers.items() if peer.session}",
        "self._counted()",
        seed=1,
    ),
    _row(
        "an answer of an earlier link is not counted",
        PRIMARY,
        "if peer is None or message.session != peer.session:",
        "if peer is None or not (peer.has_begun or message.session == peer.session):",
        seed=206,
    ),
    _row(
        "a record is proposed with its version",
        CORE + "local_copy.py",
        "ProposeRecord(self.proposed, self.record.changed)",
        "ProposeRecord(self.proposed, None)",
        seed=1,
    ),
    _row(
        "entries are not ordered during a handover",
        PRIMARY,
        "return self._serves and self._successor is None",
        "return self._serves",
        seed=33,
    ),
)

"""Pure: the record of a program in the cluster map, and its blob in pieces.

A *program* is work that a driver submits, such as a training run. Its *kind* names the rules that the
controllers apply to it. The *blob* has the work of the roles of the kind; the controllers pass it on
undecoded, so two releases that read it differently still agree on the map. The *terms* are the facts that the
rules read; the driver states them, and the rules check their bounds.

A blob too long for the record precedes it, in pieces with the keys ``run/0``, ``run/1`` and so on. The
controllers join them into the record that names their number.
"""

from collections.abc import Mapping
from typing import Any, Self

import msgspec

from adam_async.messages.bounds import MOST_VALUE_BYTES
from adam_async.run.bundle_record import Member

PROGRAM_PIECES = 24
"""Maximum number of pieces of a blob."""

PIECE_BYTES = 45 << 10
"""Maximum size of one piece, in bytes; its JSON text is a third larger, and fits into a value of the map."""

MOST_PROGRAM_ID = 160
"""Maximum length of a program's id, in bytes of UTF-8; its store has the same id."""

OVER = ("finished", "failed")
"""Final phases of a program."""


class ProgramRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One program. Its driver submits it, advances it, and ends it."""

    id: str
    driver: str
    """Node id of the driver. After its loss the program waits for another driver or fails, depending on the
    rules of its kind."""
    incarnation: int = 0
    """Incarnation of the driver; 0 in the logs of earlier releases."""
    kind: str = "training"
    """Kind of the program, which names its rules."""
    blob: bytes = b""
    """Work of the roles, as MessagePack; opaque to the controllers."""
    pieces: int = 0
    """Number of pieces with the blob, in a submission; 0 if the record has the blob."""
    terms: dict[str, Any] = {}
    """Facts that the rules of the kind read; their types are those of the kind."""
    phase: str = "preparing"
    """State of the program; each kind has its own phases, which include `OVER`."""
    epoch: int = 0
    """Round in progress, from 1; 0 while preparing."""
    reason: str = ""
    """Reason for the failure of the program."""
    lost: str = ""
    """Lost roles that caused the failure of the program, as text; empty if no lost role did."""
    result: dict[str, Any] = {}
    """Outcome of a finished program, set by its driver."""
    notes: dict[str, Any] = {}
    """Facts for a later driver that takes the program over, set by its driver; the rules do not read them."""
    changed: int = 0

    def without_fixed(self) -> Self:
        """Return the record without blob, terms and pieces, which do not change after the submission."""
        return msgspec.structs.replace(self, blob=b"", terms={}, pieces=0)

    def with_fixed_of(self, program: "ProgramRecord") -> Self:
        """Return the record with the `FIXED` fields of another record of the same program."""
        return msgspec.structs.replace(self, **{name: getattr(program, name) for name in FIXED})

    def has_fixed_of(self, program: "ProgramRecord") -> bool:
        """Return whether another record belongs to the same program, with the same `FIXED` fields."""
        pairs = ((getattr(self, name), getattr(program, name)) for name in FIXED)
        return self.id == program.id and all(here is there or here == there for here, there in pairs)

    @property
    def driven_by(self) -> Member:
        """Node id and incarnation of the driver."""
        return self.driver, self.incarnation

    @property
    def over(self) -> bool:
        """Whether the program has finished or failed."""
        return self.phase in OVER


FIXED = ("kind", "blob", "pieces", "terms")
"""Names of the `ProgramRecord` fields that never change; a later change of the record may omit them."""


class ProgramPiece(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of the blob of a program in submission."""

    run: str
    """Id of the program."""
    data: bytes
    changed: int = 0


def cut_blob(record: ProgramRecord) -> tuple[ProgramRecord, list[ProgramPiece]]:
    """Cut the blob of a record for its submission.

    Returns:
        The record to submit, and the pieces to set before it; none if the record keeps the blob.

    Raises:
        ValueError: The blob needs more than `PROGRAM_PIECES` pieces.
    """
    blob = record.blob
    if len(msgspec.json.encode(record)) <= MOST_VALUE_BYTES:
        return record, []
    if len(blob) > PROGRAM_PIECES * PIECE_BYTES:
        raise ValueError(f"its blob has {len(blob)} bytes, {PROGRAM_PIECES * PIECE_BYTES} are the most")
    pieces = [
        ProgramPiece(run=record.id, data=blob[start : start + PIECE_BYTES])
        for start in range(0, len(blob), PIECE_BYTES)
    ]
    return msgspec.structs.replace(record, blob=b"", pieces=len(pieces)), pieces


def joined_blob(record: ProgramRecord, pieces: Mapping[str, ProgramPiece]) -> ProgramRecord | str:
    """Return a submitted record with its blob from the pieces in the map, or the fault of the pieces."""
    if not 0 <= record.pieces <= PROGRAM_PIECES:
        return f"a program has up to {PROGRAM_PIECES} pieces, not {record.pieces}"
    if not record.pieces:
        return record
    found = [pieces.get(f"run/{number}") for number in range(record.pieces)]
    lacking = [number for number, piece in enumerate(found) if piece is None or piece.run != record.id]
    if lacking:
        return f"of program {record.id} piece {lacking[0]} of {record.pieces} is not there: submit it again"
    blob = b"".join(piece.data for piece in found if piece is not None)
    return msgspec.structs.replace(record, blob=blob, pieces=0)


def check_program(record: ProgramRecord) -> str:
    """Return the fault of the fields of a new program that all kinds have; empty if they have none."""
    length = len(record.id.encode(errors="surrogatepass"))
    if not record.id.isprintable() or not 1 <= length <= MOST_PROGRAM_ID:
        return f"id {record.id[:80]!r} is not 1 to {MOST_PROGRAM_ID} bytes of printable characters"
    return ""


def is_piece(key: str) -> bool:
    """Return whether a key of the map names a piece of a program."""
    kind, _, number = key.partition("/")
    return kind == "run" and number in _NUMBERS


_NUMBERS = frozenset(map(str, range(PROGRAM_PIECES)))


def program_prefix(driver: str, incarnation: int) -> str:
    """Return the text with which the ids of one driver's programs begin; no client may use it."""
    return f"{driver}-{incarnation:x}-"

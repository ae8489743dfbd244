"""Pure: the records of a store and its bundles in the cluster map: arrays, rules, consistency, servers.

A *store* is a set of named arrays on the parameter servers. A client or a driver creates the record: it sets
the pieces of the list of arrays, ``stores/<name>/0``, ``stores/<name>/1`` and so on, and then
``stores/<name>``. The controllers choose the servers (`buckets`), each server reports when all its shards
have values (`NodeRecord.serves`), and then the controllers open the store. The store of a run ends with the
run. Other stores outlive their clients, until a record with the phase ``deleted`` removes them.

The table of shards depends only on the record and its arrays, so every party computes the same table. No role
needs the model or the program of the arrays.

A *bundle* is the shards of one store that share one log, one primary and one set of copies. Its *home* is the
server that the controllers placed it on; the bundle keeps this name when its primary moves. Its record names
the servers with copies and the primary; the key is ``bundles/<store>/<home>``.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from adam_async.errors import ConfigError
from adam_async.model.rules import AnyRule
from adam_async.option_types import printable
from adam_async.run.config import MOST_COPIES, MOST_SLACK

Member = tuple[str, int]
"""A copy of a bundle: node and incarnation of its server."""

SPARE_MEMBERS = 1
"""Number of members that a bundle may have beyond the copies of its store, so that a successor joins before a
member leaves."""


class BundleRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One bundle. The controllers create it with its store and strike out lost members; members change it."""

    store: str
    """Id of the store."""
    generation: int = 1
    """Number that grows with each new primary; a member refuses messages of an older generation."""
    in_sync: tuple[Member, ...] = ()
    """Members that have every committed entry, the primary first; empty once all of them are lost."""
    joining: tuple[Member, ...] = ()
    """Invited members, which lack some entries or values."""
    lost: tuple[str, ...] = ()
    """Servers of members in sync that were lost since the bundle last had all copies, in the order of their
    loss. The controllers set it."""
    changed: int = 0

    @property
    def primary(self) -> Member | None:
        """Member that orders pushes and answers clients; None if no member is in sync."""
        return self.in_sync[0] if self.in_sync else None

    @property
    def members(self) -> tuple[Member, ...]:
        """All members; the members in sync come first."""
        return self.in_sync + self.joining


def bundle_key(store: str, home: str) -> str:
    """Return the key of a bundle in the cluster map, by the name of its store and its home."""
    return f"bundles/{store}/{home}"


STORE_PIECES = 64
"""Maximum number of pieces of a store's list of arrays."""

STORE_PIECE_BYTES = 45 << 10
"""Maximum size of one piece, in bytes of JSON text; its record in the map is a third larger."""

MOST_ARRAYS = 10_000
"""Maximum number of arrays of a store."""

MOST_CUTS = 100_000
"""Maximum number of cuts of all arrays of a store."""

MOST_DIMENSIONS = 32
"""Maximum number of dimensions of an array."""

MOST_VALUES = 1 << 40
"""Maximum number of values of an array."""

MOST_NAME = 1024
"""Maximum length of an array's name, in bytes of UTF-8."""

MOST_STORE_ID = 160
"""Maximum length of a store's id and of its creator's, in bytes of UTF-8, as in messages."""

MOST_RULES = 256
"""Maximum number of rules of a store."""

MOST_STORE_NAME = 128
"""Maximum length of a store's name, in bytes of UTF-8."""

DTYPES: Mapping[str, int] = {"float32": 4, "float64": 8}
"""Types of values, with the bytes of one value."""

MOST_CLIENTS = 1 << 20
"""Maximum number of clients for which the first step of a store waits."""

SHEETS = 2
"""Number of published sheets: a reader keeps values on one while a push writes the next ones on the other."""

NUM_BUCKETS = 64
"""Number of buckets of each store."""

MOST_VECTORS = 64
"""Maximum number of vectors of a store."""

PARAMETERS = "*"
"""Name of the values of all arrays that are pushed to, in commands on vectors."""

ShardBytes = Annotated[int, Meta(ge=8, le=1 << 40)]
Servers = Annotated[int, Meta(ge=0, le=NUM_BUCKETS)]
Copies = Annotated[int, Meta(ge=1, le=MOST_COPIES)]
MinInSync = Annotated[int, Meta(ge=0, le=MOST_COPIES)]
"""Bounds of a store's options."""

StorePhase = Literal["placing", "loading", "open", "failed", "deleted"]
"""State of a store.

`placing`: the store waits for enough live servers. `loading`: its servers wait for values of all shards.
`open`: it accepts pushes and pulls. `failed`: all copies of some shards were lost, or the servers lack memory
for the store. `deleted`: the controllers remove it.
"""


class ArrayRecord(msgspec.Struct, frozen=True, array_like=True):
    """One array of a store."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    rule: int = 0
    """Index of the array's rule in `StoreRecord.rules`."""
    split: bool = True
    """Whether the array may have several shards."""
    cuts: tuple[int, ...] = ()
    """Rows at which a shard must begin, in rising order: borders of the parts of a model."""
    frozen: bool = False
    """Whether training never changes the array, so that no push names its shards."""

    @property
    def size(self) -> int:
        """Number of values; a scalar has one."""
        return prod(self.shape)

    @property
    def row_size(self) -> int:
        """Number of values of one row; each index of the first axis has a row."""
        return prod(self.shape[1:])

    @property
    def item_bytes(self) -> int:
        """Number of bytes of one value."""
        return DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Number of bytes of all values."""
        return self.size * self.item_bytes


class VectorRecord(msgspec.Struct, frozen=True, array_like=True):
    """A vector of a store: values of the shapes and cuts of some arrays, on the servers of these arrays."""

    name: Annotated[str, Meta(max_length=64)]
    arrays: Annotated[tuple[Annotated[str, Meta(max_length=MOST_NAME)], ...], Meta(max_length=1024)] = ()
    """Names of the arrays; empty for all that are pushed to."""
    temporary: bool = False
    """Whether pins and saved files leave the vector out."""
    number: Annotated[int, Meta(ge=0, le=(1 << 32) - 1)] = 0
    """Number in messages, which no other vector of the store ever has; 0 until the controllers give one."""

    @property
    def key(self) -> str:
        """Name among the arrays of a shard's state."""
        return vector_key(self.number)

    def covers(self, array: str, *, frozen: bool) -> bool:
        """Return whether the vector has values for an array of the store."""
        return array in self.arrays if self.arrays else not frozen


_VECTOR = "vector "


def vector_key(number: int) -> str:
    """Return the name of a vector among the arrays of a shard's state; no array of a rule has a space."""
    return f"{_VECTOR}{number}"


def vector_number(key: str) -> int:
    """Return the number of a vector from its name among the arrays of a shard's state."""
    return int(key.removeprefix(_VECTOR))


def newest_vector(keys: Iterable[str]) -> int:
    """Return the highest number of a vector among arrays of a shard's state; 0 without vectors.

    A peer may choose the names: one with another end counts as the highest possible number.
    """
    ends = [key.removeprefix(_VECTOR) for key in keys if is_vector_key(key)]
    return max([int(end) if end.isdecimal() else 1 << 32 for end in ends], default=0)


def is_vector_key(name: str) -> bool:
    """Return whether an array of a shard's state is a vector."""
    return name.startswith(_VECTOR)


class StoreRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One store. The creator sets the first fields; the controllers set the fields from `phase` on."""

    id: Annotated[str, printable(1, MOST_STORE_ID)]
    """Id of this store; another store of the same name has another id."""
    creator: Annotated[str, printable(0, MOST_STORE_ID)] = ""
    """Node of the creator, which loads the first values."""
    rules: Annotated[tuple[AnyRule, ...], Meta(min_length=1, max_length=MOST_RULES)]
    """Rules; each client may have other default rates."""
    arrays: Annotated[int, Meta(ge=1, le=MOST_ARRAYS)]
    """Number of arrays."""
    nbytes: Annotated[int, Meta(ge=0, le=1 << 53)]
    """Bytes of all values."""
    state_arrays: Annotated[int, Meta(ge=0, le=8)]
    """Maximum number of state arrays per array of values, over the store's rules; for memory checks."""
    pieces: Annotated[int, Meta(ge=1, le=STORE_PIECES)]
    """Number of pieces of the list of arrays."""
    shard_bytes: ShardBytes
    servers: Servers = 0
    """Number of servers; 0 means all servers live at the placement."""
    copies: Copies = 1
    """Number of servers with each shard."""
    min_in_sync: MinInSync = 0
    """Number of copies that must have an entry before it is applied; 0: see `min_in_sync_in_force`."""
    slack: Annotated[int, Meta(ge=0, le=MOST_SLACK)] | None = None
    """Number of clocks by which a client may be ahead of the slowest: s in ssp, the lag (0 or 1) in bsp; None
    in asp."""
    summed_weight: Annotated[int, Meta(ge=0, le=(1 << 32) - 1)] = 0
    """Factor in bsp, in which the applied gradient is sum(contributions) * factor / sum(weights); 0 in other
    modes."""
    replicas: Annotated[int, Meta(ge=1, le=MOST_CLIENTS)] = 1
    """Number of clients for which the first step waits, in modes with clocks."""
    most_weight: Annotated[int, Meta(ge=1, le=(1 << 32) - 1)] = (1 << 32) - 1
    """Maximum weight of one push."""
    scale_by_staleness: bool = False
    """Whether servers divide a push's rate by 1 + its staleness."""
    in_place: bool = False
    """Whether workers on the host of the servers train in place on the memory of the shards."""
    kernels: Literal["auto", "numpy", "numba"] = "auto"
    """Kernels of the rules, as in `Config.kernels`."""
    record: bool = False
    """Whether servers keep a log of the order in which they apply pushes."""
    durable: bool = False
    """Whether a push is acknowledged only when it is on the disks of all members in sync."""
    program: str = ""
    """Id of the run whose workers are the clients of the store; the store ends with the run. Empty for a
    store that a client created."""
    first_epoch: Annotated[int, Meta(ge=0, le=(1 << 32) - 1)] = 0
    """Epoch of the checkpoint with the store's values; 0 for a new store."""
    first_clock: Annotated[int, Meta(ge=0, le=1 << 48)] = 0
    """Clock of the values of this checkpoint, in steps."""

    phase: StorePhase = "placing"
    buckets: tuple[str, ...] = ()
    """Home of each bucket; empty until the store is placed."""
    generation: int = 0
    """Version of `buckets`; grows with each placement in the cluster."""
    epoch: int = 0
    """In a store of clients with clocks, 1 once the store is open and has its `replicas`; until then 0, and
    pushes wait. In other stores 0."""
    reason: str = ""
    """Reason for the store's failure."""
    lost: str = ""
    """Lost servers that caused the failure of the store, separated by commas."""
    shards: int = 0
    """Number of shards."""
    bucket_bytes: tuple[int, ...] = ()
    """Size of the values of each bucket, by which the bucket is placed, in bytes."""
    vectors: Annotated[tuple[VectorRecord, ...], Meta(max_length=MOST_VECTORS)] = ()
    """Vectors of the store; its clients add and delete them."""
    vectors_made: Annotated[int, Meta(ge=0, le=(1 << 32) - 1)] = 0
    """Highest number of a vector so far."""
    vector_bytes: tuple[int, ...] = ()
    """Size of the vectors of each bucket, in bytes; empty without vectors."""
    changed: int = 0

    @property
    def min_in_sync_in_force(self) -> int:
        """Copies that must have an entry before it is applied: by default two, or one with one copy."""
        return self.min_in_sync or min(2, self.copies)

    @property
    def arrays_per_value(self) -> int:
        """Maximum number of arrays that a shard has: its values, the state of its rule, and vectors."""
        return 1 + self.state_arrays + len(self.vectors)

    @property
    def lasting_vectors(self) -> tuple[VectorRecord, ...]:
        """The vectors that pins and saved files have."""
        return tuple([vector for vector in self.vectors if not vector.temporary])

    @property
    def has_log(self) -> bool:
        """Whether pushes become entries of a log before they are applied: for other copies, or for disks."""
        return self.copies > 1 or self.durable

    @property
    def value_arrays(self) -> int:
        """Maximum number of arrays of values at a server: its own, and the sheets."""
        summed = self.summed_weight > 0
        return 1 if self.in_place else 1 + sheets_of(logged=self.has_log, summed=summed, recorded=self.record)

    @property
    def takes_cuts(self) -> bool:
        """Whether servers with a disk keep the store at one clock of all bundles: a run in bsp."""
        return bool(self.program) and self.summed_weight > 0

    @property
    def fixed(self) -> tuple[Any, ...]:
        """Values of the fields that the creator sets, which never change."""
        return tuple(getattr(self, name) for name in _FIXED)


_FIXED = StoreRecord.__struct_fields__[: StoreRecord.__struct_fields__.index("phase")]


def sheets_of(*, logged: bool, summed: bool, recorded: bool) -> int:
    """Return the number of sheets of a store that takes pushes; 0 if these have no short way."""
    return 0 if logged or summed or recorded else SHEETS


def served_word(store: StoreRecord) -> str:
    """Return the text by which a server reports that it holds a store, in one placement of its buckets.

    A store created again under the same id has another placement, without values.
    """
    return f"{store.id}/{store.generation}"


class ArraysPiece(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of the JSON text of a store's list of arrays."""

    store: str
    """Id of the store."""
    creator: str = ""
    """Node that creates the store, as in the record."""
    text: bytes
    changed: int = 0


def store_key(name: str) -> str:
    """Return the key of a store in the cluster map.

    Raises:
        ConfigError: The name is empty, too long, or has a slash or an unprintable character.
    """
    if not is_store_name(name):
        raise ConfigError(
            f"a store's name has 1 to {MOST_STORE_NAME} bytes of printable characters and no slash, "
            f"not {name[:80]!r}"
        )
    return f"stores/{name}"


def is_store_name(name: str) -> bool:
    """Return whether a text may be the name of a store."""
    return name.isprintable() and "/" not in name and 0 < len(name.encode()) <= MOST_STORE_NAME


def cut_arrays(store: str, arrays: Iterable[ArrayRecord], *, creator: str = "") -> list[ArraysPiece]:
    """Cut the list of a store's arrays into pieces, at least one.

    Raises:
        ConfigError: The list needs more than `STORE_PIECES` pieces.
    """
    text = msgspec.json.encode(list(arrays))
    most = STORE_PIECES * STORE_PIECE_BYTES
    if len(text) > most:
        raise ConfigError(
            f"the names and shapes of the arrays have {len(text)} bytes, {most} are the most: "
            "use shorter names, or several stores"
        )
    return [
        ArraysPiece(store=store, creator=creator, text=text[start : start + STORE_PIECE_BYTES])
        for start in range(0, len(text), STORE_PIECE_BYTES)
    ]


def joined_arrays(name: str, store: StoreRecord, found: Mapping[str, ArraysPiece]) -> tuple[ArrayRecord, ...]:
    """Return a store's arrays from its pieces, checked against the record.

    Args:
        found: Pieces by their key in the cluster map.

    Raises:
        ConfigError: A piece is missing, or an array or the list contradicts the record.
    """
    texts = [
        piece.text
        for piece in [found.get(f"stores/{name}/{number}") for number in range(store.pieces)]
        if piece is not None and piece.store == store.id and piece.creator == store.creator
    ]
    if len(texts) != store.pieces:
        raise ConfigError(f"store {store.id} lacks {store.pieces - len(texts)} pieces: create it again")
    try:
        arrays = msgspec.json.decode(b"".join(texts), type=tuple[ArrayRecord, ...])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"the list of arrays: {error}") from None
    check_arrays(arrays, rules=len(store.rules))
    if len(arrays) != store.arrays or sum([array.nbytes for array in arrays]) != store.nbytes:
        raise ConfigError(f"the record names {store.arrays} arrays of {store.nbytes} bytes, the list others")
    return arrays


def check_arrays(arrays: Sequence[ArrayRecord], *, rules: int) -> None:
    """Check a store's arrays one by one, and their names for repetitions.

    Raises:
        ConfigError: A field is out of bounds; names the array, the value and the limit.
    """
    if not 1 <= len(arrays) <= MOST_ARRAYS:
        raise ConfigError(f"a store has 1 to {MOST_ARRAYS} arrays, not {len(arrays)}")
    cuts = sum([len(array.cuts) for array in arrays])
    if cuts > MOST_CUTS:
        raise ConfigError(f"the arrays have {cuts} cuts, {MOST_CUTS} are the most")
    names: set[str] = set()
    for array in arrays:
        shown = repr(array.name[:80])
        length = len(array.name.encode(errors="surrogatepass"))
        if length > MOST_NAME:
            raise ConfigError(f"array {shown}...: its name has {length} bytes, {MOST_NAME} are the most")
        if array.name in names:
            raise ConfigError(f"array {shown} is named twice")
        names.add(array.name)
        if array.dtype not in DTYPES:
            raise ConfigError(f"array {shown}: values of type {array.dtype[:32]}; use {' or '.join(DTYPES)}")
        if len(array.shape) > MOST_DIMENSIONS:
            raise ConfigError(
                f"array {shown}: shape {array.shape[:8]} has {len(array.shape)} dimensions, "
                f"{MOST_DIMENSIONS} are the most"
            )
        if (least := min(array.shape, default=0)) < 0:
            raise ConfigError(f"array {shown}: shape {array.shape[:8]} has the negative length {least}")
        # No row may exceed the maximum size of an array, even in an empty array.
        if prod([length or 1 for length in array.shape]) > MOST_VALUES:
            raise ConfigError(
                f"array {shown}: shape {array.shape[:8]} has too many values, {MOST_VALUES} are the most"
            )
        if not 0 <= array.rule < rules:
            raise ConfigError(f"array {shown}: no rule {array.rule}, the store has {rules}")
        rows = array.shape[0] if array.shape else 1
        if any(not 0 < row < rows for row in array.cuts) or list(array.cuts) != sorted(set(array.cuts)):
            raise ConfigError(f"array {shown}: cuts {array.cuts[:8]} are not rising rows within {rows}")

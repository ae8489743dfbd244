"""Pure: how large each number of a message may be, and how long each text: the types of all fields.

A field has one of these types or is a `bool`, an enumeration of them or a record of its own; a test walks all
messages and finds the others. The bounds lie far beyond every honest value. They keep what a peer sends out
of memory, arithmetic and waits; what is right at a moment the role that takes the message decides.

Comparisons let NaN pass, so a bound alone holds off the infinities only: `finite` looks at every number that
is not a `Loss`.
"""

from typing import Annotated

from msgspec import Meta

MOST_IN_A_META = 8192
"""Numbers of one field: with more of them a message would not fit into a frame's meta."""

# --- numbers -----------------------------------------------------------------------------------

Count = Annotated[int, Meta(ge=0, le=(1 << 53) - 1)]
"""A number of things, of bytes, or the place of one among them."""

Version = Annotated[int, Meta(ge=0, le=(1 << 53) - 1)]
"""Version of a shard, of the cluster map or of a record in it; or a term."""

After = Annotated[int, Meta(ge=-1, le=(1 << 53) - 1)]
"""A version or clock that was heard of; -1: none."""

DrawnId = Annotated[int, Meta(ge=0, le=(1 << 56) - 1)]
"""What is drawn, or hashed, from seven bytes: sessions, lives, incarnations."""

Epoch = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
"""Number of an epoch, from 1; 0: none."""

Clock = Annotated[int, Meta(ge=0, le=(1 << 48) - 1)]
"""Steps that a replica has behind it."""

PushNumber = Annotated[int, Meta(ge=0, le=(1 << 48) - 1)]
"""Number of a push in its session, from 1; 0: none."""

GroupNumber = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
"""Number of a group in its epoch."""

Attempt = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
"""How often a group was leased."""

Staleness = Annotated[int, Meta(ge=0, le=(1 << 20) - 1)]
"""Steps that others applied while one was computed."""

Images = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
"""A number of images, or the place of one in a data set."""

ReplicaNumber = Annotated[int, Meta(ge=0, le=(1 << 20) - 1)]
"""Number of a replica, from 0."""

Partition = Annotated[int, Meta(ge=0, le=(1 << 16) - 1)]
"""Number of a part of the model, or of a crossing between two of them."""

ShardNumber = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
"""Number of a shard in the model's table."""

Place = Annotated[int, Meta(ge=0, le=MOST_IN_A_META)]
"""Position in a field of several, or how many of it; or which of a few words it is."""

Row = Annotated[int, Meta(ge=0, le=(1 << 20) - 1)]
"""Row of an image."""

Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
"""A time to wait, or one that something took."""

Instant = Annotated[float, Meta(ge=-1e15, le=1e15)]
"""Seconds on another process' clock."""

Rate = Annotated[float, Meta(ge=0.0, le=1e12)]
"""Learning rate."""

Progress = Annotated[float, Meta(ge=0.0, le=1e12)]
"""Epochs, or a part of something."""

Loss = Annotated[float, Meta(extra={"diverges": True})]
"""A loss: any number, and none where training diverged. It is added up and shown, and decides nothing."""

# --- texts -------------------------------------------------------------------------------------

NodeId = Annotated[str, Meta(max_length=80)]
"""Name of a node; as long as a link's handshake lets it be."""

RoleName = Annotated[str, Meta(max_length=32)]
"""Name of a role, or of another word of the protocol."""

ReplicaText = Annotated[str, Meta(pattern=r"^[0-9]{1,6}$", max_length=6)]
"""Number of a replica, as text."""

RunId = Annotated[str, Meta(max_length=160)]
"""Name of a run: the driver's, and a number."""

Name = Annotated[str, Meta(max_length=160)]
"""A group of controllers, the identity of one, a key of the map, an array, a digest."""

Addresses = Annotated[str, Meta(max_length=4096)]
"""One address, or several with commas between them."""

Packed = Annotated[bytes, Meta(max_length=16384)]
"""Bytes that travel in a frame's meta."""

# --- several -----------------------------------------------------------------------------------

Shards = Annotated[tuple[ShardNumber, ...], Meta(max_length=MOST_IN_A_META)]
"""Numbers of shards."""

PushNumbers = Annotated[tuple[PushNumber, ...], Meta(max_length=MOST_IN_A_META)]
"""One for each of some shards."""

Versions = Annotated[tuple[Version, ...], Meta(max_length=MOST_IN_A_META)]
"""The same."""

Places = Annotated[tuple[Place, ...], Meta(max_length=MOST_IN_A_META)]
"""Positions in another field."""

Names = Annotated[tuple[Name, ...], Meta(max_length=64)]
"""Names of arrays, or of members of a group."""

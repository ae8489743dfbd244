"""Pure: maximum size of the text or packed records that travel with a message, for each use.

The receiver compares the length of the tensor with the bound before it decodes anything, because
decoding blocks the loop and the peer chooses the length.
"""

MOST_VALUE_BYTES = 64 << 10
"""Maximum size of one record of the cluster map, in bytes of JSON text; it decodes in some milliseconds."""

MOST_MAP_BYTES = 8 << 20
"""Maximum size of the cluster map, in bytes of JSON text; controllers refuse a record beyond it."""

MOST_MAP_TEXT_BYTES = 2 * MOST_MAP_BYTES
"""Maximum size of a cluster map or its changes in one answer, in bytes. The map also has names, and shares
and places that the controllers add."""

MOST_INFO_BYTES = 32 << 10
"""Maximum size of the `info` field of a node in the cluster map, such as a data server's description of its
data with the names of some thousand classes, in bytes of JSON text."""

MOST_STATISTICS_BYTES = 8 << 20
"""Maximum size of the statistics of one role, in bytes of JSON text."""

MOST_PROFILE_BYTES = 32 << 20
"""Maximum size of one part of a profile, in bytes of JSON text: five times that of 50,000 events."""

MOST_MANIFEST_BYTES = 16 << 20
"""Maximum size of one part of a list of files, in bytes of JSON text: 2,000 paths of 4 KiB, all escaped."""

MOST_LEDGER_BYTES = 32 << 20
"""Maximum size of one part of the lease ledger, in bytes: some hundred kB and a bit per training image."""

MOST_AGREE_BYTES = 4 << 20
"""Maximum size of one consensus message, in bytes: entries of at most 1 MiB, or a piece of a snapshot."""

"""Pure: how many bytes of text or packed records may ride beside a message, for each use.

The receiver compares the length of the tensor with the bound before it decodes anything: decoding holds up
the loop, and a peer chooses the length.
"""

MOST_VALUE_BYTES = 64 << 10
"""Bytes of one record of the cluster map, as JSON text. It takes some milliseconds to decode."""

MOST_MAP_BYTES = 8 << 20
"""Bytes of the whole cluster map, as JSON text. Controllers refuse a record that would make it larger."""

MOST_MAP_TEXT_BYTES = 2 * MOST_MAP_BYTES
"""Bytes of a whole cluster map, or of its changes, in one answer: beside its records the map has names, and
the controllers' own rules add shares and places to it."""

MOST_INFO_BYTES = MOST_VALUE_BYTES
"""Bytes of what a data server tells of its data: it becomes a record of the cluster map."""

MOST_STATISTICS_BYTES = 8 << 20
"""Bytes of what one role has counted, as JSON text."""

MOST_PROFILE_BYTES = 32 << 20
"""Bytes of one part of a profile, as JSON text: five times those of 50 000 events."""

MOST_MANIFEST_BYTES = 16 << 20
"""Bytes of one part of a list of files, as JSON text: 2 000 paths of 4 KiB, all characters escaped."""

MOST_LEDGER_BYTES = 32 << 20
"""Bytes of one part of the ledger of leases: some hundred kilobytes, and one bit for each training image."""

MOST_AGREE_BYTES = 4 << 20
"""Bytes of one message of a controllers' core: entries of at most 1 MiB, or a piece of a snapshot."""

"""Pure: assembles the state of a snapshot from its chunks."""

from zlib import crc32

from adam_async.controller.consensus.messages import Chunk


class Incoming:
    """Assembles one state at a time: a chunk of another state discards the chunks kept so far."""

    def __init__(self) -> None:
        self._which: tuple[int, int, int, int] | None = None
        self._state = bytearray()

    def whole(self, chunk: Chunk) -> bytes | None:
        """Return the state if this chunk completes it and its checksum matches. Changes nothing."""
        if not self._follows(chunk) or chunk.offset + len(chunk.data) < chunk.size:
            return None
        known = self._state if _which(chunk) == self._which else b""
        state = bytes(known) + chunk.data
        return state if crc32(state) == chunk.crc else None

    def take(self, chunk: Chunk) -> int:
        """Keep a chunk that follows the last. Returns the number of bytes kept; 0 after a damaged state."""
        follows = self._follows(chunk)
        if _which(chunk) != self._which:
            self._which = _which(chunk)
            self._state.clear()
        if follows:
            self._state += chunk.data
        if len(self._state) >= chunk.size:
            self.forget()
        return len(self._state)

    def _follows(self, chunk: Chunk) -> bool:
        return chunk.offset == (len(self._state) if _which(chunk) == self._which else 0)

    def forget(self) -> None:
        """Discard the chunks kept so far."""
        self._which = None
        self._state = bytearray()


def _which(chunk: Chunk) -> tuple[int, int, int, int]:
    return (chunk.index, chunk.index_term, chunk.size, chunk.crc)

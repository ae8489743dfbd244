"""Traces of `strace`: the writes and syncs of log entries on a disk, and the acknowledgements of pushes.

`traced` returns a command line with `strace` in front. Several traces of one machine share its clock.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

CALLS = "fdatasync,fsync,write,writev,pwrite64,sendto,sendmsg"

ACKNOWLEDGEMENT = "Pushed"
"""Type of the message that acknowledges a push, which its frame has as text."""

ENTRIES = re.compile(r"/entries-\d+\.segment$")

_LINE = re.compile(r"(?P<pid>\d+) +(?P<at>\d+\.\d+) (?P<rest>.*)")
_CALL = re.compile(r"(?P<name>\w+)\(\d+<(?P<file>[^>]*)>(?P<arguments>.*)")
_RESUMED = re.compile(r"<\.\.\. (?P<name>\w+) resumed>(?P<arguments>.*)")
_RESULT = re.compile(r"\) += (?P<result>-?\d+)[^<]*<(?P<lasted>\d+\.\d+)>$")


def traced(trace: Path) -> tuple[str, ...]:
    """Return the words in front of a command that write its system calls to a file until it ends.

    The command stays the child of its caller (`-D`), so its process id and its end are its own.
    """
    return ("strace", "-D", "-f", "-ttt", "-T", "-y", "-s", "256", "-e", f"trace={CALLS}", "-o", str(trace))


@dataclass(frozen=True, kw_only=True)
class Event:
    """One system call of a server that ended; times are in seconds since 1970."""

    kind: Literal["write", "sync", "acknowledgement"]
    file: str
    begin: float
    end: float


def events_of(trace: str) -> list[Event]:
    """Return the successful writes and syncs of files of entries, and acknowledgements, by their begin."""
    open_calls: dict[str, tuple[float, str]] = {}
    found = []
    for line in trace.splitlines():
        matched = _LINE.fullmatch(line)
        if matched is None:
            continue
        pid, begin, text = matched["pid"], float(matched["at"]), matched["rest"]
        if text.endswith("<unfinished ...>"):
            open_calls[pid] = begin, text.removesuffix("<unfinished ...>")
            continue
        if resumed := _RESUMED.fullmatch(text):
            begin, started = open_calls.pop(pid)
            text = started + resumed["arguments"]
        call, result = _CALL.fullmatch(text), _RESULT.search(text)
        if call is None or result is None or int(result["result"]) < 0:
            continue
        kind = _kind(call["name"], call["file"], call["arguments"])
        if kind is not None:
            found.append(
                Event(kind=kind, file=call["file"], begin=begin, end=begin + float(result["lasted"]))
            )
    return sorted(found, key=lambda event: event.begin)


def _kind(name: str, file: str, arguments: str) -> Literal["write", "sync", "acknowledgement"] | None:
    if ENTRIES.search(file):
        return "sync" if name in ("fdatasync", "fsync") else "write"
    return "acknowledgement" if file.startswith("socket:") and ACKNOWLEDGEMENT in arguments else None


def unproved(servers: Sequence[Sequence[Event]], since: float, until: float) -> tuple[int, list[str]]:
    """Check the acknowledgements within a time, of a client with one push at a time.

    Before each acknowledgement, and after the one before it, every server must have written an entry, and
    then have synced its file.

    Args:
        servers: Events of each server with a copy.

    Returns:
        The number of acknowledgements, and a text for each one without its syncs.
    """
    acknowledged = sorted(
        event.begin
        for events in servers
        for event in events
        if event.kind == "acknowledgement" and since <= event.begin <= until
    )
    problems = []
    for number, (after, before) in enumerate(zip([since, *acknowledged], acknowledged, strict=False), 1):
        for place, events in enumerate(servers):
            if not _has_synced(events, after, before):
                problems.append(f"acknowledgement {number} at {before:.6f} s: no sync on server {place}")
    return len(acknowledged), problems


def _has_synced(events: Sequence[Event], after: float, before: float) -> bool:
    """Whether an entry was written within a time, and its file synced after that."""
    within = [event for event in events if after <= event.begin and event.end <= before]
    return any(
        sync.kind == "sync" and sync.file == write.file and sync.begin >= write.end
        for write in within
        if write.kind == "write"
        for sync in within
    )

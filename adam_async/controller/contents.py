"""Pure: checks that the state machine can read a command, a state or a log that it did not write itself.

Other controllers send commands and states, and an earlier process has written those of a file. Unreadable
bytes would end this controller when it applies them, and again at every start. The controller therefore
checks commands and states before they enter the log, and when it reads a file.
"""

from typing import Any

import msgspec

from adam_async.controller.consensus import Contents, Saved
from adam_async.controller.records import MAX_DEPTH, nests_too_deep
from adam_async.controller.replicated_state import Set, read_command, read_state
from adam_async.messages.bounds import MOST_VALUE_BYTES

MAP_DEPTH = MAX_DEPTH + 4
"""Maximum nesting depth of a state, in containers: the map, its nodes, a record and the values in it."""

MOST_VERSION = 1 << 53
"""Largest version of a cluster map."""

UNREADABLE = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError)
"""Errors that may occur when bytes of a peer or a file are read, or are written again as text."""


def command_problem(command: bytes) -> str:
    """Return why the state machine cannot read a command; empty if it can."""
    try:
        read = read_command(command)
        if not isinstance(read, Set):
            return ""
        return _record_problem(read.key[:80], read.value)
    except UNREADABLE as error:
        return f"this release cannot read it: {error}"


def _record_problem(key: str, value: bytes) -> str:
    """Return why the cluster map cannot hold a record; empty if it can. Raises `UNREADABLE`."""
    if len(value) > MOST_VALUE_BYTES:
        return f"{key!r} of {len(value)} bytes is above the limit of {MOST_VALUE_BYTES}"
    msgspec.json.decode(value, type=dict[str, Any])
    return f"{key!r} nests over {MAX_DEPTH} deep" if nests_too_deep(value) else ""


def state_problem(state: bytes) -> str:
    """Return why the state machine cannot load or send on a state; empty if it can do both."""
    try:
        cluster = read_state(state).map
        if not 0 <= cluster.version <= MOST_VERSION:
            return f"version {cluster.version} is not within 0 and {MOST_VERSION}"
        text = msgspec.json.encode(cluster)
    except UNREADABLE as error:
        return f"this release cannot read it: {error}"
    return f"it nests over {MAP_DEPTH} deep" if nests_too_deep(text, MAP_DEPTH) else ""


CONTENTS = Contents(command=command_problem, state=state_problem)
"""Checks of commands and states for the controllers' state machine."""


def log_problem(saved: Saved) -> str:
    """Name the first part of a log that the state machine cannot read; empty if it can read the whole log."""
    problem = state_problem(saved.snapshot.state) if saved.snapshot.index else ""
    if problem:
        return f"the state at entry {saved.snapshot.index}: {problem}"
    for entry in saved.entries:
        problem = command_problem(entry.command) if entry.command is not None else ""
        if problem:
            return f"entry {entry.index} of term {entry.term}: {problem}"
    return ""

"""Pure: consensus on a log of commands, under faults of network, disks and clocks.

`core.py` explains the protocol and its safety, docs/explanation/consensus.md the duties of a shell.
"""

from adam_async.controller.consensus.core import Core
from adam_async.controller.consensus.events import (
    Apply,
    Change,
    Done,
    Effect,
    Event,
    Led,
    Persist,
    Persisted,
    Propose,
    Read,
    ReadReady,
    Received,
    Refused,
    Restore,
    Send,
    Snapshotted,
    Tick,
    Transfer,
    Unknown,
)
from adam_async.controller.consensus.membership import Members, MembershipError, Step, identity
from adam_async.controller.consensus.messages import Entry, Message, Snapshot
from adam_async.controller.consensus.records import DamagedLog, Saved, Writer, bootstrapped, recover
from adam_async.controller.consensus.roles import Role
from adam_async.controller.consensus.settings import Settings
from adam_async.controller.consensus.violations import Contents, Violation

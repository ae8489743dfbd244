"""Pure: data server and data server: the ledger of a run's leases, which its lender copies to the others."""

from adam_async.messages.body import Body, Rows
from adam_async.messages.bounds import (
    RunId,
    Version,
)


class Enter(Body, frozen=True, kw_only=True):
    """Events for the ledger of a run's leases, for its lender to enter. Tensor: the events, packed."""

    run: RunId
    term: Version
    """Of the lending, as the sender knows it."""


class Entered(Body, frozen=True, kw_only=True):
    """They are in the ledger; which says nothing of who else has it."""


class CopyLedger(Body, frozen=True, kw_only=True):
    """A part of the ledger, from its lender. Tensor: a `keeping.Part`, packed."""

    run: RunId
    term: Version


class LedgerCopied(Body, frozen=True, kw_only=True):
    """The sender has taken it."""


ROWS: Rows = {
    Enter: frozenset({("data", "data")}),
    Entered: frozenset({("data", "data")}),
    CopyLedger: frozenset({("data", "data")}),
    LedgerCopied: frozenset({("data", "data")}),
}

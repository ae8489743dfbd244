"""Counts of roles that never were."""

from typing import Any

import msgspec

from adam_async.run.counts import ROLES, Counts

NO_PUSHES: dict[str, Any] = {
    "primaries": {},
    "moves": 0,
    "numbers": {},
    "unanswered": 0,
    "acknowledged": 0,
    "duplicates": 0,
    "refused": 0,
    "resent": 0,
    "reconnects": 0,
    "admission_waits": 0,
    "admission_wait_s": 0.0,
}
NO_GROUPS: dict[str, Any] = {"groups": 0, "blocked_fetches": 0, "blocked_s": 0.0}


def counts_of(role: str, node: str = "", /, **values: Any) -> Any:
    """Return the counts of a role with some values, as a driver reads them; other roles have those of any."""
    for name, rest in (("parameters", NO_PUSHES), ("data", NO_GROUPS)):
        if values.get(name) is not None:
            values[name] = rest | values[name]
    rows = [
        {"from": node, "to": "", "type": "Push", "messages": 1, "payload_bytes": 0, "frame_bytes": 0, **row}
        for row in values.pop("traffic", ())
    ]
    return msgspec.convert({"node": node, "traffic": rows, **values}, ROLES.get(role, Counts))

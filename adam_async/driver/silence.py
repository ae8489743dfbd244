"""Pure: the roles that do not answer the driver, and the start of each silence.

A stopped process and a pulled cable look alike to the driver: the link stays up and silent, and breaks only
much later.
"""

from collections.abc import Collection
from dataclasses import dataclass

SILENT, HEARD = " has not answered for ", " answers again, "
"""Words behind the name of a node, in the events of its silence."""

LOOKS = 2
"""Number of looks in a row without an answer that make an event; a busy machine may miss one look."""


@dataclass(slots=True)
class _Silent:
    since: float
    looks: int = 0


class Silence:
    """The roles that are live by the cluster map and do not answer. Times are seconds of the loop's clock."""

    def __init__(self) -> None:
        self._silent: dict[str, _Silent] = {}

    def look(
        self, asked: Collection[str], answered: Collection[str], *, asked_at: float, now: float
    ) -> list[str]:
        """Take the result of one look; returns the new events.

        Args:
            asked: The nodes that were asked. A silent node that is no longer asked is lost, and forgotten
                here: its loss is an event of its own.
            answered: The asked nodes that have answered.
            asked_at: Time of the questions.
            now: End of the look.
        """
        events = []
        self._silent = {node: each for node, each in self._silent.items() if node in asked}
        for node in asked:
            if node in answered:
                silent = self._silent.pop(node, None)
                if silent is not None and silent.looks >= LOOKS:
                    events.append(f"{node}{HEARD}after {now - silent.since:.0f} s")
                continue
            silent = self._silent.setdefault(node, _Silent(since=asked_at))
            silent.looks += 1
            if silent.looks == LOOKS:
                events.append(f"{node}{SILENT}{now - silent.since:.0f} s")
        return events

    def shown(self, now: float) -> tuple[str, ...]:
        """Return each node whose silence is an event, with the length of its silence."""
        silent = ((node, each) for node, each in sorted(self._silent.items()) if each.looks >= LOOKS)
        return tuple(f"{node} for {now - each.since:.0f} s" for node, each in silent)

    def __repr__(self) -> str:
        return f"<Silence of {', '.join(self._silent) or 'none'}>"

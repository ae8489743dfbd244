"""Pure: the set of settled tags, in bounded memory.

A late token must be recognised as late, and a tag must never run twice. A plain set of all tags would grow
without end, so two compressions apply:

- epochs: only the newest `keep_epochs` are kept tag by tag; older epochs count as settled as a whole;
- numbers: per (epoch, attempt), one range of consecutive numbers is two integers (a start and a watermark),
  and only numbers that unsettled ones separate from the range are in a set. The answer for a kept epoch is
  exact.
"""

from __future__ import annotations

from dataflow.tags import Tag


class _Run:
    """The set of the numbers n with start <= n < watermark, and of the numbers in `others`."""

    __slots__ = ("others", "start", "watermark")

    def __init__(self, number: int) -> None:
        self.start = number
        self.watermark = number + 1
        self.others: set[int] = set()

    def add(self, number: int) -> None:
        """Add a number, and extend the range over all numbers in `others` that now adjoin it."""
        if self.start <= number < self.watermark:
            return
        others = self.others
        others.add(number)
        while self.watermark in others:
            others.remove(self.watermark)
            self.watermark += 1
        while self.start - 1 in others:
            self.start -= 1
            others.remove(self.start)

    def __contains__(self, number: int) -> bool:
        return self.start <= number < self.watermark or number in self.others


class SettledTags:
    """The tags that finished or were abandoned.

    Args:
        keep_epochs: Number of epochs, counted back from the newest seen, that are kept tag by tag.
    """

    def __init__(self, *, keep_epochs: int) -> None:
        if keep_epochs < 1:
            raise ValueError(f"keep_epochs must be at least 1, not {keep_epochs}")
        self._keep_epochs = keep_epochs
        self._oldest: int | None = None
        self._runs: dict[tuple[int, int], _Run] = {}

    def add(self, tag: Tag) -> None:
        """Add a tag."""
        epoch, number, attempt = tag
        run = self._runs.get((epoch, attempt))
        if run is not None:
            run.add(number)
            return
        oldest = epoch - self._keep_epochs + 1
        if self._oldest is None or oldest > self._oldest:
            self._oldest = oldest
            self._runs = {key: run for key, run in self._runs.items() if key[0] >= oldest}
        if epoch >= self._oldest:
            self._runs[epoch, attempt] = _Run(number)

    def __contains__(self, tag: Tag) -> bool:
        if self._oldest is not None and tag.epoch < self._oldest:
            return True
        run = self._runs.get((tag.epoch, tag.attempt))
        return run is not None and tag.number in run

    @property
    def num_loose(self) -> int:
        """Number of settled tags that are kept one by one, outside the ranges."""
        return sum(len(run.others) for run in self._runs.values())

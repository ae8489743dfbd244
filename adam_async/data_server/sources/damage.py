"""Pure: what to do with a damaged image, label or row: stop at the first, or leave it out and say so."""

from typing import Literal

from adam_async.errors import DataError

Policy = Literal["skip", "error"]

MAX_SENTENCES = 100
MAX_SHARE = 0.05
"""With more than this share of it damaged, a data set is not what its owner takes it for."""


class Damage:
    """Collects what is damaged in one data set.

    Args:
        policy: ``error`` makes the first damage an error; ``skip`` counts it.
    """

    def __init__(self, policy: Policy) -> None:
        if policy not in ("skip", "error"):
            raise ValueError(f"damaged is {policy!r}, expected 'skip' or 'error'")
        self._policy = policy
        self._sentences: list[str] = []
        self.count = 0

    @property
    def policy(self) -> Policy:
        """What is done with damage."""
        return self._policy

    def note(self, sentence: str) -> None:
        """Note that something is left out.

        Raises:
            DataError: The policy is ``error``.
        """
        if self._policy == "error":
            raise DataError(f"{sentence}; repair or remove it, or load with damaged='skip' (--damaged skip)")
        self.count += 1
        if len(self._sentences) < MAX_SENTENCES:
            self._sentences.append(sentence)

    def check(self, kept: int, origin: str) -> None:
        """Refuse a data set too much of which is damaged.

        Args:
            kept: How many images are whole.
            origin: What to call the data set in an error.

        Raises:
            DataError: More than 5 % of all are damaged; names the first.
        """
        if self.count > MAX_SHARE * (kept + self.count):
            raise DataError(
                f"{origin}: {self.count} of {kept + self.count} images are damaged, more than "
                f"{MAX_SHARE:.0%}; the first: {self._sentences[0]}"
            )

    def sentences(self) -> tuple[str, ...]:
        """What was left out: a sentence each, at most 100, then one that says how many more."""
        more = self.count - len(self._sentences)
        return (*self._sentences, *([f"{more} more were left out"] if more else []))

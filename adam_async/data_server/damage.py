"""Pure: the policy for damaged images, labels and rows: stop at the first one, or leave all of them out."""

from typing import Literal

from adam_async.errors import DataError

Policy = Literal["skip", "error"]

MAX_SENTENCES = 100
"""Maximum number of damaged images that the report of a data set names."""

MAX_SHARE = 0.05
"""Largest share of damaged images that may be left out of a data set."""


class Damage:
    """Collects the damage of one data set.

    Args:
        policy: ``error`` makes the first damage an error; ``skip`` counts it.
    """

    def __init__(self, policy: Policy) -> None:
        if policy not in ("skip", "error"):
            raise ValueError(f"damaged is {policy!r}, expected 'skip' or 'error'")
        self.policy = policy
        """Policy for damage."""
        self._sentences: list[str] = []
        self.count = 0

    def note(self, sentence: str) -> None:
        """Note damage that is left out. Raises DataError: the policy is ``error``."""
        if self.policy == "error":
            raise DataError(
                f"{sentence}; repair it, move it elsewhere, or leave it out with --damaged skip "
                "(damaged='skip' in Python)"
            )
        self.count += 1
        if len(self._sentences) < MAX_SENTENCES:
            self._sentences.append(sentence)

    def check(self, kept: int, origin: str) -> None:
        """Refuse a data set with too much damage.

        Raises:
            DataError: More than 5 % of all images are damaged; the text has the first damage, and the error
                all sentences.
        """
        if self.count > MAX_SHARE * (kept + self.count):
            raise DataError(
                f"{origin}: {self.count} of {kept + self.count} images are damaged, more than "
                f"{MAX_SHARE:.0%}; the first: {self._sentences[0]}",
                damaged=self.sentences(),
            )

    def sentences(self) -> tuple[str, ...]:
        """Return the damaged items that were left out: at most 100 sentences, then the number of the
        others."""
        more = self.count - len(self._sentences)
        return (*self._sentences, *([f"{more} more were left out"] if more else []))

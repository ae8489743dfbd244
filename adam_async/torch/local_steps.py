"""Local steps of an optimizer between its pulls, and the versions that its pushes name.

A local step is ``p -= rate * gradient``, in parameters with the rule `Sgd`. Pulled values replace the local
steps, and those of pushes in flight are repeated. A push names the versions of the values from which its
gradients were computed, and the number of this client's pushes that local steps had put into these values.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from adam_async.run.arrays import Factors
from adam_async.store.rules import Rule, Sgd
from adam_async.store.values import ReadVersions
from adam_async.torch.exchanges import Exchange
from adam_async.torch.gradients import Found, Slot


class LocalSteps:
    """Local steps, and the pushes whose effect the module's values have or lack.

    Args:
        rules: Rule of each array.
        are_taken: Whether the optimizer takes local steps.

    Attributes:
        plain: Names of the arrays whose parameters take local steps.
        behind: Names of the arrays with pushes whose effect the module's values lack.
    """

    def __init__(self, rules: Mapping[str, Rule], *, are_taken: bool) -> None:
        self.are_taken = are_taken
        self.plain = frozenset(name for name, rule in rules.items() if isinstance(rule, Sgd))
        self.behind: set[str] = set()
        self._exact = frozenset(
            name for name in self.plain if are_taken and rules[name] == Sgd(rate=rules[name].rate)
        )
        """Names of the arrays whose local steps equal those of the servers."""
        self._read: ReadVersions | None = None
        self._own: dict[str, int] = {}

    @property
    def store(self) -> str:
        """Id of the store whose values were read; empty before the first pull."""
        return "" if self._read is None else self._read.store

    @property
    def read(self) -> ReadVersions | None:
        """Versions of the module's values, for a push."""
        if self._read is None or not self._own:
            return self._read
        return replace(self._read, own=dict(self._own))

    def begun(self, exchange: Exchange) -> None:
        """Note a push in flight, which the module's values may lack."""
        self.behind.update(name for name in exchange.gradients if name not in self._exact)

    def count(self, names: Iterable[str]) -> None:
        """Count a push that the module's values have by a local step."""
        self.count_all(name for name in names if name in self.plain)

    def count_all(self, names: Iterable[str]) -> None:
        """Count a push, or an assignment, that the module's values have."""
        for name in names:
            self._own[name] = self._own.get(name, 0) + 1

    def take(self, slots: Mapping[str, Slot], gradients: Mapping[str, Found], rates: Sequence[float]) -> None:
        """Subtract rate * gradient from the parameters with the rule `Sgd`."""
        for name in self.plain.intersection(gradients):
            slot, gradient = slots[name], gradients[name]
            dense = gradient if isinstance(gradient, Tensor) else gradient.dense()
            slot.parameter.sub_(dense, alpha=rates[slot.group])

    def pulled(
        self,
        slots: Mapping[str, Slot],
        names: Collection[str],
        installed: Iterable[str],
        later: Iterable[Exchange],
    ) -> None:
        """Take note of pulled values, and repeat the local steps of pushes in flight, which the values lack.

        Other parameters, such as those that were frozen at the pull, still have their local step.

        Args:
            names: The pulled parameters.
            installed: Those whose values the module got; others keep values that have the local steps.
            later: Exchanges in flight.
        """
        installed = frozenset(installed)
        for name in names:
            self._own.pop(name, None)
        self.behind.difference_update(installed)
        for exchange in later:
            self.begun(exchange)
            if not self.are_taken:
                continue
            assert exchange.staging is not None
            again = self.plain.intersection(names).intersection(exchange.gradients)
            rate = exchange.rate
            for name in again & installed:
                parameter, gradient = slots[name].parameter, exchange.gradients[name]
                if isinstance(gradient, Factors):
                    product = torch.from_numpy(gradient.errors.T @ gradient.activations)
                    dense = product.to(parameter.device)
                else:
                    dense = exchange.staging.gradients.views[name]
                parameter.sub_(dense, alpha=rate[name] if isinstance(rate, dict) else rate)
            self.count_all(again)

    def note_read(self, read: ReadVersions) -> None:
        """Note the versions of pulled values; parameters that were not pulled keep theirs."""
        if self._read is not None:
            known = np.where(read.of_shards < 0, self._read.of_shards, read.of_shards)
            read = replace(read, of_shards=known)
        self._read = read

    def restart(self, read: ReadVersions) -> None:
        """Begin anew at values of all parameters."""
        self._read = read
        self._own.clear()
        self.behind.clear()

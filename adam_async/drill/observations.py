"""Pure: the observations of a drill."""

import msgspec
import numpy as np
from numpy.typing import NDArray

BIN_S = 0.1
"""Length of the intervals in which a drill counts acknowledged pushes, in seconds."""

SLOTS = 512
"""Number of slots of a counter; push n counts in slot n modulo this number."""


class FaultObservation(msgspec.Struct, kw_only=True):
    """One injected fault."""

    number: int
    kind: str
    server: str
    at_s: float
    """Time since the start of the workload, in seconds."""
    resumed_s: dict[str, float] = {}
    """Time in seconds from the fault to the first acknowledgement of a push that began after it, by home of
    each bundle of the lost primary. In training, time from the fault to the new primary in the map."""
    whole_s: float | None = None
    """Time from the fault until all bundles had all copies in sync again, in seconds; None if the drill ended
    before."""


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison of acknowledged with applied pushes, over all counters or over all shards of the runs."""

    acknowledged: int
    """Acknowledged pushes; in training each counts once for each of its shards."""
    unanswered: int = 0
    """Pushes without an answer; each may be applied once or not at all."""
    lost: int = 0
    """Acknowledged pushes that were not applied."""
    twice: int = 0
    """Applications beyond the first of a push."""
    altered: int = 0
    """Slots with the right number of pushes and a wrong sum of their numbers."""

    def plus(self, other: "Audit") -> "Audit":
        """Return the sum of two audits."""
        return Audit(**{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__})


class CopyCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison of the copies of each bundle after the last push."""

    copies: int
    """Copies in sync after the last push, over all bundles."""
    compared: int
    """Copies that were primaries and were read."""
    different: tuple[str, ...] = ()
    """Bundle and server of each copy whose values differ from those of the copy that was read first."""


class PairObservation(msgspec.Struct, frozen=True, kw_only=True):
    """Two trainings with one seed, without and with faults."""

    seed: int
    faults: int
    accuracy_without: float
    accuracy_with: float
    images_per_s_without: float
    images_per_s_with: float

    @property
    def difference(self) -> float:
        """Accuracy with faults minus accuracy without, as a share."""
        return self.accuracy_with - self.accuracy_without


class Observations(msgspec.Struct, kw_only=True):
    """Everything that a drill observed."""

    planned: int = 0
    """Number of planned faults."""
    faults: list[FaultObservation] = []
    pushes: list[int] = []
    """Number of pushes acknowledged in each interval of `BIN_S` since the start; empty in training."""
    audit: Audit | None = None
    differences: list[str] = []
    """Shards and replicas of the training runs whose numbers of applied and acknowledged pushes differ."""
    audit_gaps: list[str] = []
    """Reasons for which the audit of a training run is incomplete."""
    copies: CopyCheck | None = None
    pairs: list[PairObservation] = []
    failovers: int = 0
    """Failovers from a server with a fault."""
    false_failovers: list[str] = []
    """Description of each failover from a server without a fault."""
    saturated_s: float = 0.0
    """Time of training without faults in a drill with `--saturate`, in seconds."""
    load: float | None = None
    """Load average of the machine over the last minute of the saturated time, in runnable threads."""
    cores: int = 0
    failure: str = ""
    """First error that ended the workload; empty if none did."""


def count_push(pushes: list[int], at_s: float) -> None:
    """Count a push that was acknowledged at a time since the start of the workload, in seconds."""
    place = int(at_s / BIN_S)
    pushes.extend([0] * (place + 1 - len(pushes)))
    pushes[place] += 1


def gradient_of(number: int) -> NDArray[np.float64]:
    """Return the gradient (2, SLOTS) of one push: its slot counts 1 and sums its number."""
    gradient = np.zeros((2, SLOTS))
    gradient[:, number % SLOTS] = 1, number
    return gradient


def audit_of(values: NDArray[np.float64], acknowledged: int, *, unanswered: bool) -> Audit:
    """Compare the values (2, SLOTS) of one counter with pushes 1 to `acknowledged`.

    Args:
        values: Negative sums of the gradients that the servers applied.
        unanswered: Whether one more push, the next number, had no answer; this push may be applied or not.
    """
    counted, summed = -values
    found = _compared(counted, summed, acknowledged)
    if not unanswered:
        return found
    with_next = _compared(counted, summed, acknowledged + 1)
    better = min(found, with_next, key=lambda audit: audit.lost + audit.twice + audit.altered)
    return msgspec.structs.replace(better, acknowledged=acknowledged, unanswered=1)


def _compared(counted: NDArray[np.float64], summed: NDArray[np.float64], pushes: int) -> Audit:
    numbers = np.arange(1, pushes + 1)
    wanted = np.bincount(numbers % SLOTS, minlength=SLOTS)
    sums = np.bincount(numbers % SLOTS, weights=numbers, minlength=SLOTS)
    return Audit(
        acknowledged=pushes,
        lost=int(np.maximum(wanted - counted, 0).sum()),
        twice=int(np.maximum(counted - wanted, 0).sum()),
        altered=int(((counted == wanted) & (summed != sums)).sum()),
    )

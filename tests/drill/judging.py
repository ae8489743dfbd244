"""Pure: the claims of a drill, judged by its observations.

The observations of a drill.
"""

import math
import statistics
from collections.abc import Sequence

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
    """By home, for each bundle of the lost primary: seconds from the fault to the first acknowledgement of a
    push that began after it. In training, time from the fault to the new primary in the map."""
    whole_s: float | None = None
    """Seconds from the fault until all bundles had all copies in sync again; None if the drill ended."""


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison of acknowledged with applied pushes, over all counters or over all shards of the runs."""

    acknowledged: int
    """Acknowledged pushes; in training each counts once per shard."""
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
    """Comparison of each bundle's copies after the last push."""

    copies: int
    """Copies in sync after the last push, over all bundles."""
    compared: int
    """Copies that were primaries and were read."""
    different: tuple[str, ...] = ()
    """Bundle and server of each copy whose values differ from the first copy's."""


class PairObservation(msgspec.Struct, frozen=True, kw_only=True):
    """Two trainings with one seed: without and with faults."""

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
        unanswered: Whether one more push, the next number, had no answer; it may or may not be applied.
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


T_95 = (
    6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812,
    1.796, 1.782, 1.771, 1.761, 1.753, 1.746, 1.740, 1.734, 1.729, 1.725,
    1.721, 1.717, 1.714, 1.711, 1.708, 1.706, 1.703, 1.701, 1.699, 1.697,
)  # fmt: skip
"""95 % quantiles of Student's t, for 1 to 30 degrees of freedom."""

MOST_PAIRS = len(T_95) + 1
"""Maximum number of training pairs that the table of quantiles allows."""

FAILED, SKIPPED = 1, 3
"""Exit codes for a failed claim, and with `--require` for a fault kind that cannot be injected."""


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """One claim."""

    name: str
    holds: bool | None
    """Whether the claim is true; None if the drill could not decide, for the reason in `text`."""
    text: str


class KindRow(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds of one kind's faults; None without a sample."""

    kind: str
    faults: int
    bundles: int
    """Number of samples: bundles that lost their primary, over all faults."""
    p50_s: float | None
    p99_s: float | None
    max_s: float | None
    whole_p50_s: float | None
    """Median time until all copies were in sync again."""
    whole_max_s: float | None


class Equivalence(msgspec.Struct, frozen=True, kw_only=True):
    """Two one-sided t tests on paired differences, at 5 % each."""

    pairs: int
    mean: float
    low: float
    """Lower end of the 90 % confidence interval of the mean difference."""
    high: float
    margin: float

    @property
    def holds(self) -> bool:
        """Whether the interval lies within the margin on both sides."""
        return -self.margin < self.low and self.high < self.margin


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the nearest-rank percentile; None without values."""
    return sorted(values)[max(math.ceil(share * len(values)), 1) - 1] if values else None


def kind_rows(seen: Observations) -> tuple[KindRow, ...]:
    """Return a row for each kind of fault that was injected."""
    rows = []
    for kind in dict.fromkeys(fault.kind for fault in seen.faults):
        faults = [fault for fault in seen.faults if fault.kind == kind]
        times = [seconds for fault in faults for seconds in fault.resumed_s.values()]
        whole = [fault.whole_s for fault in faults if fault.whole_s is not None]
        rows.append(
            KindRow(
                kind=kind,
                faults=len(faults),
                bundles=len(times),
                p50_s=percentile(times, 0.5),
                p99_s=percentile(times, 0.99),
                max_s=percentile(times, 1.0),
                whole_p50_s=percentile(whole, 0.5),
                whole_max_s=percentile(whole, 1.0),
            )
        )
    return tuple(rows)


def equivalence(differences: Sequence[float], margin: float) -> Equivalence | None:
    """Test that the mean of paired differences lies within a margin; None for fewer than two pairs."""
    count = len(differences)
    if count < 2:
        return None
    mean = statistics.fmean(differences)
    half = T_95[count - 2] * statistics.stdev(differences) / math.sqrt(count)
    return Equivalence(pairs=count, mean=mean, low=mean - half, high=mean + half, margin=margin)


def judge(seen: Observations, *, margin: float) -> tuple[Claim, ...]:
    """Return the claims of a drill.

    Args:
        margin: Largest difference of accuracy that counts as equal, as a share.
    """
    claims = [Claim(name="workload ends well", holds=not seen.failure, text=seen.failure or "no error")]
    if seen.planned:
        done = sum(fault.whole_s is not None for fault in seen.faults)
        text = f"{done} of {seen.planned} injected, and all copies in sync again after each"
        claims.append(Claim(name="all planned faults", holds=done == seen.planned, text=text))
    false = seen.false_failovers
    text = f"{len(false)} beside {seen.failovers} after faults"
    text += f": {'; '.join(false[:3])}" if false else ""
    claims.append(Claim(name="no false failover", holds=not false, text=text))
    if seen.audit or seen.audit_gaps:
        claims.append(_audit(seen))
    if check := seen.copies:
        text = f"{check.compared} of {check.copies} copies read; {len(check.different)} differ"
        text += f": {', '.join(check.different[:3])}" if check.different else ""
        whole = True if check.compared == check.copies else None
        claims.append(Claim(name="copies are equal", holds=False if check.different else whole, text=text))
    if seen.pairs:
        claims.append(_accuracy(seen, margin))
    return tuple(claims)


def _audit(seen: Observations) -> Claim:
    audit, remarks = seen.audit or Audit(acknowledged=0), [*seen.differences, *seen.audit_gaps]
    text = (
        f"{audit.acknowledged:,} acknowledged, {audit.unanswered} unanswered; {audit.lost} lost, "
        f"{audit.twice} twice"
    )
    text += f", {audit.altered} slots altered" if audit.altered else ""
    text += f": {'; '.join(remarks[:3])}" if remarks else ""
    wrong = bool(audit.lost or audit.twice or audit.altered)
    whole = None if seen.audit_gaps else True
    return Claim(name="each push applied once", holds=False if wrong else whole, text=text)


def _accuracy(seen: Observations, margin: float) -> Claim:
    name = f"accuracy within {100 * margin:g} points"
    test = equivalence([pair.difference for pair in seen.pairs], margin)
    if test is None:
        points = 100 * seen.pairs[0].difference
        return Claim(name=name, holds=None, text=f"{points:+.2f} points in one pair; --pairs 2 or more test")
    text = (
        f"mean {100 * test.mean:+.2f} points, 90 % interval {100 * test.low:+.2f} to {100 * test.high:+.2f}, "
        f"{test.pairs} pairs (two one-sided t tests at 5 %)"
    )
    if not test.holds and test.low < margin and test.high > -margin:
        text += "; more pairs narrow the interval"
    return Claim(name=name, holds=test.holds, text=text)


def exit_code(claims: Sequence[Claim], skipped: Sequence[str], *, require: bool) -> int:
    """Return the exit code of a drill: a failed claim comes before a skipped kind of fault."""
    if any(claim.holds is False for claim in claims):
        return FAILED
    return SKIPPED if require and skipped else 0

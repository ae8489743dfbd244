"""Pure: the claims of a drill, judged by its observations."""

import math
import statistics
from collections.abc import Sequence

import msgspec

from adam_async.drill.observations import Audit, Observations

T_95 = (
    6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812,
    1.796, 1.782, 1.771, 1.761, 1.753, 1.746, 1.740, 1.734, 1.729, 1.725,
    1.721, 1.717, 1.714, 1.711, 1.708, 1.706, 1.703, 1.701, 1.699, 1.697,
)  # fmt: skip
"""95 % quantiles of Student's t, for 1 to 30 degrees of freedom."""

MOST_PAIRS = len(T_95) + 1
"""Maximum number of pairs of trainings, by the table of quantiles."""

LOAD_S = 60.0
"""Time that a load average covers, in seconds."""

FAILED, SKIPPED = 1, 3
"""Exit codes of a drill with a failed claim, and of a drill with `--require` and a kind of fault that cannot
be injected."""


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """One claim."""

    name: str
    holds: bool | None
    """Whether the claim is true; None if the drill could not decide, for the reason in `text`."""
    text: str


class KindRow(msgspec.Struct, frozen=True, kw_only=True):
    """Times of the faults of one kind, in seconds; None without a sample."""

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
    if seen.saturated_s:
        claims.append(_saturation(seen))
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


def _saturation(seen: Observations) -> Claim:
    name = "all cores are busy"
    if seen.load is None or seen.saturated_s < LOAD_S:
        return Claim(name=name, holds=None, text=f"the load covers {LOAD_S:g} s: train longer")
    return Claim(name=name, holds=seen.load >= seen.cores, text=f"load {seen.load:.1f} on {seen.cores} cores")


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

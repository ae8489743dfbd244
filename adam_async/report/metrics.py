"""The counts of roles, and a run's status, in Prometheus's text format.

The names come from the fields of `adam_async.run.counts`: ``WorkerCounts.clock_wait_s`` of a worker is
``adam_worker_clock_wait_seconds_total``. A number that only grows is a counter, any other number a gauge; the
buckets of durations and of staleness are histograms. The only labels are the node, and the message type of
sent bytes, so series do not grow with shards, clients or peers. The help of a metric names its field, whose
meaning is in docs/reference/report.md.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from math import isfinite
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec

from adam_async.controller.role import Role
from adam_async.run.cluster_status import ClusterStatus, status_of
from adam_async.run.condition import Verdict
from adam_async.run.counts import ROLES, Counts
from adam_async.run.progress import Progress
from adam_async.runtime.clock import DURATIONS_S
from adam_async.runtime.traffic import TrafficRow

UNITS = (("_mb", "_bytes", float(1 << 20)), ("_s", "_seconds", 1.0))
"""Ending of a field's name, ending of its metric's name, and the field's unit in the metric's unit."""

STALENESS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Upper bounds of the staleness buckets."""

LEFT_OUT = ("pid", "as_of", "lag_s")
"""Fields that are not a measure, or that a histogram has."""

VERDICTS: dict[Verdict, int] = {"well": 0, "degraded": 1, "ending": 2}

_Buckets = list[tuple[float, int]]

_KNOWN: dict[type, dict[str, bool]] = {}
"""Fields of the records seen so far; see `_grows`."""


class Exposition:
    """Samples by the names of their metrics, each with its kind and its help."""

    def __init__(self) -> None:
        self._metrics: dict[str, tuple[str, str, list[str]]] = {}

    def add(self, name: str, value: float, *, kind: str, help: str, **labels: str) -> None:
        """Add a sample; a value that is not finite is left out."""
        if isfinite(value):
            lines = self._metrics.setdefault(name, (kind, help, []))[2]
            lines.append(f"{name}{_labels(labels)} {value:.15g}")

    def add_histogram(self, name: str, buckets: _Buckets, total: float, *, help: str, **labels: str) -> None:
        """Add a histogram: the number of events up to each bound, and their summed sizes."""
        lines = self._metrics.setdefault(name, ("histogram", help, []))[2]
        count = 0
        for bound, events in buckets:
            count += events
            le = f"{bound:g}" if isfinite(bound) else "+Inf"
            lines.append(f"{name}_bucket{_labels({**labels, 'le': le})} {count}")
        lines += [f"{name}_sum{_labels(labels)} {total:.15g}", f"{name}_count{_labels(labels)} {count}"]

    def text(self) -> str:
        """Return all samples as text."""
        lines = []
        for name, (kind, help, samples) in self._metrics.items():
            lines += [f"# HELP {name} {help}", f"# TYPE {name} {kind}", *samples]
        return "\n".join((*lines, ""))


def add_counts(found: Exposition, counts: Counts, *, store: str = "") -> None:
    """Add the counts of one role, or of a store on one server."""
    role = next((name for name, kind in ROLES.items() if type(counts) is kind), "store" if store else "role")
    labels = {"node": counts.node} | ({"store": store} if store else {})
    for path, values, grows in _numbers(counts):
        name, scale = f"adam_{role}_{path}", 1.0
        for end, unit, units in UNITS:
            if name.endswith(end):
                name, scale = name.removesuffix(end) + unit, units
        help = f"{type(counts).__name__}.{path.replace('.', '_')}"
        if isinstance(values, tuple):
            buckets, total = values
            found.add_histogram(name, buckets, total, help=help, **labels)
        elif grows:
            found.add(f"{name}_total", values * scale, kind="counter", help=help, **labels)
        else:
            found.add(name, values * scale, kind="gauge", help=help, **labels)
    _add_traffic(found, role, counts.sent, labels)


def _add_traffic(found: Exposition, role: str, rows: Iterable[TrafficRow], labels: Mapping[str, str]) -> None:
    """Add what a role sent, by message type; peers share the series."""
    sums: dict[str, tuple[int, int]] = {}
    for row in rows:
        messages, size = sums.get(row.type, (0, 0))
        sums[row.type] = messages + row.messages, size + row.payload_bytes + row.frame_bytes
    for of, at in (("messages", 0), ("bytes", 1)):
        for kind, values in sorted(sums.items()):
            name = f"adam_{role}_sent_{of}_total"
            found.add(name, values[at], kind="counter", help="Counts.traffic", **labels, message=kind)


def add_status(found: Exposition, status: ClusterStatus) -> None:
    """Add the run and the condition of a cluster."""
    condition, run = status.condition, status.run
    numbers: dict[str, float | None] = {
        "adam_cluster_verdict": VERDICTS[condition.verdict],
        "adam_cluster_survivable_losses": condition.survives,
        "adam_cluster_lost_roles": len(condition.lost),
        "adam_cluster_waits": len(condition.waits),
        "adam_run_live_replicas": condition.live,
        "adam_run_replicas_taking_part": condition.taking_part,
    }
    if run is not None:
        numbers |= {
            "adam_run_replicas": run.replicas,
            "adam_run_training": run.phase == "training",
            "adam_run_epoch": run.epoch,
            "adam_run_epochs": run.epochs,
            "adam_run_images_per_second": run.images_per_s,
            "adam_run_loss": run.loss,
            "adam_run_left_seconds": run.left_s,
            "adam_run_test_accuracy_ratio": run.test_accuracy,
        }
    for name, value in numbers.items():
        if value is not None:
            found.add(name, value, kind="gauge", help="adam-async status --json")
    if condition.limited_by:
        found.add("adam_run_limit", 1, kind="gauge", help="limited_by of the status", by=condition.limited_by)


def _numbers(record: object, prefix: str = "") -> Iterator[tuple[str, Any, bool]]:
    """Yield a record's numbers, including those in its records: name, value, and whether it only grows.

    A histogram is a tuple of its buckets and its sum. If records are given by name, their growing numbers are
    added up.
    """
    kinds = _grows(type(record))
    for field, grows in kinds.items():
        value, name = getattr(record, field), f"{prefix}{field}"
        if field in LEFT_OUT:
            continue
        if field.endswith("_buckets"):
            if value:
                bounds = [*DURATIONS_S, float("inf")]
                total = getattr(record, f"{field.removesuffix('buckets')}s")
                yield f"{name.removesuffix('buckets')}s", ([*zip(bounds, value, strict=False)], total), True
        elif isinstance(value, bool | int | float):
            summed = f"{field.removesuffix('s')}buckets" in kinds and field.endswith("_s")
            if not summed:
                yield name, value, grows
        elif field == "staleness":
            yield name, _staleness(value), True
        elif isinstance(value, msgspec.Struct) or is_dataclass(value):
            yield from _numbers(value, f"{name}_")
        elif isinstance(value, dict) and all(isinstance(each, msgspec.Struct) for each in value.values()):
            sums: dict[str, float] = {}
            for each in value.values():
                for inner, number, inner_grows in _numbers(each, f"{name}_"):
                    if inner_grows and not isinstance(number, tuple):
                        sums[inner] = sums.get(inner, 0) + number
            for inner, number in sums.items():
                yield inner, number, True


def _staleness(histogram: Mapping[str, int]) -> tuple[_Buckets, float]:
    buckets = [(float(bound), 0) for bound in (*STALENESS, float("inf"))]
    total = 0
    for text, pushes in histogram.items():
        at = next((n for n, bound in enumerate(STALENESS) if int(text) <= bound), len(STALENESS))
        buckets[at] = buckets[at][0], buckets[at][1] + pushes
        total += int(text) * pushes
    return buckets, float(total)


def _grows(kind: type) -> dict[str, bool]:
    """Return the fields of a record, each with whether its number only grows."""
    if kind not in _KNOWN:
        hints = get_type_hints(kind, include_extras=True)
        _KNOWN[kind] = {name: _marked(hint) for name, hint in hints.items()}
    return _KNOWN[kind]


def _marked(hint: Any) -> bool:
    if get_origin(hint) is not Annotated:
        return False
    return any(
        isinstance(meta, msgspec.Meta) and (meta.extra or {}).get("grows") for meta in get_args(hint)[1:]
    )


def _labels(labels: Mapping[str, str]) -> str:
    """Return labels as text, with the escapes of the format."""
    words = []
    for name, value in labels.items():
        text = value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        words.append(f'{name}="{text}"')
    return f"{{{','.join(words)}}}" if words else ""


def role_metrics(role: Role) -> str:
    """Return a role's metrics; the leading controller's have the copies and the lost roles."""
    found = Exposition()
    add_counts(found, role.statistics())
    for name, counts in role.store_counts().items():
        add_counts(found, counts, store=name)
    if (cluster := role.led_map()) is not None:
        add_status(found, status_of(cluster, {}, leading=""))
    return found.text()


def run_metrics(own: Counts, progress: Progress, *, with_roles: bool) -> str:
    """Return a driver's metrics, with its run's state.

    Args:
        own: Counts of the driver.
        with_roles: Whether the metrics have the counts of the roles, which have no separate endpoints.
    """
    found = Exposition()
    add_counts(found, own)
    for _, counts in sorted(progress.roles.items()) if with_roles else ():
        add_counts(found, counts)
    if progress.status is not None:
        add_status(found, progress.status)
    return found.text()

"""Pure: reports of runs side by side, as rows of text."""

from collections.abc import Callable, Sequence

from adam_async.report.report import Report
from adam_async.run.series import waited_s


def compare(reports: Sequence[Report]) -> list[tuple[str, ...]]:
    """Return one row for each quantity: its name, then its value in each report.

    The table leaves out a quantity for which no report has a value.
    """
    rows = [(name, *(text_of(report) for report in reports)) for name, text_of in _ROWS]
    return [row for row in rows if any(row[1:])]


def _mode(report: Report) -> str:
    lag = report.config["lag"]
    return f"{report.config['consistency']}{f', lag {lag}' if lag else ''}"


def _plan(report: Report) -> str:
    config = report.config
    if config["partitions"] == 1:
        return ""
    halo = f", halo {config['halo']}" if config["halo"] != "auto" else ""
    return f"{config['plan']}{halo}"


def _schedule(report: Report) -> str:
    config = report.config
    words = [f"{config['rate']:.4g}"]
    if config["schedule"] != "constant":
        words.append(config["schedule"])
    if config["warm_up"]:
        words.append(f"warm-up {config['warm_up']:g}")
    return ", ".join(words)


def _cadence(report: Report) -> str:
    push, pull = report.config["push_every"], report.config["pull_every"]
    return f"{push} / {pull}" if (push, pull) != (1, 1) else ""


def _loss(report: Report) -> str:
    loss = report.epochs[-1].train_loss if report.epochs else None
    return "" if loss is None else f"{loss:.4f}"


def _sent(report: Report) -> str:
    return f"{sum(row.payload_bytes + row.frame_bytes for row in report.traffic) / 1e6:.1f}"


def _waited(what: int) -> Callable[[Report], str]:
    return lambda report: f"{waited_s(report.workers)[what]:.1f}" if report.workers else ""


_ROWS: tuple[tuple[str, Callable[[Report], str]], ...] = (
    ("ended", lambda report: report.ended if report.ended != "finished" else ""),
    ("model", lambda report: report.model.name),
    ("data", lambda report: report.data.name),
    ("consistency", _mode),
    ("replicas", lambda report: str(report.config["replicas"])),
    ("partitions", lambda report: str(report.config["partitions"])),
    ("plan", _plan),
    ("servers", lambda report: str(report.config["servers"])),
    ("weights", lambda report: str(report.config["weights"])),
    ("rule", lambda report: str(report.config["rule"])),
    ("rate", _schedule),
    ("push / pull every", _cadence),
    ("images per group", lambda report: str(report.config["images_per_group"])),
    ("epochs", lambda report: str(len(report.epochs))),
    ("test accuracy", lambda report: f"{report.totals.test_accuracy:.2%}"),
    ("train loss", _loss),
    ("images/s", lambda report: f"{report.totals.images_per_s:.0f}"),
    ("efficiency", lambda report: f"{report.baseline.efficiency:.2f}" if report.baseline else ""),
    ("training, s", lambda report: f"{report.totals.train_s:.1f}"),
    ("staleness, mean / max", lambda report: f"{report.staleness.mean:.2f} / {report.staleness.max}"),
    ("sent, MB", _sent),
    ("waited for servers, s", _waited(0)),
    ("waited for images, s", _waited(1)),
    ("waited for clocks, s", _waited(2)),
    ("memory, MB", lambda report: f"{report.totals.peak_rss_mb:.0f}"),
    ("events", lambda report: str(len(report.events)) if report.events else ""),
)

"""A real Prometheus scrapes every role of a cluster: no sample is refused, an alert fires, the sums agree."""

import json
import os
import shutil
import signal
import socket
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.processes.commands import Command, address_of, run

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="prometheus is not installed: Debian's package has it"
    ),
]

ALERTS = Path(__file__).resolve().parents[2] / "deploy" / "prometheus" / "alerts.yaml"

SCRAPED_S = float(os.environ.get("ADAM_TEST_SCRAPED_S", "20"))
"""Time for which Prometheus scrapes the cluster before the loss, in seconds."""

SCRAPE_S = 5
"""Interval of scrapes and alerts, and time for each scrape, in seconds, as in `deploy/prometheus`."""

ALERT_S = 15.0
"""Maximum time from the loss of a copy to its alert, in seconds."""

FAULTS = (
    "prometheus_target_scrapes_sample_duplicate_timestamp_total",
    "prometheus_target_scrapes_sample_out_of_bounds_total",
    "prometheus_target_scrapes_sample_out_of_order_total",
    "prometheus_target_scrapes_exceeded_sample_limit_total",
)


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


class Prometheus:
    """A server of Prometheus, for questions."""

    def __init__(self, port: int) -> None:
        self._port = port

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}{path}", timeout=10) as answer:
            return json.loads(answer.read())["data"]

    def value(self, query: str) -> float:
        """Return the sum of the values of an expression."""
        found = self.get(f"/api/v1/query?query={urllib.parse.quote(query)}")["result"]
        return sum(float(each["value"][1]) for each in found)

    def firing(self) -> set[str]:
        alerts = self.get("/api/v1/alerts")["alerts"]
        return {each["labels"]["alertname"] for each in alerts if each["state"] == "firing"}


def until(what: Callable[[], bool], within_s: float) -> float:
    """Wait until something is so; return the seconds that it took."""
    begin = time.monotonic()
    while not _tried(what):
        assert time.monotonic() - begin < within_s, f"not within {within_s} s"
        time.sleep(0.2)
    return time.monotonic() - begin


def _tried(what: Callable[[], bool]) -> bool:
    try:
        return what()
    except OSError:
        return False


def test_all_roles_are_scraped_and_a_lost_copy_is_an_alert(tmp_path: Path) -> None:
    ports = free_ports(9)
    health = iter(ports[:8])
    with ExitStack() as stack:

        def start(*words: str) -> Command:
            probes = ("--health", f"tcp://127.0.0.1:{next(health)}", "--metrics")
            return stack.enter_context(Command(*words, *probes))

        controller = start("controller", "--bind", "tcp://127.0.0.1:0")
        meet = address_of(controller)
        join = ("--controller", meet)
        servers = [start("ps", "--id", f"ps-{n}", *join) for n in range(3)]
        roles = [start("data", "--data", "digits", *join)]
        roles += [start("worker", "--threads", "1", "--join", meet) for _ in range(2)]
        for role in (*servers, *roles):
            address_of(role)
        report = tmp_path / "report.json"
        options = ("--servers", "2", "--copies", "2", "--replicas", "2", "--epochs", "100000")
        training = start("train", *options, "--report", str(report), *join)
        prometheus = Prometheus(start_prometheus(stack, tmp_path, ports))
        until(lambda: prometheus.value("adam_run_epoch") > 0, 120.0)
        until(lambda: prometheus.value('sum(up{job="adam"})') == 8, 60.0)
        time.sleep(SCRAPED_S)
        missed, slowest = (
            prometheus.get(f"/api/v1/query?query={urllib.parse.quote(f'{query}[{SCRAPED_S:.0f}s])')}")[
                "result"
            ]
            for query in (
                '1 > min_over_time(up{job="adam"}',
                'max_over_time(scrape_duration_seconds{job="adam"}',
            )
        )
        assert missed == [], slowest
        assert [name for name in FAULTS if prometheus.value(name)] == []
        scraped = prometheus.value("sum(scrape_samples_scraped)")
        assert scraped == prometheus.value("sum(scrape_samples_post_metric_relabeling)")
        assert scraped > 500
        assert prometheus.firing() == set()
        run("status", "--check", *join, code=0)

        shards = [prometheus.value(f'adam_ps_shards{{node="ps-{n}"}}') for n in range(3)]
        primary = shards.index(max(shards))
        servers[primary].signal(signal.SIGKILL)
        took_s = until(lambda: "AdamDegraded" in prometheus.firing(), ALERT_S)
        output = run("status", "--check", *join, code=10)
        assert f"ps-{primary} is lost since " in output
        sys.stdout.write(f"alert {took_s:.1f} s after the loss; {scraped:.0f} samples a scrape\n")

        run("stop", *join)
        training.ends(0)
        found = json.loads(report.read_text())
        sums = {
            "adam_worker_data_groups_total": sum(each["data"]["groups"] for each in found["workers"]),
            "adam_worker_parameters_acknowledged_total": sum(
                each["parameters"]["acknowledged"] for each in found["workers"]
            ),
            f'adam_ps_staleness_count{{node!="ps-{primary}"}}': sum(found["staleness"]["histogram"].values()),
        }
        for name, total in sums.items():
            until(lambda name=name, total=total: prometheus.value(f"sum({name})") == total, 30.0)


def start_prometheus(stack: ExitStack, folder: Path, ports: list[int]) -> int:
    """Start Prometheus over all roles; return its port."""
    targets = ", ".join(f'"127.0.0.1:{port}"' for port in ports[:8])
    (folder / "prometheus.yaml").write_text(f"""
global: {{scrape_interval: {SCRAPE_S}s, evaluation_interval: {SCRAPE_S}s}}
rule_files: ["{ALERTS}"]
scrape_configs:
  - job_name: adam
    static_configs: [{{targets: [{targets}]}}]
  - job_name: prometheus
    static_configs: [{{targets: ["127.0.0.1:{ports[8]}"]}}]
""")
    words = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{ports[8]}",
    ]
    stack.enter_context(Command.of(words, folder=folder))
    return ports[8]

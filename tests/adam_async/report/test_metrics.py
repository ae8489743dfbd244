"""Metrics have the names and numbers of the counts, in base units, and no series for each shard."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from adam_async.report.metrics import Exposition, add_counts, add_status, run_metrics
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.cluster_status import status_of
from adam_async.run.counts import Counts, StoreCounts
from adam_async.run.progress import Progress
from tests.adam_async.cluster_maps import bundle_map, run_record
from tests.adam_async.role_counts import counts_of

DEPLOY = Path(__file__).resolve().parents[3] / "deploy" / "prometheus"
SENT = {"type": "Push", "messages": 3, "payload_bytes": 40, "frame_bytes": 2}
BUCKETS = [2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1]
DISK = {
    "updates": 1,
    "writes": 2,
    "bytes": 3,
    "amplification": 1.5,
    "rounds": 4,
    "syncs": 5,
    "disk_bytes": 6,
    "period_s": 1.0,
    "as_of": None,
    "full": True,
}


def text_of(*several: Counts, store: str = "") -> str:
    found = Exposition()
    for counts in several:
        add_counts(found, counts, store=store)
    return found.text()


def roles(shards: int = 3) -> list[Counts]:
    """Return the counts of a role of each kind, as full as roles report them."""
    numbers = {str(shard): shard for shard in range(shards)}
    return [
        counts_of(
            "worker",
            "worker-0",
            cpu_s=1.25,
            peak_rss_mb=2.0,
            parameters={"numbers": numbers, "admission_wait_s": 1.5, "admission_wait_buckets": BUCKETS},
            data={"groups": 7, "blocked_buckets": BUCKETS},
            clock_wait_buckets=BUCKETS,
            lag_s={"p50": 0.1, "p99": 0.2, "max": 0.3},
            late_s=0.5,
            late_buckets=BUCKETS,
            traffic=[SENT, {**SENT, "to": "ps-1"}],
        ),
        counts_of(
            "ps",
            "ps-0",
            shards=shards,
            versions=numbers,
            staleness={"0": 5, "3": 2, "999": 1},
            clients={"0": {"staleness": {"1": 2}, "clock": 3}},
            disk=DISK,
        ),
        counts_of("data", "data-0", images=160, loss=None, cache={"resident_images": 1, "resident_bytes": 2}),
        counts_of("controller", "controller", term=2),
    ]


def test_names_have_base_units_and_counters_end_with_total() -> None:
    lines = text_of(*roles()).splitlines()
    for line in (
        'adam_worker_cpu_seconds_total{node="worker-0"} 1.25',
        'adam_worker_peak_rss_bytes{node="worker-0"} 2097152',
        'adam_worker_data_groups_total{node="worker-0"} 7',
        'adam_data_images{node="data-0"} 160',
        'adam_data_cache_resident_bytes{node="data-0"} 2',
        'adam_ps_disk_full{node="ps-0"} 1',
        'adam_controller_term{node="controller"} 2',
        "# HELP adam_worker_clock_waits_total WorkerCounts.clock_waits",
        "# TYPE adam_worker_clock_waits_total counter",
        "# TYPE adam_worker_clock gauge",
    ):
        assert line in lines
    assert not [line for line in lines if "pid" in line or " nan" in line.lower() or "_lag_" in line]


def test_messages_to_all_peers_are_one_series_of_each_type() -> None:
    lines = text_of(*roles()).splitlines()
    assert 'adam_worker_sent_messages_total{node="worker-0",message="Push"} 6' in lines
    assert 'adam_worker_sent_bytes_total{node="worker-0",message="Push"} 84' in lines


def test_buckets_are_histograms_with_sum_and_count() -> None:
    lines = text_of(*roles()).splitlines()
    name = "adam_worker_parameters_admission_wait_seconds"
    assert f"# TYPE {name} histogram" in lines
    assert f'{name}_bucket{{node="worker-0",le="0.003"}} 3' in lines
    assert f'{name}_bucket{{node="worker-0",le="+Inf"}} 4' in lines
    assert f'{name}_sum{{node="worker-0"}} 1.5' in lines
    assert f'{name}_count{{node="worker-0"}} 4' in lines
    assert not [line for line in lines if line.startswith(f"{name}_total")], "the histogram has the sum"
    staleness = [line for line in lines if line.startswith("adam_ps_staleness")]
    assert 'adam_ps_staleness_bucket{node="ps-0",le="4"} 7' in staleness
    assert staleness[-2:] == [
        'adam_ps_staleness_sum{node="ps-0"} 1005',
        'adam_ps_staleness_count{node="ps-0"} 8',
    ]


def test_more_shards_and_peers_make_no_more_series() -> None:
    assert len(text_of(*roles(shards=3)).splitlines()) == len(text_of(*roles(shards=3000)).splitlines())


def test_counts_of_a_store_have_its_name_with_escapes() -> None:
    text = text_of(StoreCounts(node="ps-0", shards=4), store='a"b\\c\nd')
    assert 'adam_store_shards{node="ps-0",store="a\\"b\\\\c\\nd"} 4' in text.splitlines()


def test_the_status_is_that_of_the_command() -> None:
    found = Exposition()
    add_status(found, status_of(bundle_map({"ps-0": ("ps-0",)}), {}, leading=""))
    lines = found.text().splitlines()
    assert "adam_cluster_verdict 1" in lines, "a copy lacks"
    assert "adam_cluster_survivable_losses 0" in lines
    assert not [line for line in lines if "loss" in line and line.startswith("adam_run_loss")]


@pytest.mark.parametrize(("phase", "trains"), [("training", 1), ("between", 0), ("finished", 0)])
def test_workers_without_work_are_no_stall_after_a_run_or_between_its_epochs(phase: str, trains: int) -> None:
    found = Exposition()
    add_status(found, status_of(ClusterMap(run=run_record("r", phase=phase, epoch=2)), {}, leading=""))
    assert f"adam_run_training {trains}" in found.text().splitlines()
    (rule,) = re.findall(r"alert: AdamStalled\n.+?for:", (DEPLOY / "alerts.yaml").read_text(), re.S)
    assert "(adam_run_training) == 1" in rule


def test_a_driver_has_the_newest_counts_of_roles_that_are_there() -> None:
    own, progress = counts_of("driver", "driver"), Progress(consistency="asp")
    assert "adam_cluster_verdict" not in run_metrics(own, progress, with_roles=True)
    status = status_of(ClusterMap(run=run_record("r", phase="training")), {}, leading="")
    roles = {"worker-0": counts_of("worker", "worker-0", data={"groups": 2})}
    progress.update(roles, status, now=1.0)
    with_roles = run_metrics(own, progress, with_roles=True).splitlines()
    assert 'adam_worker_data_groups_total{node="worker-0"} 2' in with_roles
    alone = run_metrics(own, progress, with_roles=False)
    assert "worker-0" not in alone, "its own endpoint has them"
    assert "adam_cluster_verdict" in alone


def names_in(text: str) -> set[str]:
    return set(re.findall(r"\badam_[a-z_]+[a-z]\b(?!\.\+)", text))


def all_names() -> set[str]:
    """Return the names of all series of a cluster."""
    found = Exposition()
    for counts in roles():
        add_counts(found, counts)
    add_status(found, status_of(bundle_map({"ps-0": ("ps-0",)}), {}, leading=""))
    names = {re.split(r"[{ ]", line)[0] for line in found.text().splitlines() if not line.startswith("#")}
    left_out = ("adam_run_loss", "adam_run_test_accuracy_ratio", "adam_run_left_seconds", "adam_run_limit")
    return names | set(left_out)  # known during a training only


def test_each_metric_of_dashboard_and_alerts_is_one_of_a_role() -> None:
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    asked = {target["expr"] for panel in dashboard["panels"] for target in panel["targets"]}
    rules = re.sub(r"(?m)^ *(#|action:|summary:).*$", "", (DEPLOY / "alerts.yaml").read_text())
    found = set().union(*(names_in(expression) for expression in asked), names_in(rules))
    patterns = set(re.findall(r'__name__=~"([^"]+)"', " ".join(asked)))
    assert found - patterns <= all_names()
    assert len(found) > 12
    for pattern in patterns:
        assert [name for name in all_names() if re.fullmatch(pattern, name)], pattern


def test_panels_lie_beside_each_other() -> None:
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    cells = [
        (x, y)
        for panel in dashboard["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) == 23


def test_the_types_of_grafana_keep_each_field_of_the_dashboard() -> None:
    """No package registry has a Grafana server, so the types of its own SDK read the file instead of it."""
    models = pytest.importorskip(
        "grafana_foundation_sdk.models.dashboard",
        reason="needs grafana-foundation-sdk; a Grafana server has not loaded the dashboard",
    )
    given = json.loads((DEPLOY / "grafana.json").read_text())
    read = models.Dashboard.from_json(given)
    kept = json.loads(json.dumps(read.to_json(), default=lambda part: part.to_json()))
    assert [*lost_fields(given, kept)] == []
    assert [*lost_fields({"a": [{"unit": 1}]}, {"a": [{}]})] == [".a[0].unit"]


def lost_fields(given: object, kept: object, path: str = "") -> Iterator[str]:
    """The fields of a JSON text that another one lacks, or has with other values."""
    match given, kept:
        case dict(), dict():
            for name, value in given.items():
                yield from (
                    lost_fields(value, kept[name], f"{path}.{name}") if name in kept else (f"{path}.{name}",)
                )
        case list(), list() if len(given) == len(kept):
            for number, (value, other) in enumerate(zip(given, kept, strict=True)):
                yield from lost_fields(value, other, f"{path}[{number}]")
        case _ if given != kept:
            yield path


ALERT_TEST = """
rule_files: [{rules}]
evaluation_interval: 5s
tests:
  - interval: 5s
    input_series:
      - {{series: 'adam_cluster_verdict{{job="adam"}}', values: '0 0 1 1 1 1 2 2'}}
      - {{series: 'up{{job="adam",instance="a"}}', values: '1 1 0 0 0 0 0 0'}}
    alert_rule_test:
      - {{eval_time: 5s, alertname: AdamDegraded, exp_alerts: []}}
      - eval_time: 10s
        alertname: AdamDegraded
        exp_alerts: [{{exp_labels: {{severity: warning, job: adam}}, exp_annotations: {degraded}}}]
      - eval_time: 35s
        alertname: AdamEnding
        exp_alerts: [{{exp_labels: {{severity: critical, job: adam}}, exp_annotations: {ending}}}]
      - {{eval_time: 15s, alertname: AdamRoleDown, exp_alerts: []}}
"""


def promtool(*words: str, text: str = "") -> None:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not installed: the package prometheus of Debian has it")
    done = subprocess.run([tool, *words], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_text_the_rules_and_the_configuration() -> None:
    promtool("check", "rules", str(DEPLOY / "alerts.yaml"))
    promtool("check", "config", str(DEPLOY / "prometheus.yaml"))
    # Its advice about names is not followed: `staleness` has no unit.
    found = Exposition()
    for counts in roles():
        add_counts(found, counts)
    add_status(found, status_of(bundle_map({"ps-0": ("ps-0",)}), {}, leading=""))
    tool = shutil.which("promtool")
    assert tool is not None
    done = subprocess.run(
        [tool, "check", "metrics"], input=found.text(), capture_output=True, text=True, check=False
    )
    assert "error while linting" not in done.stderr, done.stderr


def test_a_lost_copy_is_an_alert_within_fifteen_seconds(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    (group,) = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]
    told = {rule["alert"]: json.dumps(rule["annotations"]) for rule in group["rules"]}
    text = ALERT_TEST.format(
        rules=DEPLOY / "alerts.yaml", degraded=told["AdamDegraded"], ending=told["AdamEnding"]
    )
    (tmp_path / "alerts.test.yaml").write_text(text)
    promtool("test", "rules", str(tmp_path / "alerts.test.yaml"))

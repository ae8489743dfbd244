"""Pure: the audit of a training run, which compares acknowledged with applied pushes, by shard and by
replica.

Workers and servers count independently. A worker numbers its pushes to each shard from 1, and its data server
ends an epoch only after every push is acknowledged. So the last numbers count the acknowledged pushes. A
server counts each applied push in the shard's version and in the replica's row; both are part of the copies,
so a failover keeps them. A push that a server has acknowledged and lost leaves the version below the sum of
the numbers; a push applied twice raises the version above it.

Versions count pushes in asp and ssp; in bsp they count sums, so the audit does not apply.

A worker's numbers end with its session. After the loss of a worker the audit is incomplete.
"""

from collections import Counter
from collections.abc import Mapping

from adam_async.run.cluster_map import ClusterMap
from adam_async.run.counts import Counts, PushCounts, ServerCounts, WorkerCounts
from tests.drill.judging import Audit, Observations


class WorkerSlots:
    """The slots of a run's workers, from the maps in which the run trains."""

    def __init__(self) -> None:
        self.replicas: dict[str, int] = {}
        """Replica of each worker."""
        self.replaced: list[str] = []
        """Workers with a second session; their first session's numbers are lost."""
        self._run = ""
        self._sessions: dict[str, tuple[int, int]] = {}

    def observe(self, cluster: ClusterMap) -> None:
        """Take a newer map."""
        run = cluster.run
        if run is None or run.phase not in ("training", "between"):
            return
        if run.id != self._run:
            self._run = run.id
            for memory in (self.replicas, self.replaced, self._sessions):
                memory.clear()
        for name in cluster.live("worker"):
            node = cluster.nodes[name]
            session = (node.incarnation, node.placed)
            if node.replica < 0:
                continue
            self.replicas[name] = node.replica
            if self._sessions.setdefault(name, session) != session and name not in self.replaced:
                self.replaced.append(name)


def audit_run(statistics: Mapping[str, Counts], slots: WorkerSlots, name: str, seen: Observations) -> None:
    """Add the audit of a run to the observations of a drill.

    Args:
        statistics: Counts of the roles at the end of the run, by node.
        name: The run, in words.
    """
    gaps = [f"{worker} had several sessions" for worker in slots.replaced]
    workers, servers = dict[str, PushCounts](), dict[str, ServerCounts]()
    for node, counts in statistics.items():
        if isinstance(counts, ServerCounts) and counts.versions:
            servers[node] = counts
        elif isinstance(counts, WorkerCounts) and counts.parameters is not None and node in slots.replicas:
            workers[node] = counts.parameters
    gaps += [f"{worker} did not report its pushes" for worker in slots.replicas if worker not in workers]
    reported = Counter(shard for server in servers.values() for shard in server.versions)
    wanted = sorted({shard for worker in workers.values() for shard in worker.numbers})
    if silent := [shard for shard in wanted if not reported[shard]]:
        gaps.append(f"no server reported shard {silent[0]}" + _more(silent))
    if several := [shard for shard, times in reported.items() if times > 1]:
        gaps.append(f"several servers reported shard {several[0]}" + _more(several))
    if not slots.replicas:
        gaps.append("no worker was seen in training")
    seen.audit_gaps += [f"{name}: {gap}" for gap in gaps]
    if gaps:
        return
    replicas = {worker: str(replica) for worker, replica in slots.replicas.items()}
    audit, differences = compare(workers, servers, replicas)
    seen.audit = audit if seen.audit is None else seen.audit.plus(audit)
    seen.differences += [f"{name}: {difference}" for difference in differences]


def compare(
    workers: Mapping[str, PushCounts], servers: Mapping[str, ServerCounts], replicas: Mapping[str, str]
) -> tuple[Audit, list[str]]:
    """Compare the counts of workers and servers; return the audit, and its differences if a push is lost or
    doubled.

    A refused push has a number and no application. Each unanswered push may or may not be applied.
    """
    sent, sent_by, open_by = Counter[str](), Counter[str](), Counter[str]()
    unanswered = sum(worker.unanswered for worker in workers.values())
    for name, worker in workers.items():
        sent.update(worker.numbers)
        sent_by[replicas[name]] += sum(worker.numbers.values())
        open_by[replicas[name]] += worker.unanswered * len(worker.numbers)
    applied, applied_by = Counter[str](), Counter[str]()
    for server in servers.values():
        applied.update(server.versions)
        for replica, client in server.clients.items():
            applied_by[replica] += sum(client.staleness.values())
    refused = sum(server.refused for server in servers.values())
    by_shard = _differences(sent, applied, dict.fromkeys(sent, unanswered), refused)
    by_replica = _differences(sent_by, applied_by, open_by, refused)
    lost, twice = max(by_shard[0], by_replica[0]), max(by_shard[1], by_replica[1])
    texts = [
        f"{kind} {key}: {was[key]:,} acknowledged, {now[key]:,} applied"
        for kind, was, now in (("shard", sent, applied), ("replica", sent_by, applied_by))
        for key in sorted(was | now, key=lambda key: (len(key), key))
        if was[key] != now[key]
    ]
    if refused:
        texts.append(f"{refused:,} refused")
    acknowledged = sum(worker.acknowledged for worker in workers.values())
    audit = Audit(acknowledged=acknowledged, unanswered=unanswered, lost=lost, twice=twice)
    return audit, texts if lost or twice else []


def _differences(
    sent: Counter[str], applied: Counter[str], open: Mapping[str, int], refused: int
) -> tuple[int, int]:
    """Return the numbers of lost and of doubled pushes, as counted by shards or by replicas.

    Args:
        open: Pushes without an answer.
        refused: Refused pushes, over all keys.
    """
    missing = {key: sent[key] - applied[key] for key in sent if sent[key] > applied[key]}
    surplus = sum((applied - sent).values())
    late = sum(max(count - open.get(key, 0), 0) for key, count in missing.items())
    unapplied = sum(missing.values())
    return max(late - refused, 0), surplus + max(refused - unapplied, 0)


def _more(items: list[str]) -> str:
    return f" and {len(items) - 1} more" if len(items) > 1 else ""

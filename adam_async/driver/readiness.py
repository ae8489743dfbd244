"""How a driver gets its roles together: who must be there, who is ready, who is missing."""

import asyncio
from collections.abc import Callable
from typing import Any

from adam_async.controller.client import Membership
from adam_async.driver.role_queries import Inquiries
from adam_async.errors import ConfigError, DeadlineExceeded, RoleDied, RoleFailed, RunFailed
from adam_async.run.cluster_map import ClusterMap, NodeRecord, ready_word
from adam_async.run.config import Config, default_in_flight
from adam_async.run.progress import Progress
from transport import TransportError

LOOK_S = 1.0
"""How often the roles are asked how far they are."""

LONGER = "; where roles only need longer, raise prepare_s under [waits] in the file of --config"
"""Ends what is said of roles that did not get ready within `prepare_s`."""

NO_RUN = "-"
"""No node is ready for this."""


class Readiness:
    """Waits for the roles of one configuration, each wait at most `prepare_s`.

    Args:
        config: How many of each role.
        membership: Where they join.
        inquiries: How they are asked.
        progress: Says what is waited for.
    """

    def __init__(
        self, *, config: Config, membership: Membership, inquiries: Inquiries, progress: Progress
    ) -> None:
        self._config = config
        self._waits = config.waits
        self._membership = membership
        self._inquiries = inquiries
        self._progress = progress
        self._workers = config.replicas * config.partitions
        cut = f" ({config.partitions} for each of {config.replicas} replica(s))"
        self._cut = cut if config.partitions > 1 else ""
        data = f"{config.data_servers} data servers" if config.data_servers > 1 else "a data server"
        self._wanted = (
            f"{config.servers} parameter server(s), {data} and {self._workers} worker(s){self._cut}"
        )

    async def wait_for_data(self) -> dict[str, Any]:
        """Wait for a data server, and return what it says of its data: name, source, shape, sizes.

        Raises:
            DeadlineExceeded: None joined within `prepare_s`.
        """
        cluster = await self._wait_for(
            lambda m: bool(m.live("data")) and self._membership.joined, "a data server to join"
        )
        self._progress.phase = "preparing"
        return cluster.nodes[cluster.live("data")[0]].info

    async def wait_for_workers(self) -> int:
        """Wait until there are workers for all replicas; returns the groups in flight of these together.

        Raises:
            DeadlineExceeded: They were not there within `prepare_s`; names who is missing and who is here.
            ConfigError: The run is to be recorded, and a worker has several compute threads.
        """
        config = self._config
        try:
            cluster = await self._wait_for(self._are_all_here, self._wanted)
        except DeadlineExceeded as error:
            raise self._missing(NO_RUN) from error
        several = [w for w in cluster.live("worker") if int(cluster.nodes[w].info.get("threads", 1)) > 1]
        if config.record and several:
            raise ConfigError(
                f"a run is recorded with one compute thread per worker, and {', '.join(several)} have more: "
                "start them with --threads 1"
            )
        chosen = cluster.live("worker")[: self._workers]
        return -(-sum(self._at_once(cluster.nodes[worker]) for worker in chosen) // config.partitions)

    def _are_all_here(self, cluster: ClusterMap) -> bool:
        workers, data = len(cluster.live("worker")), len(cluster.live("data"))
        return workers >= self._workers and data >= self._config.data_servers

    def _at_once(self, worker: NodeRecord) -> int:
        """Groups in flight of a worker's replica; all its workers have the same ones in flight."""
        given, threads = int(worker.info.get("in_flight", 0)), int(worker.info.get("threads", 1))
        return max(given or default_in_flight(threads, self._config.partitions), self._config.push_every)

    async def wait_placed(self, run: str) -> ClusterMap:
        """Wait until it is known which servers hold the shards of a run.

        Raises:
            DeadlineExceeded: Too few servers joined; names who is missing and who is here.
            RunFailed, RoleDied: The run is over.
        """
        try:
            cluster = await self._wait_for(lambda m: _is_over(m, run) or bool(m.buckets), self._wanted)
        except DeadlineExceeded as error:
            raise self._missing(run) from error
        check_failed(cluster, run)
        return cluster

    async def wait_training(self, run: str) -> ClusterMap:
        """Wait until all roles are ready and training begins.

        Raises:
            DeadlineExceeded: They were not ready; names who is missing and who is here.
            RunFailed, RoleDied: The run is over.
        """
        self._progress.phase = "preparing"
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + self._waits.prepare_s
        while (left := ends_at - loop.time()) > 0:
            try:
                cluster = await self._membership.wait_for(
                    lambda m: m.run is None or m.run.id != run or m.run.phase != "preparing",
                    self._wanted,
                    min(left, LOOK_S),
                )
            except DeadlineExceeded:
                await self._read_preparation(run)
            else:
                check_failed(cluster, run)
                assert cluster.run is not None
                self._progress.plan, self._progress.together = cluster.run.plan, cluster.run.together
                self._progress.missing = ""
                return cluster
        raise self._missing(run, f"; the run was {self._progress.phase}{LONGER}")

    async def _wait_for(self, there: Callable[[ClusterMap], bool], what: str) -> ClusterMap:
        """Wait for a map, at most `prepare_s`, and show meanwhile which roles lack."""

        def look(cluster: ClusterMap) -> bool:
            self._show_lacking(cluster)
            return there(cluster)

        before = self._progress.phase
        cluster = await self._membership.wait_for(look, what, self._waits.prepare_s)
        self._progress.missing, self._progress.phase = "", before
        return cluster

    def _show_lacking(self, cluster: ClusterMap) -> bool:
        """Show of which roles there are too few; returns whether there are any."""
        if not self._membership.joined:  # nobody can be seen from outside
            return False
        lacking = [
            f"{wanted - here} of {wanted} {role}s" if wanted > 1 else f"a {role}"
            for role, here, wanted in (
                ("data server", len(cluster.live("data")), self._config.data_servers),
                ("parameter server", len(cluster.live("ps")), self._config.servers),
                ("worker", len(cluster.live("worker")), self._workers),
            )
            if here < wanted
        ]
        cut = self._cut if len(cluster.live("worker")) < self._workers else ""
        self._progress.missing = f"{', '.join(lacking)}{cut}"
        if lacking:
            self._progress.phase = f"waiting for {lacking[0]}"
        return bool(lacking)

    async def _read_preparation(self, run: str) -> None:
        """See who lacks; ask the workers how far their kernels are compiled, for the live table."""
        cluster = self._membership.map
        if self._show_lacking(cluster):
            return
        addresses = [cluster.nodes[worker].address for worker in cluster.live("worker")]
        try:
            # Who is gone, and not missed yet, holds nobody up.
            answers = [await self._inquiries.statistics(each, run, dial_s=LOOK_S) for each in addresses]
        except TransportError:
            return
        kernels = [values["kernels"] for _, values in answers if "kernels" in values]
        done, total = min(
            ((each["compiled"], each["of"]) for each in kernels),
            key=lambda each: each[0] - each[1],
            default=(0, 0),
        )
        self._progress.phase = f"preparing kernels {done}/{total}" if done < total else "preparing"

    def _missing(self, run: str, why: str = "") -> DeadlineExceeded:
        return DeadlineExceeded(
            f"{self._wanted}; {who_is_here(self._membership.map, run)}{why}", self._waits.prepare_s
        )


def check_failed(cluster: ClusterMap, run: str) -> None:
    """Raise why a run is over, if it is.

    Raises:
        RoleDied: By the loss of a role; names it.
        RoleFailed: A role cannot do its part; names it.
        RunFailed: For another reason.
    """
    if cluster.run is None:
        raise RunFailed(f"run {run} was replaced by none: the controller was started again; train once more")
    if cluster.run.id != run:
        raise RunFailed(f"run {run} was replaced by {cluster.run.id}")
    if cluster.run.phase == "failed" and cluster.run.lost:
        lost, reason = cluster.run.lost, cluster.run.reason
        if reason.startswith(f"{lost} died: "):
            raise RoleDied(lost, reason.removeprefix(f"{lost} died: "))
        raise RoleFailed(lost, reason.removeprefix(f"{lost} "))
    if cluster.run.phase == "failed":
        raise RunFailed(f"the run failed: {cluster.run.reason}")


def _is_over(cluster: ClusterMap, run: str) -> bool:
    return cluster.run is None or cluster.run.id != run or cluster.run.phase == "failed"


def who_is_here(cluster: ClusterMap, run: str) -> str:
    """Say which roles joined, and which of them are ready for a run."""
    nodes = [
        f"{name} ({'ready' if _is_ready(cluster, node, run) else 'not ready'})"
        for name, node in sorted(cluster.nodes.items())
        if node.live and node.role != "driver"
    ]
    return f"joined so far: {', '.join(nodes) or 'nobody'}"


def _is_ready(cluster: ClusterMap, node: NodeRecord, run: str) -> bool:
    if node.role == "worker":
        return node.ready == ready_word(run, cluster.replica_generation(node.replica))
    return node.ready == run

"""Readiness of a run's roles: required, ready and missing roles."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from adam_async.controller.client import Membership
from adam_async.driver.role_queries import RoleQueries
from adam_async.errors import ConfigError, DeadlineExceeded, RoleDied, RoleFailed, RunFailed
from adam_async.run.cluster_map import ClusterMap, NodeRecord, ready_word
from adam_async.run.config import Config, replica_in_flight
from adam_async.run.counts import WorkerCounts
from adam_async.run.progress import Progress
from adam_async.run.store_record import Member, served_word
from transport import TransportError

POLL_S = 1.0
"""Seconds between two polls of the roles' progress."""

LONGER = "; where roles only need longer, raise prepare_s under [waits] in the file of --config"
"""End of the error message about roles that were not ready within `prepare_s`."""

COMMANDS = {
    "data server": "data --controller",
    "parameter server": "ps --controller",
    "worker": "worker --join",
}
"""Words of the command that starts a role, before the addresses of the controllers, by the role in words."""

NO_RUN = "-"
"""Id of no run: an error before the submission uses it, and so lists all joined roles as not ready."""


class Readiness:
    """Waits for the roles of one configuration; a wait takes at most `prepare_s`, unless it gets a time."""

    def __init__(
        self, *, config: Config, membership: Membership, queries: RoleQueries, progress: Progress
    ) -> None:
        self._config = config
        self._waits = config.waits
        self._membership = membership
        self._queries = queries
        self._progress = progress
        self._workers = config.replicas * config.partitions
        cut = f" ({config.partitions} for each of {config.replicas} replica(s))"
        self._cut = cut if config.partitions > 1 else ""
        data = f"{config.data_servers} data servers" if config.data_servers > 1 else "a data server"
        self._wanted = (
            f"{config.servers} parameter server(s), {data} and {self._workers} worker(s){self._cut}"
        )

    async def wait_for_data(self) -> dict[str, Any]:
        """Wait for a data server; return its description of the data: name, source, shape, sizes.

        Raises:
            DeadlineExceeded: No data server joined within `prepare_s`.
        """
        cluster = await self._wait_until(
            lambda m: bool(m.live("data")) and self._membership.joined, "a data server to join"
        )
        self._progress.phase = "preparing"
        return cluster.nodes[cluster.live("data")[0]].info

    async def wait_for_workers(self) -> int:
        """Wait for all workers and data servers; returns the sum of the replicas' groups in flight.

        Raises:
            DeadlineExceeded: Too few workers or data servers joined within `prepare_s`; the error lists
                required and joined roles.
            ConfigError: The run is to be recorded, and a worker has several compute threads.
        """
        config = self._config
        cluster = await self._wait_for(self._are_all_here)
        several = [w for w in cluster.live("worker") if int(cluster.nodes[w].info.get("threads", 1)) > 1]
        if config.record and several:
            raise ConfigError(
                f"a run is recorded with one compute thread per worker, and {', '.join(several)} have more: "
                "start them with --threads 1"
            )
        chosen = cluster.live("worker")[: self._workers]
        return -(-sum(self._at_once(cluster.nodes[worker]) for worker in chosen) // config.partitions)

    async def wait_for_servers(self) -> ClusterMap:
        """Wait until as many servers are there as the run wants.

        Raises:
            DeadlineExceeded: Too few servers joined within `prepare_s`; the error lists required and joined
                roles.
        """
        return await self._wait_for(lambda m: len(m.live("ps")) >= self._config.servers)

    def _are_all_here(self, cluster: ClusterMap) -> bool:
        workers, data = len(cluster.live("worker")), len(cluster.live("data"))
        return workers >= self._workers and data >= self._config.data_servers

    def _at_once(self, worker: NodeRecord) -> int:
        """Return the number of groups in flight of a worker's replica, from the worker's record."""
        config = self._config
        return max(replica_in_flight([worker.info], config.partitions), config.push_every)

    async def wait_placed(self, run: str) -> ClusterMap:
        """Wait until the shards of a run are placed on servers.

        Raises:
            DeadlineExceeded: Too few servers joined; the error lists required and joined roles.
            RunFailed, RoleDied: The run is over.
        """
        cluster = await self._wait_for(lambda m: _is_over(m, run) or bool(m.buckets), run)
        check_failed(cluster, run)
        return cluster

    async def wait_failure(self, run: str, timeout_s: float) -> None:
        """Wait at most `timeout_s` for a run to fail; for errors see `check_failed`."""
        try:
            cluster = await self._membership.wait_for(lambda m: _is_over(m, run), "a failure", timeout_s)
        except DeadlineExceeded:
            return
        check_failed(cluster, run)

    async def wait_training(self, run: str) -> ClusterMap:
        """Wait until all roles are ready and training begins.

        Raises:
            DeadlineExceeded: A role was not ready; the error lists required and joined roles.
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
                    min(left, POLL_S),
                )
            except DeadlineExceeded:
                await self._read_preparation(run)
            else:
                check_failed(cluster, run)
                self._progress.missing = ""
                return cluster
        raise self._missing(run, f"; the run was {self._progress.phase}{LONGER}")

    async def _wait_for(self, there: Callable[[ClusterMap], bool], run: str = NO_RUN) -> ClusterMap:
        """Wait as `_wait_until` does; the error lists the joined roles, and which are ready for a run."""
        try:
            return await self._wait_until(there, self._wanted)
        except DeadlineExceeded as error:
            raise self._missing(run) from error

    async def _wait_until(self, there: Callable[[ClusterMap], bool], what: str) -> ClusterMap:
        """Wait for a map, at most `prepare_s`, and show the missing roles during the wait."""

        def accept(cluster: ClusterMap) -> bool:
            self._show_missing(cluster)
            return there(cluster)

        before = self._progress.phase
        cluster = await self._membership.wait_for(accept, what, self._waits.prepare_s)
        self._progress.missing, self._progress.phase = "", before
        return cluster

    def _show_missing(self, cluster: ClusterMap) -> bool:
        """Show the missing roles; returns whether a role is missing."""
        if not self._membership.joined:  # before the driver joins, its map is empty
            return False
        missing = [
            f"{wanted - here} of {wanted} {role}s" if wanted > 1 else f"a {role}"
            for role, here, wanted in (
                ("data server", len(cluster.live("data")), self._config.data_servers),
                ("parameter server", len(cluster.live("ps")), self._config.servers),
                ("worker", len(cluster.live("worker")), self._workers),
            )
            if here < wanted
        ]
        cut = self._cut if len(cluster.live("worker")) < self._workers else ""
        self._progress.missing = f"{', '.join(missing)}{cut}"
        if missing:
            self._progress.phase = f"waiting for {', '.join(missing)}{self._how_to_start(missing)}"
        return bool(missing)

    def _how_to_start(self, missing: Sequence[str]) -> str:
        """Return the commands for missing roles that a person starts, with the deadline; else empty."""
        addresses = ",".join(self._membership.controllers)
        if self._config.processes or not addresses.startswith("tcp://"):
            return ""
        commands = [
            f"adam-async {words} {addresses}"
            for name, words in COMMANDS.items()
            if any(name in each for each in missing)
        ]
        return f" (at most {self._waits.prepare_s:g} s); start one with: {' and '.join(commands)}"

    async def _read_preparation(self, run: str) -> None:
        """Show the missing roles; if none is missing, show the progress of the worker with most kernels left
        to compile."""
        cluster = self._membership.map
        if self._show_missing(cluster):
            return
        addresses = [cluster.nodes[worker].address for worker in cluster.live("worker")]
        try:
            # A short deadline: a worker may be lost and still be live in the map.
            answers = [await self._queries.statistics(each, run, dial_s=POLL_S) for each in addresses]
        except TransportError:
            return
        workers = [each.kernels for each in answers if isinstance(each, WorkerCounts)]
        kernels = [(each.compiled, each.of) for each in workers if each is not None]
        done, total = min(kernels, key=lambda each: each[0] - each[1], default=(0, 0))
        self._progress.phase = f"preparing kernels {done}/{total}" if done < total else "preparing"

    def _missing(self, run: str, why: str = "") -> DeadlineExceeded:
        return DeadlineExceeded(
            f"{self._wanted}; {joined_roles(self._membership.map, run)}{why}", self._waits.prepare_s
        )


def check_failed(cluster: ClusterMap, run: str, driver: Member | None = None) -> None:
    """Raise an error if a run has failed, or has another driver.

    Args:
        driver: Driver of the run, with its incarnation; None: any.

    Raises:
        RoleDied: The run failed by the loss of a role; the error has its name.
        RoleFailed: The run failed by an error of a role; the error has its name.
        RunFailed: The run failed for another reason, another driver has taken it over, or the map has another
            run or none.
    """
    if cluster.run is None:
        raise RunFailed(f"run {run} was replaced by none: the controller was started again; train once more")
    if cluster.run.id != run:
        raise RunFailed(f"run {run} was replaced by {cluster.run.id}")
    if driver is not None and cluster.run.driven_by != driver:
        raise RunFailed(
            f"run {run} was taken over by another driver, {cluster.run.driver}, after the loss of this one"
        )
    if cluster.run.phase == "failed" and cluster.run.lost:
        lost, reason = cluster.run.lost, cluster.run.reason
        if reason.startswith(f"{lost} died: "):
            raise RoleDied(lost, reason.removeprefix(f"{lost} died: "))
        raise RoleFailed(lost, reason.removeprefix(f"{lost} "))
    if cluster.run.phase == "failed":
        raise RunFailed(f"the run failed: {cluster.run.reason}")


def no_data_server(waited_s: float) -> RoleDied:
    """Return the error of a run that has waited for a data server for so many seconds."""
    return RoleDied("the data server", f"no other was live for {waited_s:g} s")


async def raise_failure(membership: Membership, run: str) -> None:
    """Wait until a driver's run has failed or has another driver; for errors see `check_failed`."""
    async for cluster in membership.changes():
        check_failed(cluster, run, membership.member)


def _is_over(cluster: ClusterMap, run: str) -> bool:
    return cluster.run is None or cluster.run.id != run or cluster.run.phase == "failed"


def joined_roles(cluster: ClusterMap, run: str) -> str:
    """List the joined roles, and in words whether each is ready for a run."""
    nodes = [
        f"{name} ({'ready' if _is_ready(cluster, node, run) else 'not ready'})"
        for name, node in sorted(cluster.nodes.items())
        if node.live and node.role != "driver"
    ]
    return f"joined so far: {', '.join(nodes) or 'none'}"


def _is_ready(cluster: ClusterMap, node: NodeRecord, run: str) -> bool:
    if node.role == "worker":
        return node.ready == ready_word(run, cluster.replica_generation(node.replica))
    store = cluster.store(run)
    if node.role == "ps":
        return store is not None and served_word(store) in node.serves
    return node.ready == run

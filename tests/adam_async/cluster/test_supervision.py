"""The end of a cluster's processes."""

import asyncio
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from adam_async.cluster.launcher import LocalLauncher, RestartPolicy, RoleSpec
from adam_async.cluster.supervision import ServerLosses, Supervisor, successors_text
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.config import Config, Waits
from tests.adam_async.cluster_maps import bundle_map


class Process:
    """A process that ends when it is asked to, or only when it is killed."""

    def __init__(self, node: str, *, ends: bool) -> None:
        self.node, self.ended, self._ends, self.is_killed = node, asyncio.Event(), ends, False

    def end(self) -> None:
        if self._ends:
            self.ended.set()

    def kill(self) -> None:
        self.is_killed = not self.ended.is_set()


@pytest.mark.parametrize(
    ("stuck", "named"),
    [
        ({"ps-0", "worker-1"}, "ps-0, worker-1"),
        ({"worker-1"}, "worker-1"),
        ({"controller"}, "controller"),
        (set(), None),
    ],
)
async def test_the_roles_that_do_not_end_are_named_and_killed(stuck: set[str], named: str | None) -> None:
    lines: list[str] = []
    config = Config(waits=Waits(drain_s=0.01))
    supervisor = Supervisor(config, LocalLauncher({}), environment={}, on_line=lines.append)
    nodes = ("controller", "ps-0", "ps-1", "worker-0", "worker-1")
    supervisor.processes = {node: Process(node, ends=node not in stuck) for node in nodes}
    await supervisor.stop()
    assert lines == ([] if named is None else [f"not ended within drain_s=0.01 s, and killed: {named}"])
    assert stuck <= {node for node, process in supervisor.processes.items() if process.is_killed}


WHOLE = bundle_map({"ps-0": ("ps-0", "ps-1"), "ps-1": ("ps-1", "ps-2"), "ps-2": ("ps-2", "ps-0")})


def losses(cluster: ClusterMap, *nodes: str) -> ServerLosses:
    found = ServerLosses()
    for node in nodes:
        found.note(cluster, node)
    return found


def test_one_loss_of_two_copies_loses_nothing_and_names_the_server_that_goes_on() -> None:
    found = losses(WHOLE, "ps-1")
    assert found.loss(WHOLE) == ""
    assert found.successors(WHOLE, "ps-1") == ("ps-2",)


def test_the_loss_of_all_members_names_the_homes_of_their_shards_and_their_store() -> None:
    assert (
        losses(WHOLE, "ps-1", "ps-2")
        .loss(WHOLE)
        .startswith("the last copy of the shards of ps-1 in store 'run-1' is lost; --resume DIR")
    )
    assert (
        losses(WHOLE, "ps-0", "ps-1", "ps-2")
        .loss(WHOLE)
        .startswith(
            "the last copy of the shards of ps-0, ps-1 and ps-2 in store 'run-1' is lost; --resume DIR"
        )
    )


def test_a_member_that_still_joins_is_no_copy() -> None:
    cluster = bundle_map({"ps-0": ("ps-0",)}, joining={"ps-0": ("ps-1",)})
    assert "the shards of ps-0 " in losses(cluster, "ps-0").loss(cluster)


def test_a_new_incarnation_of_an_ended_server_counts_once_it_is_in_sync() -> None:
    found = losses(WHOLE, "ps-0", "ps-1")
    assert "the shards of ps-0 " in found.loss(WHOLE)
    back = bundle_map({"ps-0": ("ps-2",)})
    assert found.loss(back) == ""


def test_the_others_suffice_while_each_bundle_has_enough_copies_for_its_pushes() -> None:
    three = bundle_map({"ps-0": ("ps-0", "ps-1", "ps-2")}, copies=3)
    assert losses(three, "ps-0").suffice(three)
    assert not losses(three, "ps-0", "ps-1").suffice(three)
    one = bundle_map({"ps-0": ("ps-0", "ps-1", "ps-2")}, copies=3, min_in_sync=1)
    assert losses(one, "ps-0", "ps-1").suffice(one)
    assert not losses(one, "ps-0", "ps-1", "ps-2").suffice(one)


def test_a_server_may_be_killed_if_each_bundle_has_a_copy_on_another_one() -> None:
    assert all(losses(WHOLE).outlive(WHOLE, {node}) for node in ("ps-0", "ps-1", "ps-2", "ps-3"))
    after = losses(WHOLE, "ps-1")  # ps-2 has the only copy of ps-1, and ps-0 that of ps-0
    assert [after.outlive(WHOLE, {node}) for node in ("ps-0", "ps-2", "ps-3")] == [False, False, True]
    assert not losses(WHOLE).outlive(WHOLE, {"ps-0", "ps-1"}), "ps-0 is frozen"


def test_a_server_with_the_last_copy_of_a_store_of_clients_may_not_be_killed() -> None:
    run = bundle_map({"ps-0": ("ps-0",)})
    net = replace(run.stores["run-1"], program="")
    store = replace(run, run=None, stores={"run-1": net})
    assert not losses(store).outlive(store, {"ps-0"})
    assert losses(store).outlive(store, {"ps-1"})


def supervisor(cluster: ClusterMap, *nodes: str, **options: int) -> Supervisor:
    found = Supervisor(Config(**options), LocalLauncher({}), environment={}, on_line=print)
    found.processes = {node: Process(node, ends=True) for node in nodes}
    found.driver = SimpleNamespace(map=cluster)
    return found


def test_a_role_may_be_frozen_if_others_of_its_kind_go_on_without_it() -> None:
    roles = supervisor(
        *(WHOLE, "ps-0", "ps-1", "ps-2", "data-0", "worker-0", "worker-1"),
        *("controller-0", "controller-1", "controller-2"),
        copies=2,
        controllers=3,
        servers=3,
    )
    assert all(roles.spares(node, frozen=()) for node in ("ps-0", "worker-0", "controller-1"))
    assert not roles.spares("data-0", frozen=()), "the only one"
    assert not roles.spares("ps-0", frozen={"ps-1"}), "they have the copies of ps-0"
    assert not roles.spares("worker-0", frozen={"worker-1"})
    assert not roles.spares("controller-1", frozen={"controller-2"}), "no majority"
    assert not supervisor(WHOLE, "controller").spares("controller", frozen=())
    halves = supervisor(WHOLE, "worker-0", "worker-1", partitions=2)
    assert not halves.spares("worker-0", frozen=()), "the only replica needs both"


def test_a_killed_server_counts_as_ended_before_its_process_has() -> None:
    roles = supervisor(WHOLE, "ps-0", "ps-1", "ps-2", copies=2, servers=3)
    assert roles.survives("ps-1", frozen=())
    roles.kill("ps-0")
    assert roles.processes["ps-0"].is_killed
    assert not roles.survives("ps-1", frozen=()), "it has the last copy of the shards of ps-0"


class Killed(Process):
    """A role that serves for less than a sound time, and ends when it is killed."""

    served_s, serves, code, how = 1.0, True, -9, "killed by signal 9"

    def __init__(self, spec: RoleSpec, *_: object) -> None:
        super().__init__(spec.node, ends=True)

    def kill(self) -> None:
        self.ended.set()


async def test_a_role_that_an_operator_kills_again_and_again_is_always_started_again() -> None:
    async def died(node: str) -> None:
        started.set()

    started = asyncio.Event()
    found = Supervisor(Config(), SimpleNamespace(start=Killed), environment={}, on_line=print)
    found.driver = SimpleNamespace(map=ClusterMap(), note=print, report_death=died)
    async with asyncio.TaskGroup() as group:
        found.begin(group, {"worker": b""})
        found.start("worker", "worker-0")
        for _ in range(2 * RestartPolicy().most):
            before = found.processes["worker-0"]
            assert found.survives("worker-0", frozen=())
            found.kill("worker-0")
            await started.wait()
            started.clear()
            await asyncio.sleep(0)
            assert found.processes["worker-0"] is not before
        await found.stop()
    assert found.death is None


def test_nothing_is_lost_outside_a_run_or_before_its_values_are_loaded() -> None:
    loading = bundle_map({"ps-0": ("ps-0",)}, phase="loading")
    for cluster in (ClusterMap(), loading):
        assert losses(cluster, "ps-0").loss(cluster) == ""
        assert not losses(cluster, "ps-0").suffice(cluster)


def test_the_text_names_the_servers_that_go_on() -> None:
    assert successors_text(("ps-2", "ps-0")) == "; its shards go on with ps-2 and ps-0"
    assert successors_text(()) == ""

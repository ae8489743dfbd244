"""Safeguards of the first map of a restarted single controller, and their removals."""

from functools import partial
from typing import Any

import msgspec

from adam_async.controller import learned_map
from adam_async.controller.learned_map import LearnedMap
from adam_async.controller.service import Controller
from tests.ablations.patches import Change, replaces
from tests.ablations.safeguards import Ablation

TESTS = "tests/adam_async/controller/test_learned_map.py::"
SERVICE = "tests/adam_async/controller/test_learning.py::"


@replaces(LearnedMap, "_led")
def lead_by_order(led: Any, self: LearnedMap, key: str, bundle: Any) -> Any:
    """Let the next member of the record lead, however far its log reaches."""
    return bundle.in_sync


def begin_at_known_numbers(change: Change = setattr) -> None:
    """Begin at the version of the newest report."""
    change(learned_map, "AHEAD", 0)


@replaces(LearnedMap, "missing")
def wait_for_no_server(missing: Any, self: LearnedMap) -> Any:
    """Begin without the servers that the newest map names."""
    return []


@replaces(LearnedMap, "first_map")
def forget_clients(first_map: Any, self: LearnedMap, kinds: Any) -> Any:
    """Leave the clients out of the first map, so that each gets another place."""
    cluster = first_map(self, kinds)
    nodes = {name: node for name, node in cluster.nodes.items() if node.role != "client"}
    return msgspec.structs.replace(cluster, nodes=nodes)


@replaces(learned_map, "most_version")
def believe_any_version(most_version: Any, wall_s: float) -> int:
    """Take a version of any size from a report."""
    return 1 << 80


@replaces(Controller, "__init__")
def let_groups_learn(init: Any, self: Controller, *args: Any, **options: Any) -> None:
    """Let a controller of several learn its first map from servers."""
    init(self, *args, **options)
    self.group._first_map = self._learn


_row = partial(Ablation, scenario="pushes")

LEARNED = (
    _row(
        "without its primary, the member with the most entries leads a learned bundle",
        lead_by_order,
        guard=TESTS + "test_without_the_primary_the_highest_generation_and_position_lead",
        seldom="the newest map must be lost together with the primary",
    ),
    _row(
        "the first map is above all earlier numbers",
        begin_at_known_numbers,
        guard=TESTS + "test_the_numbers_of_the_first_map_are_above_all_that_a_server_may_have_seen",
        breaks="all copies return, or pending pushes end",
    ),
    _row(
        "a restarted controller waits for the servers of the newest map",
        wait_for_no_server,
        guard=TESTS
        + "test_the_wait_of_a_new_cluster_is_short_and_that_of_a_restart_lasts_until_all_have_reported",
        seldom="a fault must keep a server from the controller during the whole first wait of three seconds",
    ),
    _row(
        "clients keep their places in a learned map",
        forget_clients,
        guard=TESTS + "test_the_newest_map_decides_about_stores_and_clients_and_leaves_programs_out",
        seldom="a client without its place opens the store again, which the scenario permits",
    ),
    _row(
        "a push that waits is dropped before its primary leads again",
        file="adam_async/parameter_server/bundle_copy.py",
        old="        self._effects += self._core.take_effects()\n        if self._is_running:\n",
        new="        self._propose_all()\n        self._effects += self._core.take_effects()\n"
        "        if self._is_running:\n",
        guard="tests/adam_async/parameter_server/test_bundle_copies.py::"
        "test_a_push_that_waits_while_its_primary_gets_another_generation_is_applied_once",
        breaks="I2",
    ),
    _row(
        "a version in a report is bounded",
        believe_any_version,
        guard=TESTS + "test_the_highest_false_version_leaves_room_for_all_later_controllers",
        seldom="the servers of the scenario tell the truth",
    ),
    _row(
        "a group of several controllers takes no map from servers",
        let_groups_learn,
        guard=SERVICE + "test_one_of_several_controllers_takes_no_map_from_servers",
        seldom="a majority of the scenario's groups has the map on its disks",
    ),
)

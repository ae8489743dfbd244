"""Safeguards of the first map of a restarted single controller, and their removals."""

from functools import partial

from tests.ablations.ablation import Ablation

FILE = "adam_async/controller/learned_map.py"
TESTS = "tests/adam_async/controller/test_learned_map.py::test_"

_row = partial(Ablation, scenario="pushes")

LEARNED = (
    _row(
        "without its primary, the member with the most entries leads a learned bundle",
        FILE,
        "if present and present[0] != bundle.primary:",
        "if False:",
        TESTS + "without_the_primary_the_highest_generation_and_position_lead",
        seldom="the newest map must be lost together with the primary",
    ),
    _row(
        "the first map is above all earlier numbers",
        FILE,
        "        version = newest.version + AHEAD\n",
        "        AHEAD, version = 0, newest.version\n",
        TESTS + "the_numbers_of_the_first_map_are_above_all_that_a_server_may_have_seen",
        breaks="all copies return, or pending pushes end",
    ),
    _row(
        "a restarted controller waits for the servers of the newest map",
        FILE,
        "return sorted(named - self.standings.keys())",
        "return []",
        TESTS + "the_wait_of_a_new_cluster_is_short_and_that_of_a_restart_lasts_until_all_have_reported",
        seldom="a fault must keep a server from the controller during the whole first wait of three seconds",
    ),
    _row(
        "clients keep their places in a learned map",
        FILE,
        "for name, node in newest.nodes.items():\n",
        "nodes = {name: node for name, node in newest.nodes.items() if node.role != 'client'}\n"
        "        state.map = msgspec.structs.replace(state.map, nodes=nodes)\n"
        "        for name, node in newest.nodes.items():\n",
        TESTS + "the_newest_map_decides_about_stores_and_clients_and_leaves_programs_out",
        seldom="a client without its place opens the store again, which the scenario permits",
    ),
    _row(
        "a push that waits is dropped before its primary leads again",
        "adam_async/parameter_server/bundle_copy.py",
        "        self._effects += self._core.take_effects()\n        if self._is_running:\n",
        "        self._propose_all()\n"
        "        self._effects += self._core.take_effects()\n"
        "        if self._is_running:\n",
        "tests/adam_async/parameter_server/test_bundle_copies.py::"
        "test_a_push_that_waits_while_its_primary_gets_another_generation_is_applied_once",
        breaks="I2",
    ),
    _row(
        "a version in a report is bounded",
        FILE,
        "return PLAUSIBLE + PLAUSIBLE_EACH_S * int(max(wall_s, 0.0))",
        "return 1 << 80",
        TESTS + "the_highest_false_version_leaves_room_for_all_later_controllers",
        seldom="the servers of the scenario tell the truth",
    ),
    _row(
        "a group of several controllers takes no map from servers",
        "adam_async/controller/service.py",
        "first_map=self._learn if is_alone and learns else None,",
        "first_map=self._learn,",
        "tests/adam_async/controller/test_learning.py::"
        "test_one_of_several_controllers_takes_no_map_from_servers",
        seldom="a majority of the scenario's groups has the map on its disks",
    ),
)

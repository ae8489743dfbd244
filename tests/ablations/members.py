"""Safeguards of names, addresses and shares of the cluster map, and their removals.

The scenario `hostile` finds the removals with its attacks on the map (`hostile_members`).
"""

from functools import partial

from tests.ablations.ablation import Ablation

CONTROLLER, TESTS = "adam_async/controller/", "tests/adam_async/controller/"
STATE, REPLICATED = TESTS + "test_state.py::test_", TESTS + "test_replicated_state.py::test_"
SHARES = "the map has shares"

_row = partial(Ablation, scenario="hostile")

MEMBERS = (
    _row(
        "a link counts for a node of its role",
        CONTROLLER + "service.py",
        "        node = (link.peer.role, link.peer.node, link.peer.incarnation)\n",
        "        known = self.map.nodes.get(link.peer.node)\n"
        "        role = known.role if known is not None else link.peer.role\n"
        "        node = (role, link.peer.node, link.peer.incarnation)\n",
        TESTS
        + "test_service.py::test_a_peer_of_another_role_under_the_name_of_a_node_does_not_hide_its_loss",
        breaks="a lost node is noticed",
    ),
    _row(
        "a name serves its role",
        CONTROLLER + "state.py",
        '    named = name.partition("-")[0]\n',
        "    return False\n",
        STATE + "a_program_that_uses_stores_keeps_no_name_from_the_roles_of_a_cluster",
        breaks="a name serves its role",
    ),
    _row(
        "an address in a record can be dialled",
        CONTROLLER + "records.py",
        'if address.startswith("local://"):',
        "if True:",
        TESTS + "test_records.py::test_an_address_that_no_role_could_dial_is_refused",
        breaks="addresses can be dialled",
    ),
    _row(
        "a host that the resolver refuses is unreachable",
        "transport/network.py",
        "(OSError, LinkBroken, ValueError, OverflowError)",
        "(OSError, LinkBroken)",
        "tests/transport/test_stream.py::test_a_host_that_the_resolver_refuses_cannot_be_reached",
        seldom="no record has such an address, and a simulated network has no resolver",
    ),
    _row(
        "a client has a share of the stores",
        CONTROLLER + "store_rules.py",
        '    if new.program:\n        return ""\n',
        '    return ""\n',
        STATE + "clients_have_a_share_of_the_stores_and_runs_have_room",
        breaks=SHARES,
    ),
    _row(
        "the info of a client is small",
        CONTROLLER + "records.py",
        'if record.role in ("worker", *USERS):',
        "if record.role in ():",
        TESTS + "test_records.py::test_the_info_of_a_role_with_little_to_report_is_small",
        breaks=SHARES,
    ),
    _row(
        "a list of arrays leaves with its creator",
        CONTROLLER + "store_rules.py",
        "if piece.creator and (creator is None or not creator.live):",
        "if False:",
        STATE + "the_lists_of_unfinished_stores_leave_with_their_creator",
        breaks=SHARES,
    ),
    _row(
        "the nodes of a role have a share of the map",
        CONTROLLER + "replicated_state.py",
        '    kind = key.partition("/")[0]\n    if',
        '    return Share("")\n    if',
        REPLICATED + "the_nodes_of_a_role_fill_their_share_of_the_map_and_those_of_other_roles_join",
        seldom="a share takes hundreds of nodes, and a seed has a handful",
    ),
    _row(
        "a role that opens many sessions forgets its own",
        CONTROLLER + "replicated_state.py",
        "at for at, session in self._sessions.items() if session.role == most)]",
        "iter(self._sessions))]",
        REPLICATED + "a_role_that_opens_many_sessions_forgets_its_own",
        seldom="4,096 sessions take longer to open than a seed may take",
    ),
)

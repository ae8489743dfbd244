"""Safeguards of names, addresses and shares of the cluster map, and their removals: more rows of
`benchmarks.ablations`.

The scenario `hostile` finds the removals with its attacks on the map (`hostile_members`).
"""

from functools import partial
from typing import Any

from adam_async.controller import records, replicated_state, store_rules
from adam_async.controller import state as controller_state
from adam_async.controller.replicated_state import ReplicatedState, Share, _Session
from tests.ablations.patches import replaces
from tests.ablations.safeguards import Ablation

CONTROLLER = "tests/adam_async/controller/"
STATE, REPLICATED = CONTROLLER + "test_state.py::test_", CONTROLLER + "test_replicated_state.py::test_"
SHARES = "the map has shares"


@replaces(controller_state, "_gives_way")
def keep_names(*_: Any, in_use: bool) -> bool:
    """Let a node keep its name from nodes of other roles, also after it has departed."""
    return False


@replaces(records, "_address_problem")
def take_any_address(*_: Any) -> str:
    """Take every address into the map."""
    return ""


@replaces(store_rules, "_share_problem")
def take_any_number_of_stores(*_: Any) -> str:
    """Take any number of stores of one client."""
    return ""


@replaces(replicated_state, "share_of")
def give_no_shares(*_: Any) -> Share:
    """Give no role and no client a share of the map."""
    return Share("")


@replaces(ReplicatedState, "_open")
def forget_sessions_of_others(_: Any, state: ReplicatedState, index: int, role: str) -> None:
    """Forget the least recently used session of all roles."""
    state._sessions[index] = _Session(role=role)
    while len(state._sessions) > state._most_sessions:
        del state._sessions[next(iter(state._sessions))]


_row = partial(Ablation, scenario="hostile")

MEMBERS = (
    _row(
        "a link counts for a node of its role",
        file="adam_async/controller/service.py",
        old="        node = (link.peer.role, link.peer.node, link.peer.incarnation)\n",
        new="        known = self.map.nodes.get(link.peer.node)\n"
        "        role = known.role if known is not None else link.peer.role\n"
        "        node = (role, link.peer.node, link.peer.incarnation)\n",
        guard=CONTROLLER
        + "test_service.py::test_a_peer_of_another_role_under_the_name_of_a_node_does_not_hide_its_loss",
        breaks="a lost node is noticed",
    ),
    _row(
        "a name serves its role",
        keep_names,
        guard=STATE + "a_program_that_uses_stores_keeps_no_name_from_the_roles_of_a_cluster",
        breaks="a name serves its role",
    ),
    _row(
        "an address in a record can be dialled",
        take_any_address,
        guard=CONTROLLER + "test_records.py::test_an_address_that_no_role_could_dial_is_refused",
        breaks="addresses can be dialled",
    ),
    _row(
        "a host that the resolver refuses is unreachable",
        file="transport/network.py",
        old="(OSError, LinkBroken, ValueError, OverflowError)",
        new="(OSError, LinkBroken)",
        guard="tests/transport/test_tcp.py::test_a_host_that_the_resolver_refuses_cannot_be_reached",
        seldom="no record has such an address, and a simulated network has no resolver",
    ),
    _row(
        "a client has a share of the stores",
        take_any_number_of_stores,
        guard=STATE + "clients_have_a_share_of_the_stores_and_runs_have_room",
        breaks=SHARES,
    ),
    _row(
        "the info of a client is small",
        file="adam_async/controller/records.py",
        old='    if record.role in ("worker", *USERS):\n',
        new="    if record.role in ():\n",
        guard=CONTROLLER + "test_records.py::test_the_info_of_a_role_with_little_to_report_is_small",
        breaks=SHARES,
    ),
    _row(
        "a list of arrays leaves with its creator",
        file="adam_async/controller/store_rules.py",
        old="        if piece.creator and (creator is None or not creator.live):\n",
        new="        if False:\n",
        guard=STATE + "the_lists_of_unfinished_stores_leave_with_their_creator",
        breaks=SHARES,
    ),
    _row(
        "the nodes of a role have a share of the map",
        give_no_shares,
        guard=REPLICATED + "the_nodes_of_a_role_fill_their_share_of_the_map_and_those_of_other_roles_join",
        seldom="a share takes hundreds of nodes, and a seed has a handful",
    ),
    _row(
        "a role that opens many sessions forgets its own",
        forget_sessions_of_others,
        guard=REPLICATED + "a_role_that_opens_many_sessions_forgets_its_own",
        seldom="4,096 sessions take longer to open than a seed may take",
    ),
)

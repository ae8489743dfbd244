"""The permission table: every pair of a role and a key of the map, in the table and over real links."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from adam_async.controller.consensus_node import ConsensusSetup
from adam_async.controller.permissions import BEHIND, FORBIDDEN, Attempt, PermissionTable
from adam_async.controller.role import RoleSettings
from adam_async.controller.service import Controller
from adam_async.messages import CompareAndSet, OpenSession, SessionOpened, pack, text_tensor, unpack
from adam_async.messages.body import ROLES
from adam_async.run.cluster_map import ClusterMap, DealerRecord, EpochRecord, NodeRecord
from adam_async.run.config import Waits
from adam_async.run.store_record import BundleRecord
from adam_async.run.training_program import ProgramRecord
from tests.adam_async.cluster_maps import store_record
from tests.adam_async.runs import NETWORKS, address_of, entropy_of
from transport import Identity, LinkClosed, RemoteError

PERMISSIONS = PermissionTable()
MEMBERS = ("ps", "data", "worker", "driver", "client", "reader")
SERVER = NodeRecord(role="ps", address="tcp://x:1", incarnation=7, ready="r", info={"a": 1.5}, changed=3)
EPOCH = EpochRecord(run="r", number=1, groups=4, shares={"0": (0, 4)}, changed=5)
STORE = store_record("s", creator="me")
RUN = ProgramRecord(id="r", driver="me", incarnation=9, changed=4)
FIRST, SECOND, THIRD, JOINER = (("ps-me", 9), ("ps-1", 9), ("ps-2", 9), ("ps-3", 9))
BUNDLE = BundleRecord(store="s", generation=2, in_sync=(FIRST, SECOND, THIRD), joining=(JOINER,), changed=4)
MAP = ClusterMap(
    version=5,
    nodes={"ps-0": SERVER, "me": NodeRecord(role="driver", address="", incarnation=9, changed=2)},
    run=RUN,
    epoch=EPOCH,
    stores={
        "theirs": replace(STORE, creator="they", changed=4),
        "of-run": replace(STORE, program="r", changed=4),
    },
    bundles={"bundles/s/ps-me": BUNDLE},
    dealer=DealerRecord(run="r", term=1, node="data-me", incarnation=9, changed=5),
)


def own(role: str, **changes: Any) -> dict[str, Any]:
    return {"role": role, "address": "local://x", "incarnation": 9, **changes}


def asks(role: str, key: str, record: Any, expected: int, node: str = "") -> str:
    """Code of the refusal of an attempt, or an empty text."""
    value: Mapping[str, Any] = msgspec.to_builtins(record)
    peer = Identity(role=role, node=node or ("me" if role == "driver" else f"{role}-me"), incarnation=9)
    refusal = PERMISSIONS.refusal(Attempt(peer=peer, key=key, value=value, expected=expected), MAP)
    return refusal.code if refusal is not None else ""


DEAD = replace(SERVER, live=False)
DRAINS = replace(EPOCH, drain=True)

CASES: dict[str, tuple[str, Any, int, str, set[str]]] = {
    "another node": ("nodes/ps-0", SERVER, 3, "", set()),
    "a death": ("nodes/ps-0", DEAD, 3, "", {"driver"}),
    "a death and its time": ("nodes/ps-0", replace(DEAD, lost_at=1.7e9), 3, "", {"driver"}),
    "a death at no time": ("nodes/ps-0", replace(DEAD, lost_at=-1.0), 3, "", set()),
    "a death, and an address": (
        "nodes/ps-0", replace(DEAD, address="tcp://mine:1"), 3, "", set(),
    ),
    "a death of none": ("nodes/none", {**own("ps"), "live": False}, 0, "", set()),
    "a death that is no record": ("nodes/ps-0", {"live": False}, 3, "", set()),
    "a run": ("run", RUN, 4, "", {"driver"}),
    "a run of another driver": ("run", replace(RUN, driver="you"), 4, "", set()),
    "a run of another incarnation": ("run", replace(RUN, incarnation=8), 4, "", set()),
    "a run of no driver": ("run", {"id": "r"}, 4, "", set()),
    "a takeover": ("run", replace(RUN, driver="you"), 4, "you", {"driver"}),
    "a takeover in the name of its driver": ("run", RUN, 4, "you", set()),
    "the death of a driver": ("nodes/me", replace(MAP.nodes["me"], live=False), 2, "you", set()),
    "an end of the leases by another driver": ("epoch", DRAINS, 5, "you", set()),
    "an old end of the leases by another driver": ("epoch", DRAINS, 4, "you", {"data", "driver"}),
    "a store of the run of another driver": ("stores/a", replace(STORE, program="r"), 0, "you", set()),
    "the store of the run of another driver": ("stores/of-run", STORE, 4, "you", set()),
    "a piece of the store of another driver": ("stores/a/0", {"store": "r", "text": ""}, 0, "you", set()),
    "a piece of a run": ("run/0", {"run": "r", "text": ""}, 0, "", {"driver"}),
    "an epoch": ("epoch", replace(EPOCH, ended=True), 5, "", {"data"}),
    "an end of the leases": ("epoch", DRAINS, 5, "", {"data", "driver"}),
    "an end of the leases, and more": ("epoch", replace(DRAINS, ended=True), 5, "", {"data"}),
    "an epoch of another dealer": ("epoch", replace(EPOCH, ended=True), 5, "you", set()),
    "an old epoch of another dealer": ("epoch", replace(EPOCH, ended=True), 4, "you", {"data", "driver"}),
    "a store in the own name": ("stores/a", STORE, 0, "me", {"driver", "client"}),
    "a store in the name of another": ("stores/a", STORE, 0, "you", {"driver"}),
    "a store of a program": ("stores/a", replace(STORE, program="r"), 0, "me", {"driver"}),
    "a store with the name of the run": ("stores/r", STORE, 0, "me", {"driver"}),
    "a store with the id of the run": ("stores/a", replace(STORE, id="r"), 0, "me", {"driver"}),
    "a piece": ("stores/a/0", {"store": "s", "text": ""}, 0, "you", {"driver"}),
    "a piece of the store of a program": ("stores/of-run/0", {"store": "s"}, 0, "me", {"driver"}),
    "the deletion of the store of another": (
        "stores/theirs", replace(STORE, creator="they", phase="deleted"), 4, "me", {"driver", "client"},
    ),
    "the deletion of the store of a program": (
        "stores/of-run", replace(STORE, phase="deleted"), 4, "me", {"driver"},
    ),
    "a bundle of the own": ("bundles/s/ps-me", BUNDLE, 4, "ps-me", {"ps"}),
    "no key of a map": ("colour", {}, 0, "", set(ROLES)),
    "nodes without an id": ("nodes", {}, 0, "", set(ROLES)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("role", ROLES)
def test_each_role_sets_what_the_table_gives_it(role: str, case: str) -> None:
    key, record, expected, node, may = CASES[case]
    assert asks(role, key, record, expected, node) == ("" if role in may else FORBIDDEN)


@pytest.mark.parametrize("role", ROLES)
def test_a_member_sets_its_own_node_with_the_role_of_its_link(role: str) -> None:
    allowed = "" if role in MEMBERS else FORBIDDEN
    assert asks(role, "nodes/new", own(role), 0, "new") == allowed
    assert asks(role, "nodes/new", own(role, incarnation=8), 0, "new") == FORBIDDEN
    assert asks(role, "nodes/new", own(role, incarnation="9"), 0, "new") == FORBIDDEN
    assert asks(role, "nodes/new", own("ps" if role != "ps" else "worker"), 0, "new") == FORBIDDEN
    assert asks(role, "nodes/new", {}, 0, "new") == FORBIDDEN


def test_the_rules_of_the_map_decide_between_two_roles_of_one_id() -> None:
    assert asks("worker", "nodes/ps-0", own("worker"), 3, "ps-0") == ""
    assert asks("ps", "nodes/ps-0", own("ps"), 3, "ps-0") == ""


def test_versions_that_the_leader_does_not_know_wait_and_older_ones_are_conflicts() -> None:
    assert asks("driver", "epoch", replace(EPOCH, ended=True), 6) == BEHIND
    assert asks("driver", "nodes/ps-0", DEAD, 4) == BEHIND
    assert asks("driver", "epoch", DRAINS, 4) == ""
    assert asks("driver", "nodes/ps-0", DEAD, 2) == ""


TAKEN_OVER = replace(BUNDLE, generation=3, in_sync=(SECOND, THIRD))


@pytest.mark.parametrize(
    ("node", "record", "may"),
    [
        ("ps-me", replace(BUNDLE, in_sync=(FIRST,)), True),
        ("ps-me", replace(BUNDLE, in_sync=(FIRST, SECOND, THIRD, JOINER), joining=()), True),
        ("ps-me", replace(BUNDLE, generation=3, in_sync=(SECOND, FIRST)), True),
        ("ps-1", TAKEN_OVER, True),
        ("ps-1", replace(TAKEN_OVER, joining=()), True),
        ("ps-2", TAKEN_OVER, False),
        ("ps-3", replace(BUNDLE, generation=3, in_sync=(JOINER, SECOND, THIRD), joining=()), False),
        ("ps-4", TAKEN_OVER, False),
        ("ps-1", replace(BUNDLE, in_sync=(FIRST, SECOND)), False),
        ("ps-1", replace(TAKEN_OVER, in_sync=(SECOND, FIRST, THIRD)), False),
        ("ps-1", replace(TAKEN_OVER, in_sync=(SECOND,)), False),
        ("ps-1", replace(TAKEN_OVER, in_sync=(SECOND, THIRD, JOINER), joining=()), False),
        ("ps-1", replace(TAKEN_OVER, joining=(JOINER, ("ps-4", 9))), False),
        ("ps-1", {"generation": 3}, False),
    ],
)
def test_a_primary_sets_its_bundle_and_a_secondary_only_takes_it_over(
    node: str, record: Any, may: bool
) -> None:
    assert asks("ps", "bundles/s/ps-me", record, 4, node) == ("" if may else FORBIDDEN)


def test_an_earlier_incarnation_of_a_primary_sets_nothing() -> None:
    peer = Identity(role="ps", node="ps-me", incarnation=8)
    attempt = Attempt(peer=peer, key="bundles/s/ps-me", value=msgspec.to_builtins(BUNDLE), expected=4)
    assert (refusal := PERMISSIONS.refusal(attempt, MAP)) is not None
    assert refusal.code == FORBIDDEN


def test_a_bundle_of_an_older_version_is_a_conflict_and_that_of_a_newer_one_waits() -> None:
    for expected, code in ((3, ""), (5, ""), (6, BEHIND)):
        assert asks("ps", "bundles/s/ps-me", TAKEN_OVER, expected, "ps-4") == code
    assert asks("ps", "bundles/gone/ps-me", TAKEN_OVER, 5, "ps-4") == ""
    assert asks("ps", "bundles/new/ps-me", TAKEN_OVER, 6, "ps-1") == BEHIND


def test_all_kinds_of_keys_have_a_row_and_a_sentence() -> None:
    assert {kind for kind, _ in PERMISSIONS.rows} == set(PERMISSIONS.meant)
    assert {role for _, role in PERMISSIONS.rows} <= set(ROLES)


@pytest.mark.parametrize("network", NETWORKS)
async def test_an_attempt_that_is_forbidden_costs_its_link_and_changes_nothing(network: str) -> None:
    wire = NETWORKS[network]()
    identity = Identity(role="controller", node="controller", incarnation=1)
    async with Controller(
        RoleSettings(network=wire, address=address_of(wire), identity=identity, waits=Waits()),
        ConsensusSetup(entropy=entropy_of("c")),
    ) as controller:
        membership = await wire.dial(controller.address, Identity(role="ps", node="ps-0", incarnation=9))
        session = unpack(await membership.call(pack(OpenSession()), timeout_s=5.0), SessionOpened).session

        def question(key: str, number: int) -> CompareAndSet:
            return CompareAndSet(key=key, expected=0, session=session, number=number, after=-1, group="")

        await membership.call(pack(question("nodes/ps-0", 1), [text_tensor(own("ps"))]), timeout_s=5.0)
        before = controller.map
        for role in ROLES:
            for key, record in (
                *(("nodes/ps-0", own("ps")), ("run", RUN), ("epoch", EPOCH)),
                *(("stores/a", STORE), ("bundles/s/ps-me", BUNDLE)),
            ):
                if (key, role) in {
                    *(("run", "driver"), ("epoch", "data"), ("stores/a", "driver")),
                    ("bundles/s/ps-me", "ps"),
                }:
                    continue  # these may
                peer = Identity(role=role, node="me" if role == "driver" else "x", incarnation=9)
                link = await wire.dial(controller.address, peer)
                with pytest.raises(RemoteError, match=f"{role} {peer.node} may not set {key} so: ") as raised:
                    await link.call(pack(question(key, 2), [text_tensor(record)]), timeout_s=5.0)
                assert raised.value.code == FORBIDDEN
                await link.wait_closed()
                with pytest.raises(LinkClosed):
                    await link.call(pack(OpenSession()), timeout_s=5.0)
                await link.aclose()
        assert controller.map is before
        assert not membership.closed
        await membership.aclose()

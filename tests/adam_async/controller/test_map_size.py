"""The shares of the cluster map, and the pages that promise them."""

from pathlib import Path

from adam_async.controller.map_size import NODES_BYTES, STORES_BYTES
from adam_async.controller.replicated_state import MAX_SESSIONS
from adam_async.controller.state import DEPARTED_KEPT
from adam_async.controller.store_rules import CLIENT_STORES, CREATOR_STORES, MOST_STORES
from adam_async.messages.bounds import MOST_INFO_BYTES, MOST_MAP_BYTES, SMALL_INFO_BYTES
from adam_async.run.store_record import STORE_PIECE_BYTES, STORE_PIECES
from transport.sockets import MOST_HOST

DOCS = Path(__file__).parents[3] / "docs"


def mib(size: int) -> str:
    return f"{size / (1 << 20):g} MiB"


def test_the_pages_promise_the_shares_of_the_code() -> None:
    page = " ".join(
        (DOCS / name).read_text() for name in ("explanation/security.md", "how-to/controllers.md")
    )
    arrays, small = f"{STORE_PIECES * STORE_PIECE_BYTES >> 10:,} KiB", f"{SMALL_INFO_BYTES >> 10} KiB"
    share = {role: mib(size) for role, size in NODES_BYTES.items()}
    for promise in (
        f"a client has {CREATOR_STORES} stores, all clients have {CLIENT_STORES} of the {MOST_STORES}",
        f"Clients have {CLIENT_STORES} of them, one client {CREATOR_STORES}",
        f"the arrays of one have {arrays}, and all together {mib(STORES_BYTES)} of",
        f"of the map's {mib(MOST_MAP_BYTES)}",
        f"all clients have {share['client']} of the map, and all readers have {share['reader']}",
        f"{DEPARTED_KEPT} departed nodes of a role stay",
        f"all workers have {share['worker']} of the map, with {small} of `info` each",
        f"{MOST_INFO_BYTES >> 10} KiB; of a worker, client or reader {small}",
        f"{share['ps']} for `ps` and for `data`, {share['worker']} for `worker`, {share['driver']} for",
        f"of the {MAX_SESSIONS:,} sessions the role with most",
        f"(labels of 63 characters, {MOST_HOST} in all)",
    ):
        assert promise in page, promise
    assert share["data"] == share["ps"]
    assert share["client"] == share["reader"] == share["driver"]


def test_one_role_alone_leaves_room_for_a_run() -> None:
    """The list of a run of 300 layers has some 40 KiB, and the pieces of its blob have 1,440 KiB."""
    for role, size in NODES_BYTES.items():
        stores = STORES_BYTES if role == "client" else 0
        assert MOST_MAP_BYTES - stores - size >= 3 << 20

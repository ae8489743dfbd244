"""Servers that stage one source together, over real links and files: who reads, who copies, who is missed."""

import asyncio
import hashlib
import os
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from adam_async.data_server.staging.files import PIECE_BYTES
from adam_async.data_server.staging.peer import Patience
from adam_async.data_server.staging.service import Stager, staging
from adam_async.errors import BindFailed, DataError, first_cause
from adam_async.messages import (
    FilePart,
    GetStatistics,
    ReadFile,
    ReadManifest,
    pack,
    read_text_tensor,
    unpack,
)
from adam_async.runtime.disk import Disk
from tests.adam_async.runs import NETWORKS, until
from transport import Identity, Network, RemoteError, Request, TcpNetwork

pytestmark = pytest.mark.thorough

SOON = Patience(join_s=30.0, back_s=0.05, wait_s=0.2, answer_s=20.0, stall_s=20.0, read_s=20.0)
"""Limits that soon give up a lost server, and give up none because the machine is slow."""

FILES = {
    f"train/class {number % 3}/{number}.bin": hashlib.shake_128(bytes([number])).digest(100 * number)
    for number in range(11)
} | {"large.bin": hashlib.shake_128(b"large").digest(3 * PIECE_BYTES + 17)}


class Shared:
    """The source, and what becomes of reading it: each file may be delayed, cut short, or hang."""

    def __init__(self, root: Path, files: dict[str, bytes] = FILES) -> None:
        self.root = root
        self.opened: Counter[str] = Counter()
        self.before: dict[str, Callable[[int], Awaitable[None]]] = {}
        """By path: what happens before it is read, for the n-th time."""
        for path, content in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(content)

    def open_disk(self, name: str) -> Disk:
        return CountedDisk(self, name)


class CountedDisk(Disk):
    """Reads the source, and counts what is opened there."""

    def __init__(self, shared: Shared, name: str) -> None:
        super().__init__(name=name, close_timeout_s=1.0)
        self._shared = shared

    async def read_pieces(self, path: Path, piece_bytes: int) -> AsyncGenerator[bytes, None]:
        root = self._shared.root
        name = path.relative_to(root).as_posix() if path.is_relative_to(root) else "of another source"
        self._shared.opened[name] += 1
        if name in self._shared.before:
            await self._shared.before[name](self._shared.opened[name])
        async for piece in super().read_pieces(path, piece_bytes):
            yield piece


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a copy that is not aside."""
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if not name.startswith(".")}


def peers_of(network: Network, count: int, unused_tcp_port_factory) -> list[str]:
    if isinstance(network, TcpNetwork):
        return [f"tcp://127.0.0.1:{unused_tcp_port_factory()}" for _ in range(count)]
    return [f"local://server-{number}" for number in range(count)]


@pytest.fixture(params=NETWORKS)
def network(request) -> Network:
    return NETWORKS[request.param]()


@pytest.fixture
def shared(tmp_path: Path) -> Shared:
    return Shared(tmp_path / "shared")


class Ring:
    """Servers of one staging, in this loop."""

    def __init__(self, tmp_path: Path, shared: Shared, network: Network, peers: list[str]) -> None:
        self.tmp_path, self.shared, self.network, self.peers = tmp_path, shared, network, peers

    @asynccontextmanager
    async def server(self, name: str, *, source: Path | None = None, patience: Patience = SOON):
        """Start a server; it takes the first address that is free. Errors leave without their groups."""
        try:
            async with (
                Disk(name=name) as disk,
                staging(
                    source or self.shared.root,
                    self.tmp_path / name,
                    peers=self.peers,
                    network=self.network,
                    identity=Identity(role="data", node=name, incarnation=1),
                    disk=disk,
                    open_disk=self.shared.open_disk,
                    patience=patience,
                ) as stager,
            ):
                yield stager
        except ExceptionGroup as error:
            raise first_cause(error) from None

    def copy(self, name: str) -> dict[str, bytes]:
        return contents(self.tmp_path / name)


@pytest.fixture
def ring(tmp_path: Path, shared: Shared, network: Network, unused_tcp_port_factory) -> Callable[[int], Ring]:
    return lambda count: Ring(tmp_path, shared, network, peers_of(network, count, unused_tcp_port_factory))


@pytest.mark.parametrize("count", [1, 2, 4])
async def test_every_file_is_read_from_the_source_once_and_all_servers_get_all(ring, shared, count) -> None:
    servers = ring(count)
    async with AsyncExitStack() as stack:
        stagers: list[Stager] = [
            await stack.enter_async_context(servers.server(f"s{number}")) for number in range(count)
        ]
        for stager in stagers:
            await stager.staged()

    assert shared.opened == dict.fromkeys(FILES, 1)
    for number, stager in enumerate(stagers):
        assert servers.copy(f"s{number}") == FILES
        counts = stager.counts
        assert counts.source_files == len(FILES) // count
        assert counts.source_files + counts.copied_files == counts.files == len(FILES)
        assert counts.source_bytes + counts.copied_bytes == sum(map(len, FILES.values()))
        assert (counts.retried, counts.kept_files) == (0, 0)
        assert stager.data == servers.tmp_path / f"s{number}"


async def test_the_files_of_a_server_that_ends_early_are_read_by_the_next_and_it_may_come_again(
    ring, shared
) -> None:
    servers = ring(3)
    begun, started = asyncio.Event(), asyncio.Event()
    stuck = sorted(FILES)[7]  # the third file of server 1

    async def hang(time: int) -> None:
        if time == 1:
            begun.set()
            await asyncio.Event().wait()

    async def second() -> None:
        async with servers.server("s1"):
            started.set()
            await asyncio.Event().wait()

    shared.before[stuck] = hang
    async with asyncio.TaskGroup() as group, servers.server("s0") as one:
        ends = group.create_task(second(), name="second")
        await started.wait()
        async with servers.server("s2") as third:
            await begun.wait()
            await until(lambda: one.plan.held_of(1) == third.plan.held_of(1) == 3)
            ends.cancel()
            await one.staged()
            await third.staged()
            assert servers.copy("s0") == servers.copy("s2") == FILES
            assert shared.opened[stuck] == 2
            before = shared.opened.copy()
            async with servers.server("s1") as again:
                await again.staged()
                assert again.plan.server == 1
            assert again.counts.kept_files + again.counts.copied_files == len(FILES)
    assert servers.copy("s1") == FILES
    assert shared.opened == before


async def test_a_server_that_comes_late_is_served_by_those_that_are_complete(ring, shared) -> None:
    servers, hasty = ring(3), Patience(join_s=0.05, back_s=0.05)
    async with servers.server("s0", patience=hasty) as one:
        await one.staged()
        assert one.counts.source_files == len(FILES)
        async with servers.server("s1", patience=hasty) as late:
            await late.staged()
    assert late.counts.copied_files == len(FILES)
    assert shared.opened == dict.fromkeys(FILES, 1)
    assert servers.copy("s1") == FILES


async def test_a_read_that_hangs_is_given_up_and_tried_again(ring, shared) -> None:
    servers, name = ring(1), sorted(FILES)[3]

    async def hang(time: int) -> None:
        if time < 3:
            await asyncio.Event().wait()

    shared.before[name] = hang
    async with servers.server("s0", patience=Patience(read_s=0.05)) as one:
        await one.staged()
    assert shared.opened == dict.fromkeys(FILES, 1) | {name: 3}
    assert one.counts.retried == 2
    assert servers.copy("s0") == FILES


@pytest.mark.parametrize("change", [-7, +7])
@pytest.mark.parametrize("count", [1, 2])
async def test_a_file_that_changes_its_size_ends_the_staging_with_its_name(
    ring, shared, change, count
) -> None:
    servers, name = ring(count), sorted(FILES)[3]
    content = FILES[name][:change] if change < 0 else FILES[name] + b"further"

    async def cut(time: int) -> None:
        (shared.root / name).write_bytes(content)

    shared.before[name] = cut
    found = rf"{name} cannot be staged: here: .*(ends after|more than)"
    ended = []

    async def stage(number: int) -> None:
        with pytest.raises(DataError, match=found):
            async with servers.server(f"s{number}") as stager:
                await stager.staged()
        ended.append(number)

    async with asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(stage(number), name=f"server {number}")
    assert sorted(ended) == list(range(count))
    assert shared.opened[name] == 3 * count
    assert name not in servers.copy("s0")


async def test_a_file_that_only_its_owner_cannot_read_comes_from_another(ring, shared) -> None:
    servers, name = ring(2), sorted(FILES)[2]  # of server 0

    async def fail(time: int) -> None:
        if time <= 3:
            raise OSError("input/output error")

    shared.before[name] = fail
    async with servers.server("s0") as one, servers.server("s1") as other:
        await one.staged()
        await other.staged()
    assert servers.copy("s0") == servers.copy("s1") == FILES
    assert shared.opened == dict.fromkeys(FILES, 1) | {name: 4}
    assert one.counts.retried == 3


@asynccontextmanager
async def impostor(servers: Ring, number: int, answer: Callable[[Request], None] | None):
    """Listen at the address of a server, and answer as the test wants, or not at all."""

    async def on_link(link) -> None:
        if answer is not None:
            link.serve(answer)
        await link.wait_closed()

    identity = Identity(role="data", node="impostor", incarnation=7)
    async with servers.network.listen(servers.peers[number], identity, on_link):
        yield


async def test_a_server_that_never_answers_is_given_up_and_its_files_are_read_by_another(
    ring, shared
) -> None:
    servers = ring(2)
    async with impostor(servers, 0, None), servers.server("s1", patience=Patience(answer_s=0.05)) as one:
        await one.staged()
        assert one.plan.server == 1
        assert one.plan.gone(0)
    assert servers.copy("s1") == FILES
    assert shared.opened == dict.fromkeys(FILES, 1)


@pytest.mark.parametrize("lie", ["short", "long", "other bytes", "nothing", "elsewhere", "never moves"])
async def test_a_copy_is_taken_only_if_it_matches_list_and_checksum(ring, shared, lie, tmp_path) -> None:
    servers = ring(2)
    found: list[Stager] = []

    def answer(request: Request) -> None:
        honest = found[0]
        if request.message.type == "ReadManifest":
            Stager._answer(honest, request, unpack(request.message, ReadManifest))
            return
        body = unpack(request.message, ReadFile)
        content = FILES[sorted(FILES)[body.file]]
        piece = content[body.offset : body.offset + PIECE_BYTES]
        true = hashlib.blake2b(content, digest_size=16).hexdigest()
        lies = {
            "short": (true, piece[:-1]),
            "long": (true, piece + b"!"),
            "other bytes": (true, bytes(len(piece))),
            "nothing": (true, b""),
            "elsewhere": ("../../outside", piece),
            "never moves": ("", b""),
        }
        checksum, told = lies[lie]
        tensors = [np.frombuffer(told, np.uint8)] if told else []
        request.reply(pack(FilePart(checksum=checksum, progress=1), tensors))

    async with AsyncExitStack() as stack:
        # What it says of itself is what a server with its number would say.
        elsewhere = Ring(tmp_path / "honest", shared, NETWORKS["local"](), ["local://a", "local://b"])
        found.append(await stack.enter_async_context(elsewhere.server("s0")))
        shared.opened.clear()
        await stack.enter_async_context(impostor(servers, 0, answer))
        one = await stack.enter_async_context(servers.server("s1", patience=Patience(stall_s=0.05)))
        await one.staged()
    assert servers.copy("s1") == FILES
    assert one.counts.copied_files == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["honest", "s1", "shared"]


async def test_a_damaged_copy_is_noticed_and_fetched_elsewhere(ring, shared) -> None:
    servers, hasty = ring(2), Patience(join_s=0.05)
    name = sorted(FILES)[5]
    async with servers.server("s0", patience=hasty) as one:
        await one.staged()
        (servers.tmp_path / "s0" / name).write_bytes(bytes(len(FILES[name])))
        (servers.tmp_path / "s0" / "large.bin").unlink()
        async with servers.server("s1", patience=hasty) as other:
            await other.staged()
    assert servers.copy("s1") == FILES
    assert shared.opened == dict.fromkeys(FILES, 1) | {name: 2, "large.bin": 2}
    assert other.counts.retried == 3


async def test_a_server_that_starts_again_keeps_what_is_whole(ring, shared) -> None:
    servers = ring(1)
    async with servers.server("s0") as one:
        await one.staged()
    names, folder = sorted(FILES), servers.tmp_path / "s0"
    (folder / names[1]).unlink()
    (folder / names[2]).write_bytes(b"cut")
    changed = dict(FILES) | {names[3]: FILES[names[3]][::-1]}
    (shared.root / names[3]).write_bytes(changed[names[3]])
    with (folder / ".staging" / "notes").open("ab") as notes:
        notes.write(b'{"path": "half a li')
    shared.opened.clear()
    for read in (names[1:4], []):
        async with servers.server("s0") as one:
            await one.staged()
        assert contents(folder) == changed
        assert shared.opened == dict.fromkeys(read, 1)
        assert one.counts.kept_files == len(FILES) - len(read)
        shared.opened.clear()


async def test_servers_that_see_different_files_refuse_each_other_with_the_first_difference(
    ring, shared, tmp_path
) -> None:
    servers, name = ring(2), sorted(FILES)[1]
    other = Shared(tmp_path / "other", dict(FILES) | {name: b"short"})
    told = []

    async def stage(number: int, source: Path) -> None:
        with pytest.raises(DataError, match=r"(server-[01]|127.0.0.1:[0-9]+) has another source") as failure:
            async with servers.server(f"s{number}", source=source) as stager:
                await stager.staged()
        told.append(str(failure.value))

    async with asyncio.TaskGroup() as group:
        for number, source in enumerate((shared.root, other.root)):
            group.create_task(stage(number, source), name=f"server {number}")
    assert any(f"{name} of " in text and " of 5 bytes" in text for text in told), told


async def test_servers_with_different_lists_of_servers_refuse_each_other(ring) -> None:
    servers = ring(2)
    reverse = Ring(servers.tmp_path, servers.shared, servers.network, servers.peers[::-1])
    with pytest.raises(DataError, match="is server 0 of 2 in its own list, and 1 of 2 here; give all"):
        async with servers.server("s0"), reverse.server("s1") as other:
            await other.staged()


async def test_a_question_beyond_the_list_is_refused_and_others_are_served_later(ring, network) -> None:
    servers = ring(1)
    asker = Identity(role="data", node="asker", incarnation=9)
    async with servers.server("s0") as one:
        await one.staged()
        async with network.connect(one.address, asker) as link:
            digest = one.plan.digest
            for body, said in (
                (ReadFile(digest="other", file=0, offset=0), "stages another list"),
                (ReadFile(digest=digest, file=len(FILES), offset=0), "there is no byte 0 of a file 12"),
                (ReadFile(digest=digest, file=1, offset=1 << 50), "there is no byte"),
            ):
                with pytest.raises(RemoteError, match=said):
                    await link.call(pack(body), timeout_s=20.0)
            last = len(FILES) - 1
            reply = await link.call(pack(ReadFile(digest=digest, file=last, offset=0)), timeout_s=20.0)
            assert reply.tensors[0].tobytes() == FILES[sorted(FILES)[last]]


async def test_the_counts_are_statistics(ring, network) -> None:
    servers = ring(1)
    driver = Identity(role="driver", node="driver", incarnation=9)
    async with servers.server("s0") as one, network.connect(one.address, driver) as link:
        await one.staged()
        answer = await link.call(pack(GetStatistics(run="")), timeout_s=20.0)
        told = read_text_tensor(answer, dict, 1 << 20)
    assert told["staging"] == msgspec.to_builtins(one.counts)
    assert one.summary().endswith(
        f"{len(FILES)} read from there (3.2 MB), 0 copied from other servers (0.0 MB), 0 already here, "
        "0 retries"
    )


async def test_a_source_may_be_one_file(ring, shared, tmp_path) -> None:
    async with ring(1).server("s0", source=shared.root / "large.bin") as one:
        await one.staged()
        assert one.data == tmp_path / "s0" / "large.bin"
    assert contents(tmp_path / "s0") == {"large.bin": FILES["large.bin"]}


@pytest.mark.parametrize("network", ["local"], indirect=True)
async def test_an_error_names_an_unusable_source_or_folder(ring, shared, tmp_path) -> None:
    servers = ring(1)
    (tmp_path / "empty").mkdir()
    (tmp_path / "s0").mkdir()
    (tmp_path / "s0" / "mine.txt").write_text("not to be lost")
    (tmp_path / "loop").mkdir()
    (tmp_path / "loop" / "up").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "empty" / ".pipe")
    (tmp_path / "taken").write_text("a file")
    for source, folder, said in (
        (shared.root, "s0", "mine.txt is not in .*shared; move it away, or stage into an empty"),
        (tmp_path / "absent", "s1", "absent cannot be read: No such file"),
        (tmp_path / "empty", "s1", "empty holds no files"),
        (tmp_path / "empty" / ".pipe", "s1", "is a pipe, socket or device"),
        (tmp_path / "loop", "s1", "(lies too deep|Too many levels)"),
        (shared.root, "taken", "taken cannot be used"),
    ):
        with pytest.raises(DataError, match=said):
            async with servers.server(folder, source=source):
                pass
    assert (tmp_path / "s0" / "mine.txt").read_text() == "not to be lost"


async def test_an_error_names_addresses_that_are_all_taken(ring) -> None:
    servers = ring(1)
    async with servers.server("s0"):
        with pytest.raises(BindFailed, match="cannot listen on any of"):
            async with servers.server("s1"):
                pass


async def test_a_folder_that_another_server_serves_from_is_refused_and_left_as_it_is(ring, shared) -> None:
    servers = ring(2)
    async with servers.server("s0", patience=Patience(join_s=0.05, back_s=0.05)) as one:
        await one.staged()
        with pytest.raises(DataError, match="/s0 is in use: another data server stages into it or serves"):
            async with servers.server("s0"):
                pass
        assert servers.copy("s0") == FILES
        assert len((servers.tmp_path / "s0/.staging/notes").read_text().splitlines()) == len(FILES)


@pytest.mark.parametrize("name", ["shared", "shared/below", "."])
async def test_a_folder_is_not_staged_into_itself(ring, name) -> None:
    with pytest.raises(DataError, match="stage into a folder elsewhere"):
        async with ring(1).server(name):
            pass

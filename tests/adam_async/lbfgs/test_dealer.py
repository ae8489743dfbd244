"""Workers of other processes: bad questions are refused, and the end of a link gives its pieces back."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from adam_async.errors import DeadlineExceeded
from adam_async.lbfgs.dealer import Dealer
from adam_async.messages import AskPieces, Pieces, pack, role_table, unpack
from transport import Identity, LocalNetwork, RemoteError

COMPUTE, PUSH = AskPieces(store="s", pushes=False), AskPieces(store="s", pushes=True)


@asynccontextmanager
async def dealing(*, backups=True, turn_s=5.0):
    """Run a dealer that listens; yields it, and a function that links a further worker."""
    network = LocalNetwork(rules=role_table())
    dealer = Dealer("s", 3, 3, backups=backups, join_s=5.0, turn_s=turn_s)
    identity = Identity(role="client", node="coordinator", incarnation=1)
    links = []

    async def new_link(node):
        link = await network.dial(listener.address, Identity(role="client", node=node, incarnation=2))
        links.append(link)
        return link

    async with network.listen("local://", identity, dealer.serve_link) as listener:
        yield dealer, new_link
        for link in links:
            link.abort()


async def ask(link, body):
    return unpack(await link.call(pack(body), timeout_s=5.0), Pieces)


async def test_the_pieces_of_a_worker_whose_link_ends_go_to_another():
    async with asyncio.timeout(10), dealing() as (dealer, new_link), asyncio.TaskGroup() as group:
        evaluation = group.create_task(dealer.evaluate(7))
        lost, other = await new_link("lost"), await new_link("other")
        assert await ask(lost, COMPUTE) == Pieces(evaluation=7, first=0, stop=1)
        assert await ask(other, COMPUTE) == Pieces(evaluation=7, first=1, stop=2)

        lost.abort()
        await lost.wait_closed()

        found = [1]
        for _ in range(2):
            found.append((await ask(other, of_piece(found[-1]))).first)
        assert sorted(found) == [0, 1, 2]
        last = other.call_nowait(pack(of_piece(found[-1])), timeout_s=5.0)
        assert await ask(other, PUSH) == Pieces(evaluation=7, first=0, stop=3)
        end = AskPieces(store="s", pushes=True, evaluation=7, batch=3)
        other.call_nowait(pack(end), timeout_s=5.0)
        assert await evaluation == 1.5
        assert not last.done()


def of_piece(piece):
    return AskPieces(store="s", pushes=False, evaluation=7, batch=piece, loss=0.5)


async def compute_all(link):
    """Compute the three pieces; the question for a fourth stays open."""
    piece = (await ask(link, COMPUTE)).first
    while piece < 2:
        piece = (await ask(link, of_piece(piece))).first
    return link.call_nowait(pack(of_piece(piece)), timeout_s=5.0)


async def test_a_worker_that_holds_its_turn_loses_it_and_its_late_push_counts():
    async with asyncio.timeout(10), dealing(turn_s=0.1) as (dealer, new_link), asyncio.TaskGroup() as group:
        evaluation = group.create_task(dealer.evaluate(7))
        late, other = await new_link("late"), await new_link("other")
        again = await compute_all(late)
        assert await ask(late, PUSH) == Pieces(evaluation=7, first=0, stop=3)
        waits = other.call_nowait(pack(PUSH), timeout_s=5.0)
        first = await ask(other, COMPUTE)
        assert unpack(await again, Pieces).first == 0  # it may compute the first piece again, too
        assert first.first < 2

        end = AskPieces(store="s", pushes=True, evaluation=7, batch=3)
        late.call_nowait(pack(end), timeout_s=5.0)
        assert await evaluation == 1.5
        assert not waits.done()


async def test_the_only_worker_that_holds_its_turn_ends_the_evaluation():
    async with asyncio.timeout(10), dealing(turn_s=0.1) as (dealer, new_link), asyncio.TaskGroup() as group:
        evaluation = group.create_task(failing(dealer.evaluate(7)))
        worker = await new_link("worker")
        await compute_all(worker)
        assert await ask(worker, PUSH) == Pieces(evaluation=7, first=0, stop=3)
        assert "the only worker to push in its turn" in await evaluation


async def failing(work):
    with pytest.raises(DeadlineExceeded) as caught:
        await work
    return str(caught.value)


async def test_a_second_question_of_one_kind_is_refused_and_another_store_too():
    async with asyncio.timeout(10), dealing() as (_, new_link):
        worker = await new_link("worker")
        with pytest.raises(RemoteError, match="this coordinator minimises on store s"):
            await ask(worker, AskPieces(store="other", pushes=False))
        waiting = worker.call_nowait(pack(PUSH), timeout_s=5.0)
        with pytest.raises(RemoteError, match="one question of each kind"):
            await ask(worker, PUSH)
        assert not waiting.done()


async def test_a_false_report_of_a_push_counts_nothing():
    async with asyncio.timeout(10), dealing() as (dealer, new_link), asyncio.TaskGroup() as group:
        evaluation = group.create_task(dealer.evaluate(7))
        liar, honest = await new_link("liar"), await new_link("honest")
        await ask(liar, COMPUTE)
        liar.call_nowait(pack(AskPieces(store="s", pushes=True, evaluation=7, batch=3)), timeout_s=5.0)
        await ask(honest, COMPUTE)

        assert not evaluation.done()
        evaluation.cancel()


async def test_a_piece_for_a_cancelled_question_waits_until_its_worker_is_lost():
    async with asyncio.timeout(10), dealing(backups=False) as (dealer, _), asyncio.TaskGroup() as group:
        evaluation = group.create_task(dealer.evaluate(7))
        for piece in range(3):
            assert (await dealer.answer("first", COMPUTE)).first == piece
        cancelled = group.create_task(dealer.answer("cancelled", COMPUTE))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.sleep(0)

        dealer.lost("first")
        other = [(await dealer.answer("other", COMPUTE)).first for _ in range(2)]
        dealer.lost("cancelled")
        other.append((await dealer.answer("other", COMPUTE)).first)
        evaluation.cancel()

    assert other == [1, 2, 0]

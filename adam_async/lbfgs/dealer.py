"""The coordinator's side of the workers: their questions wait here until the deal has an answer.

Workers in this process ask directly, workers in other processes over links (`messages/peers.py`). A worker
has at most two open questions: for a piece to compute, and for its turn to push. When its link or task ends,
others get its pieces.
"""

import asyncio
import logging
from collections.abc import Callable

from adam_async.errors import DeadlineExceeded
from adam_async.lbfgs.deal import Deal, Worker
from adam_async.messages import AskPieces, Pieces, pack, unpack
from transport import Link, ProtocolError, Request

logger = logging.getLogger(__name__)

PIECE_S = 3600.0
"""Time in seconds in which at least one worker must compute a piece. A gradient may take long, and a function
that never returns has to end the evaluation."""


class Dealer:
    """Deals out the pieces of one evaluation after the other, each of consecutive batches.

    Fails without a worker for `join_s` seconds, and without a gradient for `PIECE_S`. A worker that holds its
    turn for `turn_s` loses it to another worker; if there is none, the evaluation fails.
    """

    def __init__(
        self, store: str, batches: int, pieces: int, *, backups: bool, join_s: float, turn_s: float
    ) -> None:
        self._store = store
        count = min(pieces, batches)
        self._cuts = [piece * batches // count for piece in range(count + 1)]
        """First batch of each piece, and the number of batches. The cut does not depend on the workers, so
        neither do the bits of a piece's sum."""
        self._piece_at = {batch: piece for piece, batch in enumerate(self._cuts)}
        self._backups = backups
        self._join_s = join_s
        self._turn_s = turn_s
        self._deal: Deal | None = None
        self._workers: set[Worker] = set()
        self._open: dict[tuple[Worker, bool], Callable[[Pieces], None]] = {}
        """Calls that take the answers to the open questions, by worker, and whether it asks for its turn."""
        self._moved = asyncio.Event()
        """Event: the evaluation is over, a turn begins or ends, or the only worker comes or goes."""
        self.computations = 0
        """Number of pieces that were dealt in all ended evaluations, with repetitions."""

    async def evaluate(self, number: int, pieces: int = 0) -> float:
        """Make the workers push the gradients of all pieces, or of the first ones; return the value.

        The number of the evaluation is above all earlier ones of the store. Raises DeadlineExceeded.
        """
        deal = self._deal = Deal(number, pieces or len(self._cuts) - 1, backups=self._backups)
        self._serve()
        while not deal.is_over:
            self._moved.clear()
            holder, computed = deal.in_turn, deal.computed_pieces
            worker_s = PIECE_S if holder is None else self._turn_s
            try:
                async with asyncio.timeout(worker_s if self._workers else self._join_s):
                    await self._moved.wait()
            except TimeoutError:
                if not self._workers:
                    raise DeadlineExceeded("a worker that computes gradients", self._join_s) from None
                if holder is None:
                    if deal.computed_pieces > computed:
                        continue
                    raise DeadlineExceeded(
                        f"one of {len(self._workers)} workers to compute a piece, behind {computed} of "
                        f"{deal.pieces} (a shorter piece has fewer or smaller batches)",
                        PIECE_S,
                    ) from None
                if len(self._workers) == 1:
                    raise DeadlineExceeded("the only worker to push in its turn", self._turn_s) from None
                logger.warning(
                    "a worker of L-BFGS held its turn for %.0f s: another one has it", self._turn_s
                )
                deal.lost(holder)
                self._serve()
        self.computations += deal.computations
        return deal.value

    def ask(self, worker: Worker, asked: AskPieces, answer: Callable[[Pieces], None]) -> None:
        """Take a question with the previous result; call `answer` once, now or later."""
        if not self._workers:
            self._moved.set()
        self._workers.add(worker)
        deal = self._deal
        if deal is not None and asked.evaluation == deal.number:
            piece = self._piece_at.get(asked.batch, -1)  # a wrong batch belongs to no piece
            if asked.pushes:
                deal.pushed(worker, piece)
            else:
                deal.computed(worker, piece, asked.loss)
            self._moved.set()
        self._open[worker, asked.pushes] = answer
        self._serve()

    async def answer(self, worker: Worker, asked: AskPieces) -> Pieces:
        """Take a question from a worker of this process, and return the answer."""
        answer: asyncio.Future[Pieces] = asyncio.get_running_loop().create_future()
        # A worker that fails ends the others, whose questions stay open until they are lost.
        self.ask(worker, asked, lambda pieces: None if answer.done() else answer.set_result(pieces))
        return await answer

    def lost(self, worker: Worker) -> None:
        """Give the pieces of a worker to others."""
        self._workers.discard(worker)
        for pushes in (False, True):
            self._open.pop((worker, pushes), None)
        if self._deal is not None:
            self._deal.lost(worker)
        if not self._workers:
            self._moved.set()
        self._serve()

    def _serve(self) -> None:
        """Answer the questions for which the deal has pieces."""
        deal = self._deal
        if deal is None:
            return
        for worker, pushes in [*self._open]:
            found = deal.turn(worker) if pushes else deal.take(worker)
            if found:
                answer = self._open.pop((worker, pushes))
                first, stop = self._cuts[found.start], self._cuts[found.stop]
                answer(Pieces(evaluation=deal.number, first=first, stop=stop))
                if pushes:
                    self._moved.set()
        if deal.is_over:
            self._moved.set()

    async def serve_link(self, link: Link) -> None:
        """Serve a worker in another process until its link ends."""
        link.serve(self._take, receives=False)
        try:
            await link.wait_closed()
        finally:
            self.lost(link)

    def _take(self, request: Request) -> None:
        try:
            asked = unpack(request.message, AskPieces)
        except ProtocolError as error:
            request.fail("malformed", str(error))
            return
        # The link and not its node: a worker that dials again may come before the end of its last link.
        worker = request.link
        if asked.store != self._store:
            request.fail("wrong-run", f"this coordinator minimises on store {self._store}")
        elif (worker, asked.pushes) in self._open:
            request.fail("busy", "a worker asks one question of each kind at a time")
        else:
            self.ask(worker, asked, lambda pieces: request.reply(pack(pieces)))

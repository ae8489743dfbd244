"""A client for tests of bad messages: it sends each one and checks that the role refuses it."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import pytest

from adam_async.controller.leader_connection import unpack_answer
from tests.simulation.scenarios.bad_fields import BadMessage, bad_messages, is_never_right, numbered
from tests.simulation.scenarios.hostile_peers import ONE_WAY
from tests.simulation.scenarios.valid_messages import Example, Facts, valid_messages
from transport import CallTimeout, Identity, Link, Message, Network, RemoteError, TransportError

ANSWER_S = 20.0
"""Seconds for a dial, or for a refusal, on however slow a machine."""


def refusable(
    pair: tuple[str, str], facts: Facts, examples: Iterable[Example] | None = None
) -> list[BadMessage]:
    """Return the bad messages between two roles that no receiver may answer as if they were right.

    Args:
        pair: Roles of the sender and of the receiver.
        facts: Facts of the receiver: its run, generation and epoch.
        examples: Valid messages in place of those that `valid_messages` makes of the facts.
    """
    found = bad_messages(valid_messages(facts) if examples is None else examples, meant=facts.meant())
    return [bad for bad in found if pair in bad.pairs and is_never_right(bad)]


class BadClient:
    """A client that sends bad messages to one address, and dials again after its link is closed.

    Args:
        network: How it dials.
        address: Where the receiver listens.
        identity: The role, node and incarnation that it proves.
        first: The message that it sends first on each link, and that is answered by one.

    Attributes:
        sent: Number of bad messages.
    """

    def __init__(
        self, network: Network, address: str, identity: Identity, *, first: Message | None = None
    ) -> None:
        self.sent = 0
        self._network, self._address, self._identity, self._first = network, address, identity, first
        self._link: Link | None = None

    async def expect_refusals(self, messages: Iterable[BadMessage]) -> None:
        """Send messages one after the other; each may cost the link, and no more.

        A refusal is an error as the answer, a record that is not set, or the end of the link; for a message
        that gets no answer only the last.
        """
        for number, bad in enumerate(messages, 1):
            link = await self._open()
            self.sent += 1
            if bad.message.type in ONE_WAY:
                await link.send(bad.message)
                await link.wait_closed()
            else:
                await self._expect_refusal(link, numbered(bad, number))

    async def _expect_refusal(self, link: Link, bad: BadMessage) -> None:
        try:
            answer = await link.call(bad.message, timeout_s=ANSWER_S)
        except CallTimeout:
            pytest.fail(f"{bad.name} was not answered")
        except RemoteError as error:
            if error.code == "internal":
                pytest.fail(f"a handler failed at {bad.name}: {error}")
        except TransportError:
            pass  # it cost the link
        else:
            if bad.message.type != "CompareAndSet" or unpack_answer(answer).done:
                pytest.fail(f"{bad.name} was answered")

    async def _open(self) -> Link:
        if self._link is None or self._link.closed:
            self.close()
            self._link = await self._network.dial(self._address, self._identity, timeout_s=ANSWER_S)
            if self._first is not None:
                await self._link.send(self._first)
                await self._link.receive()
        return self._link

    def close(self) -> None:
        """End the link."""
        if self._link is not None:
            self._link.abort()


@asynccontextmanager
async def bad_client(
    network: Network, address: str, identity: Identity, *, first: Message | None = None
) -> AsyncIterator[BadClient]:
    """Run a bad client for a block. Arguments as for `BadClient`."""
    client = BadClient(network, address, identity, first=first)
    try:
        yield client
    finally:
        client.close()

"""Driver and agents over real links: arrival, refusals, orders, and the loss of a side.

tests/processes/test_launch_torchrun.py and test_launch_slurm.py train through agents.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import msgspec
import pytest

from adam_async.cluster.launcher import RoleSpec
from adam_async.cluster.processes import orders_for
from adam_async.errors import BindFailed, ConfigError, DeadlineExceeded, RoleDied, RoleUnreachable, RunFailed
from adam_async.launch.agent import Agent, AgentSettings
from adam_async.launch.agent_messages import (
    AGENT,
    DRIVER,
    Finish,
    Hello,
    KillRole,
    RoleEnded,
    RoleLine,
    RoleListens,
    StartRole,
    agent_table,
)
from adam_async.launch.agents import STATE, AgentLauncher, AgentRole, Gathering
from adam_async.messages import Body, pack, role_table, unpack
from adam_async.run.config import Waits
from adam_async.runtime.clock import system_entropy
from tests.processes.commands import children_of
from transport import HandshakeRejected, Identity, Link, LocalNetwork, TcpNetwork

TOKEN = "a token that nobody guesses"
ORDERS = orders_for(TOKEN, Waits(), profile_events=0)
TWO = Gathering(names=("a", "b"), wait_s=20, remedy="start it", port_remedy="choose another with --port")


def launcher(gathering: Gathering = TWO, bind: str = "tcp://127.0.0.1:0") -> AgentLauncher:
    return AgentLauncher(gathering, token=TOKEN.encode(), bind=bind, entropy=system_entropy)


def settings(driver: AgentLauncher, name: str) -> AgentSettings:
    return AgentSettings(
        name=name,
        driver=f"tcp://127.0.0.1:{driver.port}",
        token=TOKEN,
        machine="m",
        folder="/work",
        cores=4,
        environment={},
        wait_s=20,
        remedy="look there",
        entropy=system_entropy,
    )


def spec(role: str = "ps", node: str = "ps-0", *arguments: str) -> RoleSpec:
    return RoleSpec(role=role, node=node, arguments=arguments, orders=ORDERS[role], environment={})


@asynccontextmanager
async def by_hand(driver: AgentLauncher, name: str, **changed: str | int) -> AsyncIterator[Link]:
    """The link of an agent whose messages the test writes."""
    network = TcpNetwork(token=TOKEN.encode(), entropy=system_entropy, rules=agent_table())
    identity = Identity(role=AGENT, node=name, incarnation=1)
    hello = {"machine": "m", "folder": "/work", "host": "127.0.0.1", "cores": 4, **changed}
    hello = {"version": settings(driver, name).package, **hello}
    async with network.connect(f"tcp://127.0.0.1:{driver.port}", identity) as link:
        await link.send(pack(msgspec.convert(hello, Hello)))
        yield link


async def test_a_missing_agent_is_named_with_the_deadline_and_the_remedy() -> None:
    async with launcher(replace(TWO, wait_s=0.3)) as driver, by_hand(driver, "b"):
        with pytest.raises(DeadlineExceeded, match=r"waited 0.3 s for the agents of a; b arrived; start it"):
            await driver.gathered()


async def test_a_port_in_use_is_named_with_the_remedy() -> None:
    async with launcher() as first:
        taken = f"tcp://127.0.0.1:{first.port}"
        with pytest.raises(BindFailed, match=f"cannot listen on {taken}: .*; choose another with --port"):
            async with launcher(bind=taken):
                pass


@pytest.mark.parametrize(
    ("changed", "claim"),
    [
        (
            {"version": "0.0.1"},
            "a on m has adam-async '0.0.1', and the driver '.*': install the same version",
        ),
        (
            {"folder": "/tmp"},
            "a on m works in /tmp, and the driver in /work, which that machine lacks: submit",
        ),
    ],
)
async def test_an_agent_that_cannot_work_with_the_driver_ends_the_wait(
    changed: dict[str, str], claim: str
) -> None:
    async with launcher(replace(TWO, folder="/work")) as driver, by_hand(driver, "a", **changed) as link:
        finish = unpack(await link.receive(), Finish)
        with pytest.raises(ConfigError, match=claim) as raised:
            await driver.gathered()

    assert (finish.code, finish.reason) == (2, str(raised.value))


async def test_an_unexpected_agent_is_refused_and_the_expected_ones_are_awaited() -> None:
    async with launcher() as driver, by_hand(driver, "a"), by_hand(driver, "c") as stranger:
        finish = unpack(await stranger.receive(), Finish)
        assert finish.reason == "the driver expects no further agent c"
        async with by_hand(driver, "b"):
            await driver.gathered()


async def test_an_agent_whose_address_is_none_loses_its_link_only() -> None:
    async with launcher() as driver, by_hand(driver, "a"):
        for host in ("", "10.0.0.1,tcp://10.0.0.2", "::1]:1/"):
            async with by_hand(driver, "b", host=host) as link:
                await link.wait_closed()
        async with by_hand(driver, "b"):
            await driver.gathered()


async def test_a_refusal_with_a_long_folder_reaches_the_agent() -> None:
    folder = "/" + "é" * 4000
    async with launcher(replace(TWO, folder="/work")) as driver:
        async with by_hand(driver, "a", folder=folder) as link:
            finish = unpack(await link.receive(), Finish)
        with pytest.raises(ConfigError, match="works in /é"):
            await driver.gathered()
    assert finish.reason.startswith("a on m works in /é")


async def test_the_wait_ends_if_no_agent_can_arrive() -> None:
    async with launcher() as driver:
        driver.give_up("srun ended with exit code 1")
        with pytest.raises(RunFailed, match="srun ended with exit code 1"):
            await driver.gathered()


async def test_an_agent_without_the_token_is_refused() -> None:
    async with launcher() as driver:
        with pytest.raises(HandshakeRejected):
            await Agent(replace(settings(driver, "a"), token="another token of some length")).run()


async def test_a_driver_that_does_not_answer_is_named() -> None:
    async with launcher() as driver:
        gone = replace(settings(driver, "a"), wait_s=0.3)
    with pytest.raises(
        RoleUnreachable, match=r"cannot reach the driver at tcp://127.0.0.1:\d+: .*; look there"
    ):
        await Agent(gone).run()


async def test_orders_name_addresses_and_threads_and_have_no_key() -> None:
    async with launcher() as driver, by_hand(driver, "a", host="10.0.0.1") as a, by_hand(driver, "b") as b:
        await driver.gathered()
        async with asyncio.TaskGroup() as group:
            lines: list[str] = []
            roles = [
                driver.start(spec("worker", f"worker-{n}", "--x"), group, lines.append) for n in (0, 1, 2)
            ]
            orders = [unpack(await link.receive(), StartRole) for link in (a, b, a)]
            assert [order.node for order in orders] == ["worker-0", "worker-1", "worker-2"]
            assert orders[0].words[:6] == (
                *("worker", "--id", "worker-0", "--supervised", "--bind"),
                "tcp://10.0.0.1:0",
            )
            assert [order.words[order.words.index("--threads") + 1] for order in orders] == ["4", "4", "2"]
            assert not any(b"adam-async-keys" in order.orders for order in orders)
            await a.send(pack(RoleListens(number=orders[0].number, address="tcp://10.0.0.1:7")))
            assert await roles[0].address == "tcp://10.0.0.1:7"
            await a.send(pack(RoleLine(number=orders[0].number, text="hello")))
            await a.send(pack(RoleEnded(number=orders[0].number, code=-9)))
            await roles[0].ended.wait()
            assert lines == ["worker-0 | hello"]
            assert (roles[0].code, roles[0].how) == (-9, "killed by signal 9")
            for role in roles[1:]:
                role.kill()
            for link, order in ((b, orders[1]), (a, orders[2])):
                assert unpack(await link.receive(), KillRole).number == order.number
                await link.send(pack(RoleEnded(number=order.number, code=-9)))


async def test_the_roles_of_a_lost_agent_move_to_another_and_a_controller_of_several_does_not() -> None:
    async with launcher() as driver, by_hand(driver, "a") as a:
        async with by_hand(driver, "b") as b:
            await driver.gathered()
            async with asyncio.TaskGroup() as group:
                nodes = ["controller-1", "controller-2", "controller-3"]
                addresses = await driver.controller_addresses(
                    nodes, LocalNetwork(rules=role_table()), Identity(role="d", node="d", incarnation=1)
                )
                assert len(set(addresses)) == 3
                fixed = driver.start(spec("controller", nodes[1], "--peers", "x"), group, print)
                first = driver.start(spec("ps", "ps-0"), group, print)
                second = driver.start(spec("ps", "ps-1"), group, print)
                assert (fixed.name, first.name, second.name) == ("b", "b", "a")
                b.abort()
                await fixed.ended.wait()
                await first.ended.wait()
                assert (first.code, first.how) == (255, "its node b is lost")
                moved = driver.start(spec("ps", "ps-0"), group, print)
                again = driver.start(spec("controller", nodes[1], "--peers", "x"), group, print)
                await again.ended.wait()
                assert again.how == "its node b is lost"
                for role in (second, moved):
                    number = unpack(await a.receive(), StartRole).number
                    await a.send(pack(RoleEnded(number=number, code=0)))
                    await role.ended.wait()
                    assert role.how == "ended with exit code 0"


@pytest.mark.parametrize(
    "body",
    [
        RoleEnded(number=99, code=0),
        RoleLine(number=1, text="x" * 4001),
        Hello(version="", machine="", folder="", host="", cores=0),
    ],
    ids=["unknown-role", "long-line", "second-hello"],
)
async def test_an_invalid_message_costs_the_agent_its_link_only(body: Body) -> None:
    async with launcher() as driver, by_hand(driver, "a"):
        async with by_hand(driver, "b") as b:
            await driver.gathered()
            await b.send(pack(body))
            await b.wait_closed()
        async with asyncio.TaskGroup() as group:
            for node in ("ps-0", "ps-1"):
                role = driver.start(spec("ps", node), group, print)
                assert role.name == "a"
                role.lose()


ONE = replace(TWO, names=("a",))


@pytest.mark.slow
@pytest.mark.parametrize(("act", "code"), [(AgentRole.end, 0), (AgentRole.kill, -9)], ids=["end", "kill"])
async def test_a_role_of_an_agent_runs_and_ends_as_ordered(
    act: Callable[[AgentRole], None], code: int
) -> None:
    async with asyncio.TaskGroup() as agents:
        async with launcher(ONE) as driver:
            agent = agents.create_task(Agent(settings(driver, "a")).run(), name="agent")
            await driver.gathered()
            async with asyncio.TaskGroup() as group:
                role = driver.start(spec("controller", "controller"), group, print)
                assert (await role.address).startswith("tcp://127.0.0.1:")
                act(role)
                await role.ended.wait()
    assert agent.result() == 0
    assert role.code == code
    assert role.served_s > 0


@pytest.mark.slow
async def test_an_agent_that_loses_its_driver_kills_its_roles() -> None:
    words = ("controller", "--id", "c", "--supervised", "--bind", "tcp://127.0.0.1:0", "--dir", f"{STATE}/c")
    pids: list[int] = []

    async def lost(link: Link) -> None:
        unpack(await link.receive(), Hello)
        start = StartRole(
            number=1, role="controller", node="c", words=words, environment={}, orders=ORDERS["controller"]
        )
        await link.send(pack(start))
        unpack(await link.receive(), RoleListens)
        pids.extend(children_of(os.getpid()))
        link.abort()

    network = TcpNetwork(token=TOKEN.encode(), entropy=system_entropy, rules=agent_table())
    driver = Identity(role=DRIVER, node="driver", incarnation=1)
    async with launcher(ONE) as unused, network.listen("tcp://127.0.0.1:0", driver, lost) as listener:
        agent = Agent(replace(settings(unused, "a"), driver=listener.address))
        with pytest.raises(RoleDied, match="the driver died: the connection to it ended: "):
            await agent.run()
    assert len(pids) == 1
    assert children_of(os.getpid()) == {}

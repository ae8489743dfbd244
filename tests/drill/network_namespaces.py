"""Linux network namespaces for child processes, joined by bridges: hosts with links that can be cut.

Each host has a namespace, and for each path a pair of virtual interfaces that leads to the path's bridge.
Each path has a separate subnet. This process has an address on each bridge, too. All connections between
hosts have the same congestion control on every machine. A cut sets the outer interface of a pair down:
connections stay open, and carry nothing. A limit slows down the bytes that leave a host on a path. Namespaces
need root and `ip` and `tc` of iproute2.

Every name has the id of this process, so the namespaces of a killed process can be removed later.
"""

import asyncio
import json
import logging
import os
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

logger = logging.getLogger(__name__)

SUBNET = "198.19.{}"
"""First three bytes of the addresses, within the range that RFC 2544 reserves for benchmarks."""

SUBNETS = 256
"""Number of subnets; each path of each process has its own."""

MOST_HOSTS = 250
"""Maximum number of hosts: each has an address in one /24 subnet."""

MOST_PATHS = 3
"""Maximum number of paths; the names of interfaces have room for three digits."""

BURST_S = 0.00025
"""Size of the burst that a limited link sends at once after a pause, as time at the link's rate, in seconds.
A longer burst would make an idle link faster than its rate."""

LEAST_BURST_BYTES = 3 << 10
"""Minimum burst size of a limited link after a pause, in bytes: two Ethernet packets."""

QUEUE_S = 0.05
"""Maximum wait in seconds of a packet in a limited link's queue; further packets are dropped."""

CONGESTION = "cubic"
"""Congestion control of the connections between hosts, the default of Linux. A machine's own default may
differ: with BBR the bytes after a pause wait for up to 0.1 s."""

IP_S = 10.0
"""Maximum time of one call of `ip` or `tc`, in seconds."""

_ADDRESS = re.compile(r"inet 198\.19\.(\d+)\.")
"""Pattern of an interface's address in one of the subnets."""

_OURS = re.compile(r"(\d+: )?(?P<name>(adam-async-|adam)(?P<pid>\d+)-[\w-]+)")
"""Pattern of a line that lists a namespace or interface made by this module, in any process."""


class NamespaceNetwork:
    """The namespaces of this process.

    Args:
        hosts: Names of the hosts, at most `MOST_HOSTS`, of letters, digits and hyphens.
        paths: Number of paths, at most `MOST_PATHS`: links of each host.

    Attributes:
        addresses: Address of this process on each path, from `make` on.
    """

    def __init__(self, hosts: Sequence[str], *, paths: int = 1) -> None:
        assert len(hosts) <= MOST_HOSTS, f"{len(hosts)} hosts"
        assert paths <= MOST_PATHS, f"{paths} paths"
        pid = os.getpid()
        self._bridges = [f"adam{pid}-br{path}" for path in range(paths)]
        self._spaces = {host: f"adam-async-{pid}-{host}" for host in hosts}
        self._links = {
            (host, path): f"adam{pid}-{path * MOST_HOSTS + number}"
            for number, host in enumerate(hosts)
            for path in range(paths)
        }
        self._addresses: dict[tuple[str, int], str] = {}
        self.addresses: list[str] = []

    @property
    def address(self) -> str:
        """Address of this process on the first path, from `make` on."""
        return self.addresses[0]

    def address_of(self, host: str, path: int = 0) -> str:
        """Return the address of a host on a path."""
        return self._addresses[host, path]

    def within(self, host: str) -> tuple[str, ...]:
        """Return the words before a command that start it on a host; the process id stays the same."""
        return ("ip", "netns", "exec", self._spaces[host])

    async def cut(self, host: str, path: int = 0) -> None:
        """Set a link of a host down. Raises OSError: the system refuses."""
        await _ip("link", "set", self._links[host, path], "down")

    async def heal(self, host: str, path: int = 0) -> None:
        """Set a link of a host up again. Raises OSError: the system refuses."""
        await _ip("link", "set", self._links[host, path], "up")

    async def limit(self, host: str, bits_per_s: int, path: int = 0) -> None:
        """With a token bucket that keeps packets in order, limit the rate at which a host sends on a path.

        Raises:
            OSError: The system refuses, or has no such bucket.
        """
        burst = max(LEAST_BURST_BYTES, round(bits_per_s / 8 * BURST_S))
        bucket = ("rate", f"{bits_per_s}bit", "burst", f"{burst}b", "latency", f"{QUEUE_S * 1000:g}ms")
        device = ("dev", f"veth{path}", "root")
        await _run("tc", "-n", self._spaces[host], "qdisc", "replace", *device, "tbf", *bucket)

    async def sent_bytes(self, host: str, path: int = 0) -> int:
        """Return the bytes that left a host on a path, with all headers. Raises OSError: the link is gone."""
        listing = await _ip("-s", "-j", "link", "show", "dev", self._links[host, path])
        return int(json.loads(listing)[0]["stats64"]["rx"]["bytes"])

    async def make(self) -> None:
        """Make the bridges and all hosts. Raises OSError: the system refuses."""
        for space in self._spaces.values():
            await _ip("netns", "add", space)
            await _ip("-n", space, "link", "set", "lo", "up")
        for path, bridge in enumerate(self._bridges):
            await _ip("link", "add", bridge, "type", "bridge")
            subnet = await self._claim_subnet(bridge)
            self.addresses.append(f"{subnet}.1")
            await _ip("link", "set", bridge, "up")
            await _ip(*_route(subnet, self.addresses[path], bridge))
            for number, (host, space) in enumerate(self._spaces.items(), 2):
                address = self._addresses[host, path] = f"{subnet}.{number}"
                peer = ("peer", "name", f"veth{path}", "netns", space)
                await _ip("link", "add", self._links[host, path], "master", bridge, "type", "veth", *peer)
                await _ip("-n", space, "addr", "add", f"{address}/24", "dev", f"veth{path}")
                await _ip("-n", space, "link", "set", f"veth{path}", "up")
                await self.heal(host, path)
                await _ip("-n", space, *_route(subnet, address, f"veth{path}"))

    async def _claim_subnet(self, bridge: str) -> str:
        """Give a bridge an address in a subnet that no other interface uses; return the subnet.

        Raises:
            OSError: All subnets are taken.
        """
        pid = os.getpid()
        for number in [(pid + each) % SUBNETS for each in range(SUBNETS)]:
            if number in await _subnets():
                continue
            subnet = SUBNET.format(number)
            address = (f"{subnet}.1/24", "dev", bridge)
            await _ip("addr", "add", *address)
            # If two processes claim one subnet at the same time, the later one finds both addresses here.
            if (await _subnets()).count(number) == 1:
                return subnet
            await _ip("addr", "del", *address)
        raise OSError(
            f"interfaces of this machine have all {SUBNETS} subnets {SUBNET.format('N')}.0/24: end other "
            "drills"
        )


@asynccontextmanager
async def namespace_network(hosts: Sequence[str], *, paths: int = 1) -> AsyncIterator[NamespaceNetwork]:
    """Make namespaces for the duration of the block; its start removes those of ended processes.

    Raises:
        OSError: The system has no `ip`, or refuses a namespace; the message has the reason.
    """
    network = NamespaceNetwork(hosts, paths=paths)
    await _remove(lambda pid: not _is_running(pid))
    try:
        await network.make()
        yield network
    finally:
        await _remove(lambda pid: pid == os.getpid())


async def _remove(is_meant: Callable[[int], bool]) -> None:
    """Remove the interfaces and namespaces of all processes whose process id satisfies a condition."""
    for kind, listing in (("link", ("-o", "link", "show")), ("netns", ("netns", "list"))):
        for line in (await _ip(*listing)).splitlines():
            found = _OURS.match(line)
            if found is None or not is_meant(int(found["pid"])):
                continue
            try:
                await _ip(kind, "del", found["name"])
            except OSError as error:  # another process removes the namespace now or later
                logger.debug("%s", error)


async def _subnets() -> list[int]:
    """Return the subnet numbers of all interfaces, once for each address."""
    listing = await _ip("-o", "-4", "addr", "show")
    return [int(found[1]) for found in _ADDRESS.finditer(listing)]


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


def _route(subnet: str, address: str, device: str) -> tuple[str, ...]:
    """Return the words of `ip` that choose the congestion control of the connections from a device."""
    route = ("route", "replace", f"{subnet}.0/24", "dev", device)
    return (*route, "proto", "kernel", "scope", "link", "src", address, "congctl", CONGESTION)


async def _ip(*words: str) -> str:
    """Run `ip` and return its output. For errors see `_run`."""
    return await _run("ip", *words)


async def _run(program: str, *words: str) -> str:
    """Run a program of iproute2 and return its output.

    Raises:
        OSError: The program is not installed, fails, or takes longer than `IP_S`.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            program,
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # the terminal's Ctrl-C must not end the command halfway
        )
    except FileNotFoundError:
        raise OSError(f"`{program}` of iproute2 is not installed") from None
    try:
        async with asyncio.timeout(IP_S):
            output, errors = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise OSError(f"`{program} {' '.join(words)}` takes longer than {IP_S:g} s") from None
    if process.returncode:
        raise OSError(f"`{program} {' '.join(words)}`: {errors.decode(errors='replace').strip()}")
    return output.decode(errors="replace")

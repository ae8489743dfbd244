"""A network made of several: each address is for the one that knows its scheme.

network = SchemeNetworks(local=LocalNetwork(...), tcp=TcpNetwork(...))
network.listen("local://", ...)                       # by reference, within this loop
network.dial("tcp://10.0.0.1:7070", ...)              # to a data server elsewhere
"""

from contextlib import AbstractAsyncContextManager

from transport import Identity, Link, Listener, Network, RetrySchedule
from transport.network import DIAL_S, OnLink


class SchemeNetworks(Network):
    """Several networks side by side. What each promises, it promises here.

    Args:
        networks: By the scheme of their addresses: what stands before ``://``.
    """

    def __init__(self, **networks: Network) -> None:
        self.networks = networks

    def listen(
        self, address: str, identity: Identity, on_link: OnLink
    ) -> AbstractAsyncContextManager[Listener]:
        return self._network_of(address).listen(address, identity, on_link)

    async def dial(
        self,
        address: str,
        identity: Identity,
        *,
        timeout_s: float = DIAL_S,
        retry: RetrySchedule | None = None,
        peer_role: str | None = None,
    ) -> Link:
        network = self._network_of(address)
        return await network.dial(address, identity, timeout_s=timeout_s, retry=retry, peer_role=peer_role)

    def _network_of(self, address: str) -> Network:
        network = self.networks.get(address.partition("://")[0])
        if network is None:
            known = ", ".join(f"{scheme}://" for scheme in sorted(self.networks))
            raise ValueError(f"address {address!r} is of none of these networks: {known}")
        return network

    def __repr__(self) -> str:
        return f"<SchemeNetworks {', '.join(map(repr, self.networks.values()))}>"

"""The pins of one bundle of a store on its server: refused, or kept on the disk of the server (`pins.py`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from adam_async.messages import PinFacts, PinShards
from adam_async.parameter_server.bundle import Bundle
from adam_async.parameter_server.bundle_saver import BundleSaver
from adam_async.parameter_server.events import Pin
from adam_async.parameter_server.kept_shards import PinCopies, bytes_of
from adam_async.parameter_server.piece_states import Catalogue
from adam_async.parameter_server.store_host import StoreHost
from adam_async.persistence.records import Order
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.shard_table import ShardSpec
from adam_async.run.store_record import StoreRecord


@dataclass(frozen=True, slots=True, eq=False)
class StorePins:
    """Saves one bundle at pins. Each call names the bundle's shards: one that joins again has new ones."""

    store: StoreRecord
    home: str
    table: Sequence[ShardSpec]
    """The shards of all bundles of the store."""
    pieces: Sequence[Sequence[ShardSpec]]
    """The shards of this bundle, cut into pieces."""
    host: StoreHost
    resume: Callable[[], None]
    """Called if work that waited for the disk may go on."""

    def refusal(self, body: PinShards, bundle: Bundle) -> tuple[str, str]:
        """Return the code and the reason of the refusal of a pin; no reason if this server takes it."""
        host = self.host
        if self.store.program:
            return "malformed", f"store {self.store.id} belongs to a run: take checkpoints of it"
        if body.removes:
            return "", ""
        if host.pins is None:
            return "malformed", f"{host.node} has no folder: start it again with --dir DIR"
        if body.pin in bundle.pins:
            return "", ""  # a repetition, perhaps to a new primary
        if bundle.writes_pin:
            return "busy", f"{host.node} still writes another pin"
        name = host.disk.catalogue.name if host.disk is not None and host.disk.catalogue is not None else ""
        return "malformed", host.pins.refusal(name, body.pin)

    def keep(self, pin: Pin, bundle: Bundle, saver: BundleSaver, cluster: ClusterMap | None) -> None:
        """Save the shards for a pin that was just applied, or remove the pin from the disk."""
        host, disk = self.host, self.host.disk
        order = saver.pinned_at.pop(pin.pin, (0, saver.changes))
        if disk is None or host.pins is None or disk.catalogue is None:
            return
        if pin.removes:
            host.spawn(f"pin-{pin.name}", host.pins.remove(pin.pin))
            return
        copies = bundle.pinning
        if copies is None or (copies.pin is not pin and copies.pin.pin == pin.pin):
            return  # a repetition, or the server joins
        began_ms, text = int(disk.wall_clock() * 1000), f"{host.node} still writes another pin"
        facts = self._facts_of(pin, bundle, cluster, began_ms)
        if copies.pin is pin and not (text := host.pins.refusal(disk.catalogue.name, pin.pin)):
            saving = self._save(bundle, copies, disk.catalogue, facts, order)
            host.pins.begin(host.spawn(f"pin-{pin.name}", saving))
            return
        host.pins.fail(disk.catalogue.name, facts, text)
        if copies.pin is pin:
            copies.end()
            bundle.pinning = None

    def _facts_of(self, pin: Pin, bundle: Bundle, cluster: ClusterMap | None, began_ms: int) -> PinFacts:
        store = self.store
        homes = tuple(sorted({store.buckets[spec.bucket] for spec in self.table}))
        bundles = [cluster.bundle(store.id, home) for home in homes] if cluster is not None else []
        members = {node for each in bundles if each is not None for node, _ in each.in_sync}
        return PinFacts(
            name=pin.name,
            pin=pin.pin,
            store=store.id,
            home=self.home,
            homes=homes,
            servers=tuple(sorted({*members, self.host.node})),
            began_ms=began_ms,
            nbytes=sum([bytes_of(shard) for shard in bundle.shards.values()]),
        )

    async def _save(
        self, bundle: Bundle, copies: PinCopies, catalogue: Catalogue, facts: PinFacts, order: Order
    ) -> None:
        assert self.host.pins is not None
        try:
            await self.host.pins.write(copies, catalogue, facts, self.pieces, order, self.resume)
        finally:
            if bundle.pinning is copies:
                bundle.pinning = None
        self.resume()

    def remove_given_up(self, bundle: Bundle) -> None:
        """Remove the pins from the disk that the log of a bundle has given up."""
        pins = self.host.pins
        for pin, is_over in bundle.pins.items() if pins is not None else ():
            if pins is not None and is_over:
                self.host.spawn(f"pin-{pin}", pins.remove(pin))

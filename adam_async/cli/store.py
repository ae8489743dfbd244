"""The command `store`: list the stores of a cluster, or show, save or delete one."""

from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from adam_async.cli.files import announce_existing, check_target
from adam_async.cli.operation import print_copies
from adam_async.cli.options import Action, StoreOptions
from adam_async.cli.roles.serving import waits_at_start
from adam_async.cli.terminal import Terminal, new_table, print_json
from adam_async.cli.token import read_token
from adam_async.cluster.networks import cluster_network
from adam_async.errors import ConfigError, counted, failing_as
from adam_async.run.addresses import check_addresses
from adam_async.run.token_file import holds_keys_of
from adam_async.runtime.clock import system_entropy
from adam_async.runtime.disk import Disk
from adam_async.store.store import ParameterStore
from adam_async.store.survey import ClientSummary, StoreSummary, Survey, join
from transport import BufferPool

MOST_ROWS = 1000
"""Maximum number of arrays in the table of `show`; --json has all."""


async def run_store(
    action: Action,
    name: str | None,
    file: Path | None,
    options: StoreOptions,
    environment: Mapping[str, str],
    terminal: Terminal,
) -> int:
    """List the stores of a cluster, or show, save or delete one.

    Raises:
        ConfigError: A word or an option is missing or superfluous, or the file cannot be written.
        StoreError: The cluster has no store with this name, or the store may not be deleted.
        RoleUnreachable: No controller answered.
    """
    if action == "list":
        await _with_survey(options, environment, lambda survey: _list(survey, options, terminal))
    elif action == "show":
        assert name is not None
        await _with_survey(options, environment, lambda survey: _show(survey, name, options, terminal))
    elif action == "save":
        assert name is not None
        assert file is not None
        await _save(name, file, options, environment, terminal)
    else:
        assert name is not None
        token = await read_token(options.token_file, environment)
        # A driver may delete all stores. Keys of a client suffice for those that no live node has created.
        is_client = token is not None and holds_keys_of(token, "client")
        work = lambda survey: _delete(survey, name, options, terminal)  # noqa: E731
        await _with_survey(options, environment, work, role="client" if is_client else "driver")
    return 0


async def _with_survey(
    options: StoreOptions,
    environment: Mapping[str, str],
    work: Callable[[Survey], Coroutine[Any, Any, None]],
    *,
    role: str = "reader",
) -> None:
    controllers = check_addresses(options.controller, "--controller")
    token = await read_token(options.token_file, environment, role=role)
    network = cluster_network(token, entropy=system_entropy, buffers=BufferPool())
    async with join(network, controllers, role, waits_at_start(options.wait)) as survey:
        await work(survey)


async def _list(survey: Survey, options: StoreOptions, terminal: Terminal) -> None:
    stores = survey.stores()
    if options.json:
        print_json({"stores": stores}, terminal)
        return
    if not stores:
        terminal.print("no stores")
        return
    table = new_table(
        "store", "state", "consistency", ">arrays", ">bytes", "primaries", "copies in sync", ">clients"
    )
    for store in stores:
        table.add_row(
            store.name,
            store.phase,
            store.consistency,
            f"{store.arrays:,}",
            f"{store.bytes:,}",
            ", ".join(store.servers) or "-",
            _in_sync(store),
            f"{store.clients:,}",
        )
    terminal.table(table)


async def _show(survey: Survey, name: str, options: StoreOptions, terminal: Terminal) -> None:
    details = await survey.details(name, on_silence=terminal.notice)
    if options.json:
        print_json(details, terminal)
        return
    store = details.store
    terminal.print(f"{store.name}: {store.phase}, {store.consistency}, {_size(store)}, id {store.id}")
    if store.reason:
        terminal.print(f"reason: {store.reason}")
    if store.run:
        terminal.print(f"run: {store.run}")
    print_copies("the store", store.copies, terminal)
    table = new_table("array", "type", "shape", "rule", ">shards", ">bytes", ">version")
    for array in details.arrays[:MOST_ROWS]:
        shape = " x ".join(map(str, array.shape)) or "scalar"
        version = "-" if array.version is None else f"{array.version:,}"
        table.add_row(
            array.name, array.dtype, shape, array.rule, f"{array.shards:,}", f"{array.bytes:,}", version
        )
    terminal.table(table)
    if (left := len(details.arrays) - MOST_ROWS) > 0:
        terminal.print(f"{counted(left, 'more array')}; --json lists all")
    if details.pins:
        pins = new_table("pin", "state", ">bytes", "servers")
        for pin in details.pins:
            state = "valid" if pin.valid else "unfinished, or its servers are away"
            pins.add_row(pin.name, state, f"{pin.bytes:,}", ", ".join(pin.servers) or "-")
        terminal.table(pins)
    if not details.clients:
        terminal.print("no clients")
        return
    table = new_table("client", ">place", ">clock", ">shard pushes", ">staleness")
    for client in details.clients:
        table.add_row(client.node or "left", client.place, *_counts(client))
    terminal.table(table)


def _in_sync(store: StoreSummary) -> str:
    """Return a bundle's lowest number of copies in sync, and the wanted number, as text."""
    fewest = min((len(bundle.in_sync) for bundle in store.copies.bundles), default=0)
    return f"{fewest} of {store.copies.copies}"


def _counts(client: ClientSummary) -> tuple[str, str, str]:
    """Return the clock, the number of pushed shards and their mean staleness, as text."""
    pushes = sum(client.staleness.values())
    clock = "-" if client.clock is None else f"{client.clock:,}"
    if not pushes:
        return clock, "-", "-"
    mean = sum(int(lag) * count for lag, count in client.staleness.items()) / pushes
    return clock, f"{pushes:,}", f"{mean:.2f}"


async def _save(
    name: str, file: Path, options: StoreOptions, environment: Mapping[str, str], terminal: Terminal
) -> None:
    async with Disk() as disk:
        await check_target(file, "store save", disk)
        await announce_existing(file, disk, terminal)
    token = await read_token(options.token_file, environment, role="reader")
    async with ParameterStore.open(
        check_addresses(options.controller, "--controller"),
        name=name,
        create="never",
        reader=True,
        token=token,
        waits=waits_at_start(options.wait),
    ) as store:
        with failing_as(ConfigError, f"{file} cannot be written"):
            await store.save(file)
        count = len(store.arrays)
    if options.json:
        print_json({"store": name, "file": str(file), "arrays": count}, terminal)
    else:
        terminal.print(f"saved {counted(count, 'array')} of store {name} to {file}")


async def _delete(survey: Survey, name: str, options: StoreOptions, terminal: Terminal) -> None:
    store = survey.summary(name)
    if not options.yes:
        raise ConfigError(f"store delete {name} removes {_size(store)} that {_users(store)}: add --yes")
    await survey.delete(name)
    if options.json:
        print_json({"deleted": store}, terminal)
    else:
        terminal.print(f"deleted store {name}: {_size(store)}")


def _size(store: StoreSummary) -> str:
    return f"{counted(store.arrays, 'array')} of {counted(store.bytes, 'byte')}"


def _users(store: StoreSummary) -> str:
    return f"{counted(store.clients, 'client')} {'uses' if store.clients == 1 else 'use'}"

"""The arguments of `ParameterStore.open`, checked, in one description for both interfaces of the store.

A field has its argument's type, bounds, default and modes, as a run's options have
(`adam_async.option_types`). The signatures of both interfaces, the joining, the checks and the table in
docs/reference/store.md come from it.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, wraps
from pathlib import Path
from typing import Annotated, Any, Concatenate, Literal, ParamSpec, TypeVar

import msgspec
from msgspec import Meta

from adam_async.errors import ConfigError
from adam_async.messages.body import PinName
from adam_async.model.rules import AnyRule, Sgd
from adam_async.option_types import (
    BYTES,
    OBJECT,
    Check,
    Mark,
    Mode,
    Not,
    Only,
    check_modes,
    check_types,
    options_of,
)
from adam_async.report.stream import Callback, check_callbacks
from adam_async.run.addresses import check_addresses
from adam_async.run.config import MOST_COPIES, SHARD_BYTES, Waits, check_consistency, slack_of
from adam_async.run.shard_table import fault_of_shards
from adam_async.run.store_record import (
    MOST_CLIENTS,
    NUM_BUCKETS,
    ArrayRecord,
    Copies,
    MinInSync,
    Servers,
    ShardBytes,
    store_key,
)
from adam_async.run.token_file import check_token_is_for
from adam_async.store.arrays import InitialArrays, StoreRule, records_of
from transport.config import LinkKind

_P = ParamSpec("_P")
_Described = TypeVar("_Described")
_Result = TypeVar("_Result")

LOCAL = "local"
"""Address of the servers in the caller's loop."""

_LOCAL = Mode("where=local", "where", (LOCAL,), "open the store at 'local'", "open the store of a cluster")
_ARRAYS = Mode("arrays", "arrays", enter="give the arrays of the store too")
_ITS_OWN = "a store that exists has its own"
_WITH_ARRAYS = Only(_ARRAYS, _ITS_OWN)

BY_CREATOR = Mark("by creator")
"""Only the creator of a store decides the argument, with the arrays of the store, a pin or a file."""
_ONE_SERVER = "local has one server"


def _check_where(name: str, where: str) -> None:
    try:
        if where != LOCAL:
            check_addresses(where, name)
    except ConfigError as error:
        raise ConfigError(f"{error}; 'local' stands for a server in this loop") from None


def _check_name(_: str, name: str | None) -> None:
    if name is not None:
        store_key(name)


def _check_pin(_: str, pin: str | None) -> None:
    if pin is None:
        return
    store, slash, name = pin.rpartition("/")
    if fault_of_pin_name(name) or "/" in store:
        raise ConfigError(f"pin is 'STORE/PIN', or 'PIN' of this store's name, not {pin!r:.200}")
    if slash:
        store_key(store)


def fault_of_pin_name(name: object) -> str:
    """Return why a value is not the name of a pin; empty if it is."""
    try:
        msgspec.convert(name, PinName)
    except msgspec.ValidationError:
        return (
            "the name of a pin is 1 to 64 letters, digits, dots, hyphens and underscores, and begins with a "
            f"letter or a digit, not {name!r:.80}"
        )
    return ""


class _Positional(msgspec.Struct, frozen=True, eq=False):
    """The arguments that a caller may give without their names."""

    where: Annotated[str, Check(_check_where)]
    arrays: Annotated[InitialArrays | None, OBJECT] = None


class OpenArguments(_Positional, frozen=True, kw_only=True, eq=False, dict=True):
    """The arguments of `ParameterStore.open`.

    Args:
        where: ``local`` for one server in this loop, which the first open store starts, and the last one ends
            with all its stores; or addresses of controllers, ``tcp://host:port``, joined by commas.
        arrays: Names to NumPy arrays with their first values, which are finite, or to `ArraySpec` for zeros;
            None joins an existing store, or restores it from the disks of servers. Joining compares names,
            shapes, types, rules and consistency, but neither values nor rates.
        name: Name of the store in its cluster. All clients that pass one name share the store. With ``local``
            and neither `name` nor `dir`, each call opens a new store, with this client alone.
        create: ``auto`` creates the store if it is absent, ``new`` refuses one that exists, and ``never``
            only joins, or restores a store from the disks of servers.
        rule: Update rule of all arrays, or of each by name. The servers of a cluster apply a `UserRule` only
            if they allow it (``adam-async ps --allow-rule``); those of ``local`` allow the rules of this
            call.
        consistency: ``asp`` without clocks; ``ssp:S``, in which a pull at step t waits until every client has
            ended step t - S; or ``bsp``, in which the servers apply the mean of the clients' gradients at
            each step.
        replicas: With clocks, the number of clients that the first step waits for; with bsp the creator needs
            it, and with ssp it is 1 by default.
        copies: Number of servers with each shard, 1 with ``local``. The default is 1 with one controller;
            with several it is 3, or the number of live servers if that is lower.
        min_in_sync: Number of copies that must have a push before it is applied; 0 means 2, or 1 with one
            copy.
        servers: Number of servers to use; 0 for all servers live at the creation of the store.
        shard_bytes: Maximum size of a shard, in bytes.
        reader: Whether this client only pulls. A reader never delays other clients.
        durable: Whether a push is acknowledged only when it is on the disks of all copies in sync. All
            servers need a folder.
        pin: Pin with which a new store begins, ``STORE/PIN``, or ``PIN`` of this store's name: its values and
            the state of its rules take the place of the first values of `arrays`. Without `arrays` the store
            has the arrays, rules, consistency and shards of the pin.
        init: File of `save` with which a new store begins, as with a pin. Its rules begin anew unless it was
            saved with ``rule_state=True``.
        dir: With ``local``, folder in which the server keeps its stores: a store that is opened again by its
            name gets back its values and the state of its rules. None: in memory only. The servers of a
            cluster have their own folders (``adam-async ps --dir``).
        link: Links to servers of this host: ``shared`` (a Unix socket, and shared memory for arrays),
            ``tcp``, or ``auto`` (shared where that is possible).
        token: Text of the cluster's token file, or of keys of the role ``client`` or ``reader``; none on one
            machine.
        waits: Deadlines, in seconds.
        callbacks: Objects that get the events of this client and of the store (`adam_async.run.events`), each
            in a thread of its own.

    Raises:
        ConfigError: An argument is invalid; the message has its name and value.
    """

    name: Annotated[str | None, Check(_check_name)] = None
    create: Literal["auto", "new", "never"] = "auto"
    rule: Annotated[StoreRule | Mapping[str, StoreRule], OBJECT, _WITH_ARRAYS] = Sgd()
    consistency: Annotated[str, Check(check_consistency), _WITH_ARRAYS] = "asp"
    replicas: Annotated[int, Meta(ge=0, le=MOST_CLIENTS), BY_CREATOR] = 0
    copies: Annotated[
        Copies | None, BY_CREATOR, Not(_LOCAL, _ONE_SERVER, tuple(range(2, MOST_COPIES + 1)))
    ] = None
    min_in_sync: Annotated[MinInSync, BY_CREATOR] = 0
    servers: Annotated[Servers, BY_CREATOR, Not(_LOCAL, _ONE_SERVER, tuple(range(2, NUM_BUCKETS + 1)))] = 0
    shard_bytes: Annotated[ShardBytes, BYTES, _WITH_ARRAYS] = SHARD_BYTES
    reader: bool = False
    durable: Annotated[bool, BY_CREATOR] = False
    pin: Annotated[str | None, Check(_check_pin)] = None
    init: Annotated[str | Path | None, OBJECT] = None
    dir: Annotated[
        str | Path | None,
        OBJECT,
        Only(_LOCAL, "the servers of a cluster have their own folders, adam-async ps --dir"),
    ] = None
    link: LinkKind = "auto"
    token: str | None = None
    waits: Waits = Waits()
    callbacks: Annotated[Sequence[Callback], OBJECT] = ()

    def __post_init__(self) -> None:
        check_types(self)
        records = self.records
        check_modes(OpenArguments, {name: getattr(self, name) for name in options_of(OpenArguments)})
        if self.arrays is None and not self.has_origin:
            self._check_creates()
        if self.copies is not None and self.min_in_sync > self.copies:
            raise ConfigError(
                f"min_in_sync is {self.min_in_sync}, and copies {self.copies}: raise copies, or leave "
                "min_in_sync out"
            )
        if problem := fault_of_shards(records, self.shard_bytes):
            raise ConfigError(problem)
        if self.create == "new":
            if self.is_summed and not self.replicas:
                raise ConfigError(
                    "consistency='bsp' needs replicas=N, the number of clients of the first step"
                )
            if (self.arrays is None and not self.has_origin) or self.reader:
                raise ConfigError("create='new' needs the arrays of the store, pin or init, and no reader")
        if self.has_origin and (self.reader or self.create == "never"):
            raise ConfigError(
                "pin and init begin a new store: leave them out for a reader, and with create='never'"
            )
        if self.pin is not None and self.init is not None:
            raise ConfigError("a new store begins with a pin or with the file of init: leave one out")
        check_callbacks(self.callbacks)
        if not isinstance(self.init, str | Path | None):
            raise ConfigError(f"init is the path of a file, not {self.init!r:.80}")
        if self.token is not None:
            check_token_is_for(self.token, "reader" if self.reader else "client", origin="token")
        if self.name is None:
            self._check_needs_no_name()
        if self.durable and self.where == LOCAL and self.dir is None:
            raise ConfigError("durable is True, and the server of 'local' has no folder: add dir=FOLDER")

    def _check_creates(self) -> None:
        """Check that a call without arrays, pin and init leaves out what the creator of a store decides."""
        for name, option in options_of(OpenArguments).items():
            value = getattr(self, name)
            if option.has(BY_CREATOR) and value != option.default:
                raise ConfigError(
                    f"{name}={value} has no effect without arrays, because {_ITS_OWN}: give the arrays of "
                    f"the store too, pin or init, or leave {name} out"
                )

    def _check_needs_no_name(self) -> None:
        """Check that a nameless store is new, local, in memory, and for one client."""
        for word, fits in (
            ("where", self.where == LOCAL),
            ("dir", self.dir is None),
            ("arrays", self.arrays is not None or self.init is not None),
            ("create", self.create != "never"),
            ("reader", not self.reader),
            ("replicas", self.replicas <= 1),
            ("pin", self.pin is None),
        ):
            if not fits:
                raise ConfigError(
                    f"name is missing, and {word} is {getattr(self, word)!r:.80}: only a new store at "
                    "'local', in memory and for one client, needs no name. Add name='model', in each client "
                    "of the store"
                )

    @property
    def has_origin(self) -> bool:
        """Whether a new store begins with a pin or a file."""
        return self.pin is not None or self.init is not None

    @property
    def pinned(self) -> tuple[str, str]:
        """Names of the pin and of its store."""
        assert self.pin is not None
        assert self.name is not None
        store, _, pin = self.pin.rpartition("/")
        return store or self.name, pin

    @property
    def records(self) -> tuple[ArrayRecord, ...]:
        """Records of the arrays; none without arrays."""
        return self._recorded[0]

    @property
    def rules(self) -> tuple[AnyRule, ...]:
        """Rules of the arrays, by the numbers in `records`."""
        return self._recorded[1]

    @cached_property
    def _recorded(self) -> tuple[tuple[ArrayRecord, ...], tuple[AnyRule, ...]]:
        return ((), ()) if self.arrays is None else records_of(self.arrays, self.rule)

    @property
    def slack(self) -> int | None:
        """Number of clocks by which a client may be ahead of the slowest; None for asp."""
        return slack_of(self.consistency)

    @property
    def is_summed(self) -> bool:
        """Whether servers apply the mean of a step's gradients (bsp); with ``ssp:0`` they apply each push."""
        return self.consistency == "bsp"


def with_arguments(
    describe: Callable[_P, _Described],
) -> Callable[[Callable[[Any, _Described], _Result]], Callable[Concatenate[Any, _P], _Result]]:
    """Give a method the arguments of this description, with their types and texts.

    Args:
        describe: Class of the description, a struct whose docstring begins with one line.
    """
    struct: Any = describe
    options, signature = options_of(struct), inspect.signature(describe)
    # A reader of the signature does not need the field's bounds and modes.
    shown = [each.replace(annotation=options[name].kind) for name, each in signature.parameters.items()]
    text = (inspect.getdoc(describe) or "").partition("\n\n")[2]

    def decorate(method: Callable[[Any, _Described], _Result]) -> Callable[Concatenate[Any, _P], _Result]:
        @wraps(method)
        def call(owner: Any, /, *args: _P.args, **given: _P.kwargs) -> _Result:
            return method(owner, describe(*args, **given))

        owner, taken = inspect.signature(method).parameters.values()
        del taken
        call.__signature__ = inspect.signature(method).replace(parameters=[owner, *shown])  # type: ignore[attr-defined]
        call.__doc__ = f"{inspect.getdoc(method)}\n\n{text}"
        return call

    return decorate


def consistency_of(slack: int | None, *, is_summed: bool) -> str:
    """Return the text of a consistency, as `ParameterStore.open` takes it."""
    if is_summed:
        return "bsp"
    return "asp" if slack is None else f"ssp:{slack}"

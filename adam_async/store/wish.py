"""Pure: the checked arguments of `ParameterStore.open`, and consistencies from and to their texts."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from adam_async.errors import ConfigError, check_flags
from adam_async.messages.bounds import PinName
from adam_async.model.rules import AnyRule
from adam_async.option_types import fault_of
from adam_async.run.config import Waits
from adam_async.run.shard_table import fault_of_shards
from adam_async.run.store_record import (
    MOST_CLIENTS,
    MOST_SLACK,
    ArrayRecord,
    Copies,
    MinInSync,
    Servers,
    ShardBytes,
    store_key,
)
from adam_async.store.arrays import InitialArrays

Create = Literal["auto", "new", "never"]
"""Case in which `open` creates a store: if it is absent, always (an existing one is refused), or never."""

CREATE_WORDS = ("auto", "new", "never")


class StoreNumbers(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The numbers that the creator of a store decides."""

    replicas: Annotated[int, Meta(ge=0, le=MOST_CLIENTS)]
    """Number of clients that the first step waits for; 0 if not given."""
    copies: Copies | None = None
    """Number of copies; None: 1 with one controller, else `DEFAULT_COPIES`, or all live servers if fewer."""
    min_in_sync: MinInSync = 0
    """Number of copies that must have a push before it is applied; 0 if not given."""
    servers: Servers
    shard_bytes: ShardBytes


class StoreWish(StoreNumbers, frozen=True, kw_only=True, eq=False):
    """The arguments of `ParameterStore.open` except the address, the folder and the token.

    Raises:
        ConfigError: An argument is invalid; the message has its name and value.
    """

    name: str
    create: str
    values: InitialArrays | None
    records: tuple[ArrayRecord, ...]
    rules: tuple[AnyRule, ...]
    slack: int | None
    is_summed: bool
    """Whether servers apply the mean of the gradients of a step (bsp); with ``ssp:0`` they apply each
    push."""
    reader: bool
    durable: bool = False
    pin: str | None = None
    """Pin with the first values of a new store: ``STORE/PIN``, or ``PIN`` of the store's own name."""
    waits: Waits

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ConfigError(f"the name of a store is text, not {self.name!r:.80}")
        store_key(self.name)
        if self.pin is not None:
            self._check_pin()
        if fault := fault_of(self, StoreNumbers):
            raise ConfigError(fault)
        if self.copies is not None and self.min_in_sync > self.copies:
            raise ConfigError(
                f"min_in_sync is {self.min_in_sync}, and copies {self.copies}: raise copies, or leave "
                "min_in_sync out"
            )
        if problem := fault_of_shards(self.records, self.shard_bytes):
            raise ConfigError(problem)
        check_flags(reader=self.reader, durable=self.durable)
        if not isinstance(self.waits, Waits):
            raise ConfigError(f"waits is an adam_async.Waits, not {self.waits!r:.80}")
        if self.create not in CREATE_WORDS:
            raise ConfigError(f"create is one of {', '.join(CREATE_WORDS)}, not {self.create!r}")
        if self.create == "new":
            if self.is_summed and not self.replicas:
                raise ConfigError(
                    "consistency='bsp' needs replicas=N, the number of clients of the first step"
                )
            if (self.values is None and self.pin is None) or self.reader:
                raise ConfigError("create='new' needs the arrays of the store, or a pin, and no reader")

    def _check_pin(self) -> None:
        if not isinstance(self.pin, str) or fault_of_pin_name(self.pinned[1]):
            raise ConfigError(f"pin is 'STORE/PIN', or 'PIN' of this store's name, not {self.pin!r:.200}")
        store_key(self.pinned[0])
        if self.reader or self.create == "never":
            raise ConfigError("pin begins a new store: leave it out for a reader, and with create='never'")

    @property
    def pinned(self) -> tuple[str, str]:
        """Names of the pin's store and of the pin."""
        assert self.pin is not None
        store, _, pin = self.pin.rpartition("/")
        return store or self.name, pin


def fault_of_pin_name(name: object) -> str:
    """Return why a value is no name of a pin; empty if it is one."""
    try:
        msgspec.convert(name, PinName)
    except msgspec.ValidationError:
        return (
            "the name of a pin is 1 to 64 letters, digits, dots, hyphens and underscores, and begins with a "
            f"letter or a digit, not {name!r:.80}"
        )
    return ""


def check_is_default(**given: tuple[object, object]) -> None:
    """Check that a call without arrays leaves out what the creator of a store decides.

    Args:
        given: The value of each argument, and its default.

    Raises:
        ConfigError: A value is not the default.
    """
    for name, (value, default) in given.items():
        if value != default:
            raise ConfigError(
                f"{name} is {value!r:.200} without arrays, and a store that exists has its own: leave {name} "
                "out, or give the arrays of the store too"
            )


def slack_of(consistency: str) -> int | None:
    """Return the number of clocks by which a client may be ahead of the slowest; None for asp.

    Raises:
        ConfigError: The text is none of asp, ssp:S and bsp.
    """
    word, _, number = consistency.partition(":") if isinstance(consistency, str) else ("", "", "")
    if consistency in ("asp", "bsp"):
        return None if consistency == "asp" else 0
    if word == "ssp" and number.isdecimal() and int(number) <= MOST_SLACK:
        return int(number)
    raise ConfigError(f"consistency is asp, ssp:S with a number S, or bsp, not {consistency!r:.80}")


def consistency_of(slack: int | None, *, is_summed: bool) -> str:
    """Return the text of a consistency, as `ParameterStore.open` takes it."""
    if is_summed:
        return "bsp"
    return "asp" if slack is None else f"ssp:{slack}"

"""Pure: the errors above the transport, and the exit code of each.

    AdamError                   base of all; ``exit_code`` is the exit code of the command line
      ConfigError          2    the caller's options, files or specs: names the value and the remedy
        RecordError        2    a record of a run cannot be made, read or replayed
        StoreError         2    a call on a store does not fit it: names the array, the value and the remedy
      DataError            3    a data source is missing, damaged or of the wrong kind
        TransformFailed    3    a user's function on images raised, or returned a wrong image
        DiskFailed         3    a write to a server's folder of states failed, and its outcome is unknown
      RoleDied             4    a needed role ended; names the role and the cause
        RoleUnreachable    4    a needed role was absent from the beginning
        RoleFailed         4    a role that may be running does not do its work for the run
        Leaderless         4    a group of controllers had no leader for too long
      DeadlineExceeded     5    a named wait took longer than its deadline
      ShardUnavailable     5    the primary of a shard was unreachable for too long
      BindFailed           7    an address is taken, or belongs to another machine
      RunFailed            8    the run ended for another reason
        StepFailed         8    a method of a user's step raised, or returned a wrong value
        Diverged           9    the training loss is not finite, or far beyond that of guessing
      ModelError           1    a model, or an array given to it, does not fit
        SpecError          2    a spec cannot be built: unknown layer, option or input, shapes that do not fit
        LayerFailed        1    a method of a layer raised; ``__cause__`` is its error
        GradientMismatchError 1 a gradient of a layer differs from its finite difference

The command line adds 6 (a peer refused the handshake), 130 and 143 (ended by a signal);
docs/reference/exit-codes.md lists them all.
"""

import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import unquote, urlsplit

RESUME = "--resume DIR picks the run up at its last checkpoint, if --checkpoint DIR kept one"
"""Text on the continuation of a failed run."""

_ONLY_COPY = "with it went the only copy of its shards in memory"

LOST_SHARDS = f"{_ONLY_COPY}; with --store the same command goes on; {RESUME}"
"""Text on the consequence of a lost parameter server for its run."""

_RECREATE = "open the store again with arrays to create it anew"

LOST_STORE = f"{_ONLY_COPY}; {_RECREATE}"
"""Text on the consequence of a lost parameter server for a store of clients."""


OTHER_BIND = "choose another with --bind"
"""Remedy for an address that a role cannot listen on."""


def check_flags(**flags: object) -> None:
    """Raise ConfigError for the first argument that is neither True nor False."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{name} is True or False, not {value!r:.80}")


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 array``, ``2 arrays``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def install_command(extra: str) -> str:
    """Return the command that installs an extra into this Python; an editable install keeps its checkout."""
    from importlib import metadata  # takes longer to import than all other modules of this file

    wanted = [f"adam-async[{extra}]"]
    try:
        origin = json.loads(metadata.distribution("adam-async").read_text("direct_url.json") or "{}")
    except metadata.PackageNotFoundError:  # the package lies on the path, and is not installed
        origin = {}
    if origin.get("dir_info", {}).get("editable"):
        wanted = ["-e", f"{unquote(urlsplit(origin['url']).path)}[{extra}]"]
    return shlex.join([sys.executable, "-m", "pip", "install", *wanted])


def lost_copies_text(homes: Sequence[str], store: str, *, is_of_run: bool) -> str:
    """Return the text on shards without a copy, by their homes, in a run's or clients' store."""
    remedy = RESUME if is_of_run else _RECREATE
    return f"the last copy of the shards of {listed(homes)} in store {store!r} is lost; {remedy}"


def listed(names: Sequence[str]) -> str:
    """Return one or more names as text, with commas and a final ``and``."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


class AdamError(Exception):
    """Base of the errors above the transport, each with the exit code of the command line."""

    exit_code = 1


class ConfigError(AdamError, ValueError):
    """An option, file or spec is wrong. The message has the option's name, its value and the remedy."""

    exit_code = 2


class RecordError(ConfigError):
    """A record of a run cannot be made, read or replayed. The message has the fault and the remedy."""


class StoreError(ConfigError):
    """A call on a parameter store does not fit the store, or its state. The message has the remedy."""


class DataError(AdamError):
    """A data source is missing, damaged or of another kind than its name.

    Args:
        damaged: Sentences on the damaged images of a source that has too many; empty for other errors.
    """

    exit_code = 3

    def __init__(self, text: str, *, damaged: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.damaged = tuple(damaged)


class TransformFailed(DataError):
    """A user's function that transforms images raised, or returned a wrong image.

    The message has the step and the function; `__cause__` is the function's own error, if it raised.
    """


class DiskFailed(DataError):
    """A write or sync of a server's states failed; the server must acknowledge nothing more. The message has
    the file and the remedy."""


class RoleDied(AdamError):
    """A role ended while the run needed it."""

    exit_code = 4

    def __init__(self, node: str, how: str) -> None:
        super().__init__(f"{node} died: {how}")
        self.node = node
        self.how = how


class RoleFailed(RoleDied):
    """A role that may be running does not do its work for the run."""

    def __init__(self, node: str, how: str) -> None:
        AdamError.__init__(self, f"{node} {how}")
        self.node = node
        self.how = how


class RoleUnreachable(RoleDied):
    """A needed role was absent from the beginning."""

    def __init__(self, node: str, address: str, why: str) -> None:
        AdamError.__init__(self, f"cannot reach {node} at {address}: {why}")
        self.node = node
        self.how = why
        self.address = address


class Leaderless(RoleDied):
    """A group of controllers had no leader for too long."""

    def __init__(self, addresses: Sequence[str], waited_s: float, why: str) -> None:
        AdamError.__init__(
            self,
            f"none of the controllers {', '.join(addresses)} led for {waited_s:g} s; one does while more "
            f"than half of them run; the last error: {why}",
        )
        self.node = "the controller"
        self.how = why


class DeadlineExceeded(AdamError):
    """A named wait took longer than its deadline."""

    exit_code = 5

    def __init__(self, what: str, timeout_s: float) -> None:
        super().__init__(f"waited {timeout_s:g} s for {what}")
        self.what = what
        self.timeout_s = timeout_s


class ShardUnavailable(DeadlineExceeded):
    """The primary of a shard was unreachable, or did not answer in time."""


class RunFailed(AdamError):
    """The run ended early; the message has the first cause."""

    exit_code = 8


class StepFailed(RunFailed):
    """A method of a user's step raised, or its result is wrong; `__cause__` is the step's own error.

    The message has the step, the method, and the value with its remedy.
    """

    def __init__(self, step: str, method: str, what: str) -> None:
        super().__init__(f"step {step} failed in {method}: {what}")
        self.step = step
        self.method = method


class Diverged(RunFailed):
    """The training loss is not finite, or far beyond that of guessing. The message has remedies."""

    exit_code = 9


class BindFailed(AdamError):
    """A role cannot listen on its address."""

    exit_code = 7

    def __init__(self, address: str, why: str, remedy: str = OTHER_BIND) -> None:
        super().__init__(f"cannot listen on {address}: {why}; {remedy}")
        self.address = address


class ModelError(AdamError, ValueError):
    """A model, or an array given to it, does not fit."""


class SpecError(ModelError, ConfigError):
    """A model specification that cannot be built; the message names the layer and the change to make."""


class LayerFailed(ModelError):
    """A method of a layer raised; the message names layer, kind and method; `__cause__` is the error."""

    def __init__(self, layer: str, kind: str, method: str, cause: Exception) -> None:
        text = f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__
        super().__init__(f"layer {layer!r} ({kind}) failed in {method}: {text}")
        self.layer = layer


class GradientMismatchError(ModelError):
    """A gradient differs from its finite difference."""


@contextmanager
def failing_as(kind: Callable[[str], AdamError], what: str, cure: str = "") -> Iterator[None]:
    """Raise an error of the system in the block as an error of this kind.

    Args:
        what: Text on what cannot be done, before the system's reason.
        cure: Text after the reason.
    """
    try:
        yield
    except OSError as error:
        raise kind(f"{what}: {error.strerror or error}{cure}") from None


@contextmanager
def binding(address: str, remedy: str = OTHER_BIND) -> Iterator[None]:
    """Raise an error of the system in the block, which listens on the address, as `BindFailed`."""
    try:
        yield
    except (OSError, ExceptionGroup) as error:
        cause = first_cause(error)
        if not isinstance(cause, OSError):
            raise
        # Loops put "error while attempting to bind on address (...): " before the system's words.
        raise BindFailed(address, (cause.strerror or str(cause)).split("): ")[-1], remedy) from None


def first_cause(error: BaseException) -> BaseException:
    """Return the first error in an exception group, cancellations aside; return any other error as it is.

    Raise the result `from` its own `__cause__`, such as the error of a user's layer: `from None` would remove
    the cause.
    """
    if isinstance(error, BaseExceptionGroup):
        causes = [first_cause(inner) for inner in error.exceptions]
        real = [cause for cause in causes if isinstance(cause, Exception)]
        return (real or causes)[0]
    return error

"""The file of a soak: each scenario's finished seeds with the present code, for the next soak to continue.

Results of other code do not apply to the present code. Progress is therefore kept by scenario and by hash of
the simulated source. Failed seeds are kept with their plans, which stay valid after a change of the code.
"""

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

import msgspec

import adam_async
import dataflow
import transport
from adam_async.errors import ConfigError
from adam_async.runtime.disk import Disk
from adam_async.simulation.plan import Case
from adam_async.simulation.runner import SeedResult, reached

SCHEMA = "adam-async soak 1"
"""Name of the file format."""

PACKAGE = Path(adam_async.__file__).parent

CORE = (PACKAGE, Path(dataflow.__file__).parent, Path(transport.__file__).parent)
"""Folders of the core: all source that a simulation may run. A change there starts a soak from the
beginning."""

Range = tuple[int, int]
"""First and last seed of a range."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """Header of a file, which is read first: its format."""

    schema: str


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A seed that failed."""

    case: Case
    invariant: str
    text: str


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Finished seeds of a scenario with one core."""

    scenario: str
    core: str
    done: tuple[Range, ...] = ()
    """Ranges of finished seeds, in order and without overlap."""
    counted: int = 0
    """Number of finished seeds that count."""
    reached: tuple[str, ...] = ()
    """Marks that finished seeds reached, in alphabetical order."""
    failures: tuple[Failure, ...] = ()

    @property
    def seeds(self) -> int:
        """Number of finished seeds."""
        return sum(last - first + 1 for first, last in self.done)

    def __str__(self) -> str:
        return f"{self.seeds} seeds done, {self.counted} count, {len(self.failures)} failed, core {self.core}"


class Soak(msgspec.Struct, frozen=True, kw_only=True):
    """Content of the file."""

    schema: str = SCHEMA
    progress: tuple[Progress, ...] = ()

    def of(self, scenario: str, core: str) -> Progress:
        """Return the progress of a scenario with a core."""
        for progress in self.progress:
            if (progress.scenario, progress.core) == (scenario, core):
                return progress
        return Progress(scenario=scenario, core=core)

    def with_results(self, scenario: str, core: str, results: Sequence[SeedResult]) -> "Soak":
        """Return this soak with further results."""
        before = self.of(scenario, core)
        failures = [
            Failure(case=result.case, invariant=result.invariant, text=result.text)
            for result in results
            if not result.ok
        ]
        after = Progress(
            scenario=scenario,
            core=core,
            done=joined([*before.done, *((result.case.seed,) * 2 for result in results)]),
            counted=before.counted + sum(result.seed_counts for result in results),
            reached=tuple(sorted({*before.reached, *reached(results)})),
            failures=(*before.failures, *failures),
        )
        others = [progress for progress in self.progress if progress is not before]
        return Soak(progress=(*others, after))


def joined(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """Join ranges of seeds into as few as possible, in order."""
    result: list[Range] = []
    for first, last in sorted(ranges):
        if result and first <= result[-1][1] + 1:
            result[-1] = (result[-1][0], max(result[-1][1], last))
        else:
            result.append((first, last))
    return tuple(result)


def seeds_to_do(done: Sequence[Range], first: int, last: int | None) -> Iterator[int]:
    """Yield the unfinished seeds from `first` to `last`, or without end if `last` is None."""
    seed = first
    for begin, end in done:
        while seed < begin and (last is None or seed <= last):
            yield seed
            seed += 1
        seed = max(seed, end + 1)
    while last is None or seed <= last:
        yield seed
        seed += 1


async def read_soak(path: Path, disk: Disk) -> Soak:
    """Read the file of a soak; a missing file is an empty soak.

    Raises:
        ConfigError: The file cannot be read, or is no soak.
    """
    try:
        data = await disk.read_bytes(path)
        schema = msgspec.json.decode(data, type=Header).schema
        if schema != SCHEMA:
            raise ConfigError(f"--soak {path} is of schema {schema!r}; this version reads {SCHEMA!r}")
        soak = msgspec.json.decode(data, type=Soak)
    except FileNotFoundError:
        return Soak()
    except OSError as error:
        raise ConfigError(f"--soak {path} cannot be read: {error.strerror or error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"--soak {path} holds no soak: {error}; name a new file, or the file of a soak"
        ) from None
    for progress in soak.progress:
        if any(first < 0 or first > last for first, last in progress.done):
            raise ConfigError(f"--soak {path} holds no soak: {progress.scenario} has invalid ranges")
    return soak


async def write_soak(path: Path, soak: Soak, disk: Disk) -> None:
    """Replace the file of a soak atomically.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        await disk.write_atomic(path, [msgspec.json.encode(soak)])
    except OSError as error:
        raise ConfigError(f"--soak {path} cannot be written: {error.strerror or error}") from None


async def core_hash(disk: Disk, folders: Sequence[Path] = CORE) -> str:
    """Return a hash of the simulated source."""
    digest = blake2b(digest_size=8)
    for folder in folders:
        for path in await _sources(folder, disk):
            digest.update(f"{folder.name}/{path.relative_to(folder).as_posix()}\n".encode())
            digest.update(blake2b(await disk.read_bytes(path)).digest())
    return digest.hexdigest()


async def _sources(folder: Path, disk: Disk) -> list[Path]:
    sources = []
    for name in await disk.names(folder):
        path = folder / name
        if name.endswith(".py"):
            sources.append(path)
        elif await disk.run(path.is_dir):
            sources += await _sources(path, disk)
    return sources

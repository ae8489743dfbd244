"""A soak: which seeds of which scenarios are done for the code as it is, in a file, so that the next goes on.

Seeds that ran through another core say nothing about this one. So what is done is kept per scenario and hash
of the source of what is simulated; failed seeds are kept with their plans, which outlive the code.
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

PACKAGE = Path(adam_async.__file__).parent

CORE = (PACKAGE, Path(dataflow.__file__).parent, Path(transport.__file__).parent)
"""Folders whose source makes a new core: all that may run in a simulation, and what only might."""

Range = tuple[int, int]
"""First and last seed."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What a file must say of itself before the rest of it is believed."""

    schema: str


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A seed that failed."""

    case: Case
    invariant: str
    text: str


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """What is done of a scenario with one core."""

    scenario: str
    core: str
    done: tuple[Range, ...] = ()
    """In order, without overlap."""
    counted: int = 0
    """Seeds among them that count."""
    reached: tuple[str, ...] = ()
    """Marks that they came across, in order of the alphabet."""
    failures: tuple[Failure, ...] = ()

    @property
    def seeds(self) -> int:
        """How many are done."""
        return sum(last - first + 1 for first, last in self.done)

    def __str__(self) -> str:
        return f"{self.seeds} seeds done, {self.counted} count, {len(self.failures)} failed, core {self.core}"


class Soak(msgspec.Struct, frozen=True, kw_only=True):
    """What the file holds."""

    schema: str = SCHEMA
    progress: tuple[Progress, ...] = ()

    def of(self, scenario: str, core: str) -> Progress:
        """What is done of a scenario with a core."""
        for progress in self.progress:
            if (progress.scenario, progress.core) == (scenario, core):
                return progress
        return Progress(scenario=scenario, core=core)

    def with_results(self, scenario: str, core: str, results: Sequence[SeedResult]) -> "Soak":
        """The same with more seeds done."""
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
    """Ranges of seeds as few as possible, in order."""
    result: list[Range] = []
    for first, last in sorted(ranges):
        if result and first <= result[-1][1] + 1:
            result[-1] = (result[-1][0], max(result[-1][1], last))
        else:
            result.append((first, last))
    return tuple(result)


def seeds_to_do(done: Sequence[Range], first: int, last: int | None) -> Iterator[int]:
    """Seeds from `first` to `last`, or without end, that are not done."""
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
    """Read a soak's file; an empty soak if there is none.

    Raises:
        ConfigError: It cannot be read, or is something else.
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
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--soak {path} holds no soak: {error}; name a file that there is not yet, or that a soak wrote"
        ) from None
    for progress in soak.progress:
        if any(first < 0 or first > last for first, last in progress.done):
            raise ConfigError(f"--soak {path} holds no soak: {progress.scenario} has ranges that are none")
    return soak


async def write_soak(path: Path, soak: Soak, disk: Disk) -> None:
    """Replace a soak's file, all or nothing.

    Raises:
        ConfigError: It cannot be written.
    """
    try:
        await disk.write_atomic(path, [msgspec.json.encode(soak)])
    except OSError as error:
        raise ConfigError(f"--soak {path} cannot be written: {error.strerror or error}") from None


async def core_hash(disk: Disk, folders: Sequence[Path] = CORE) -> str:
    """A hash of the source of what is simulated."""
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

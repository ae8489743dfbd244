"""A safeguard and its removal: a text of the product, and the text that takes its place."""

from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from importlib import import_module
from inspect import CO_OPTIMIZED, unwrap
from operator import attrgetter
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Ablation:
    """A safeguard, and the replacement of source text that removes it."""

    name: str
    file: str
    old: str
    new: str
    guard: str = ""
    """The direct test of the safeguard: it passes, and fails after the removal. Empty if runs of a core are
    the test."""
    _: KW_ONLY
    breaks: str = ""
    """The invariant or error that a seed shows after the removal; empty if no seed is expected to."""
    seldom: str = ""
    """Why no seed is expected to."""
    errors: tuple[str, ...] = ()
    """Types of exceptions that end a run for this removal alone; other exceptions are no find."""
    scenario: str = "controllers"
    seed: int | None = None
    """A seed of the core's random runs that found the removal once; None for a safeguard outside of cores."""
    story: Callable[[], None] | None = None
    """Fixed run of the core that finds the removal, if random runs seldom do."""

    def removed_from(self, source: str) -> str:
        """Return the source of `file` without the safeguard.

        Raises:
            ValueError: The source does not have the text exactly once.
        """
        times = source.count(self.old)
        if times != 1:
            raise ValueError(f"{self.name}: {self.file} has {self.old!r} {times} times instead of once")
        return source.replace(self.old, self.new)

    def remove(self, change: Callable[[Any, str, Any], None]) -> None:
        """Remove the safeguard from the functions of this process.

        Args:
            change: The `setattr` of pytest's `monkeypatch`.

        Raises:
            ValueError: No function has the text: it is read when the module is imported.
        """
        source = (ROOT / self.file).read_text()
        module = import_module(self.file.removesuffix(".py").replace("/", "."))
        texts = (source, self.removed_from(source))
        compiled = [_functions(compile(text, self.file, "exec", dont_inherit=True)) for text in texts]
        changed = [(old, new) for old, new in zip(*compiled, strict=True) if old != new]
        if not changed:
            raise ValueError(f"{self.name}: no function of {self.file} has {self.old!r}")
        for old, new in changed:
            found = attrgetter(old.co_qualname)(module)
            function = unwrap(found.fget if isinstance(found, property) else found)
            assert function.__code__ == old, f"{old.co_qualname} is not that of {self.file}"
            change(function, "__code__", new)


def _functions(code: CodeType) -> Iterator[CodeType]:
    """Yield the functions of a module and the methods of its classes."""
    for each in code.co_consts:
        if isinstance(each, CodeType) and "<" not in each.co_qualname:
            if each.co_flags & CO_OPTIMIZED:
                yield each
            else:
                yield from _functions(each)

"""User code by import path: steps ``package.module:function``, and layers ``package.module:Class``.

A class cannot travel to another process, but its import path can: the receiver imports its module, and so
runs it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import import_module
from typing import Any

from adam_async.errors import ConfigError
from adam_async.model.layer import Layer
from adam_async.model.layers import BUILTIN_LAYERS


def functions_for(
    steps: Sequence[object], functions: Mapping[str, Callable[..., Any]]
) -> Mapping[str, Callable[..., Any]]:
    """Return the functions for steps: the given ones, and imported ones.

    Raises:
        ConfigError: A module or function cannot be imported; names the step.
    """
    found = dict(functions)
    for at, step in enumerate(steps, 1):
        kind = step.get("kind") if isinstance(step, Mapping) else None
        if isinstance(kind, str) and ":" in kind and kind not in found:
            found[kind] = import_named(kind, f"step {at}")
    return found


def named_functions(steps: Sequence[object] | None) -> tuple[str, ...]:
    """Return the kinds of steps that are functions to import, in their order, each once."""
    kinds = [step.get("kind") for step in steps or () if isinstance(step, Mapping)]
    return tuple(dict.fromkeys(kind for kind in kinds if isinstance(kind, str) and ":" in kind))


def check_named(steps: Sequence[object], origin: str, *, allowed: Collection[str], besides: str = "") -> None:
    """Check that the user names or allows all functions of a file.

    The import of a function runs its module, so a checkpoint or a record alone must not cause one.

    Args:
        allowed: Kinds that the user names, as ``package.module:function``.

    Raises:
        ConfigError: The file names other functions; the text lists them and how to allow them.
    """
    others = [name for name in named_functions(steps) if name not in allowed]
    if others:
        raise ConfigError(
            f"{origin} names functions whose modules would be imported and run: {', '.join(others)}; "
            f"if you trust them, give --allow-functions{besides} (in Python, give the same transforms)"
        )


def import_named(kind: str, where: str) -> Callable[..., Any]:
    """Import a function or class by a name such as ``package.module:function``.

    Raises:
        ConfigError: Module or name do not exist, the import fails, or the object cannot be called.
    """
    name, _, path = kind.partition(":")
    parts = path.split(".")
    if not all(part.isidentifier() for part in (*name.split("."), *parts)):
        raise ConfigError(f"{where} has the kind {kind!r}, expected package.module:function")
    try:
        found: Any = import_module(name)
    except ModuleNotFoundError as error:
        within = "" if error.name and f"{name}.".startswith(f"{error.name}.") else f" that {name} imports"
        raise ConfigError(
            f"{where} ({kind}): there is no module {error.name!r}{within}; install it, or name the folder it "
            "is in with PYTHONPATH, for data servers too"
        ) from error
    except (Exception, SystemExit) as error:  # user code may raise anything
        raise ConfigError(f"{where} ({kind}): importing {name} failed: {error!r}") from error
    there = [each for each, value in vars(found).items() if callable(value) and not each.startswith("_")]
    for part in parts:
        if not hasattr(found, part):
            raise ConfigError(
                f"{where} ({kind}): {name} has no {path!r}; it has {', '.join(there) or 'no functions'}"
            )
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{where} ({kind}): {path} is a {type(found).__name__}, expected a function")
    function: Callable[..., Any] = found
    return function


def import_layers(names: Mapping[str, str]) -> Mapping[str, type[Layer]]:
    """Return all kinds of layers: those of this package, and imported ones.

    Args:
        names: Kind of layer in specs to its import path, ``package.module:Class``.

    Raises:
        ConfigError: A path cannot be imported, or is not a layer; names the kind.
    """
    found: dict[str, type[Layer]] = {}
    for kind, name in names.items():
        layer = import_named(name, f"layer {kind!r}")
        if not (isinstance(layer, type) and issubclass(layer, Layer)):
            raise ConfigError(f"layer {kind!r} ({name}): expected a class that derives from Layer")
        found[kind] = layer
    return {**BUILTIN_LAYERS, **found}

"""User code by import path: transforms ``package.module:function``, layers and steps.

A message has a class's import path, not the class: the receiver imports, and so runs, its module. A layer is
``package.module:Class``, and the factory of a step ``package.module:factory``. `user_rules.py` has update
rules.

A run's record names its step and its transforms' functions, and a party with a cluster's token can submit any
record. So a worker imports only modules that its own command line allows, and calls only functions that such
a module defines. A data server imports only the functions that its own command line allows.
"""

import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from adam_async.errors import ConfigError, install_command
from adam_async.run.ids import MOST_STEP_NAME
from adam_async.runtime.loop_thread import on_user_thread

# Commands check import paths with this file before they import NumPy.
if TYPE_CHECKING:
    from adam_async.model.layer import Layer
    from adam_async.run.train_step import StepSpec, TrainStep

MOST_STEP_ARGS = 32 << 10
"""Maximum length of a step's arguments, in bytes of JSON text."""

IMPORTED_S = 600.0
"""Maximum time for importing the transforms' functions, in seconds."""


@dataclass(frozen=True, slots=True, eq=False)
class NamedStep:
    """A step with its name and arguments."""

    step: "TrainStep"
    name: str
    args: Mapping[str, Any] = field(default_factory=dict)

    def spec(self, data: Mapping[str, Any]) -> "StepSpec":
        """Return the step's record, with the data's image shape and number of classes.

        Raises:
            ConfigError: The step's `sample` or `constants` exceed their bounds; the error names the bound.
        """
        from adam_async.run.train_step import StepSpec  # imports NumPy

        channels, rows, columns = data["shape"]
        sample = getattr(self.step, "sample", 0)
        if type(sample) is not int or sample < 0:
            raise ConfigError(f"step {self.name}: sample is {sample!r:.80}, expected a number of images")
        spec = StepSpec(
            name=self.name,
            args=dict(self.args),
            shape=(int(channels), int(rows), int(columns)),
            classes=int(data["classes"]),
            sample=sample,
            constants=dict(getattr(self.step, "constants", {})),
        )
        if problem := spec.excess():
            raise ConfigError(f"step {self.name}: {problem}")
        return spec


@dataclass(frozen=True, slots=True, eq=False)
class StepSource:
    """The steps that a worker may run.

    Attributes:
        allowed: Modules from which the worker imports steps.
        given: Step that the program of this process gave as an object.
    """

    allowed: frozenset[str] = frozenset()
    given: NamedStep | None = None

    def step_for(self, spec: "StepSpec") -> "TrainStep":
        """Return the step of a run.

        Raises:
            ConfigError: The step may not be imported (the error has the option that allows it), or its import
                or factory fails.
        """
        given = self.given
        if given is not None and (given.name, dict(given.args)) == (spec.name, spec.args):
            return given.step
        module = spec.name.partition(":")[0]
        if module not in self.allowed:
            raise ConfigError(
                f"the run trains with step {spec.name!r:.200}, and this worker imports no step of "
                f"{module!r:.200}: if you trust it, start the worker with --allow-step {module[:200]}, and "
                "with --step-path DIR if the module is in folder DIR"
            )
        return import_step(spec.name, spec.args).step


def functions_for(
    steps: Sequence[object], functions: Mapping[str, Callable[..., Any]]
) -> Mapping[str, Callable[..., Any]]:
    """Return the functions for the steps of transforms: the given ones, and imported ones.

    The import runs the module of a function: the steps must come from the user, or be allowed by the user.

    Raises:
        ConfigError: A module or function cannot be imported; the error has the step.
    """
    found = dict(functions)
    for at, step in enumerate(steps, 1):
        kind = step.get("kind") if isinstance(step, Mapping) else None
        if isinstance(kind, str) and ":" in kind and kind not in found:
            found[kind] = import_named(kind, f"step {at}")
    return found


async def imported_functions(
    steps: Sequence[object], functions: Mapping[str, Callable[..., Any]], *, within_s: float = IMPORTED_S
) -> Mapping[str, Callable[..., Any]]:
    """Return the functions for steps as `functions_for` does, with the imports on a separate thread.

    Args:
        within_s: Deadline of all imports together, in seconds.

    Raises:
        ConfigError: A module or function cannot be imported; the error has the step.
        DeadlineExceeded: The imports took longer.
    """
    others = [name for name in named_functions(steps) if name not in functions]
    if not others:
        return functions
    what = f"the import of {', '.join(others)}"
    return await on_user_thread(lambda: functions_for(steps, functions), what, within_s=within_s)


def named_functions(steps: Sequence[object] | None) -> tuple[str, ...]:
    """Return the kinds of steps that are functions to import, in their order, each once."""
    kinds = [step.get("kind") for step in steps or () if isinstance(step, Mapping)]
    return tuple(dict.fromkeys(kind for kind in kinds if isinstance(kind, str) and ":" in kind))


def check_named(steps: Sequence[object], origin: str, *, allowed: Collection[str], besides: str = "") -> None:
    """Check that the user names or allows all functions of a file.

    Importing a function runs its module, so a checkpoint or record alone must not cause an import.

    Args:
        allowed: Kinds that the user names, as ``package.module:function``.

    Raises:
        ConfigError: The file names other functions; the text lists them, and the option that allows them.
    """
    others = [name for name in named_functions(steps) if name not in allowed]
    if others:
        raise ConfigError(
            f"{origin} names functions whose modules would be imported and run: {', '.join(others)}; "
            f"if you trust them, give --allow-functions{besides} (in Python, give the same transforms)"
        )


def check_allowed(steps: Sequence[object], functions: Collection[str]) -> None:
    """Check that a data server allows all functions in a run's transforms.

    Args:
        functions: Kinds that the data server allows.

    Raises:
        ConfigError: The transforms name other functions; the text has the options that allow them.
    """
    others = [name for name in named_functions(steps) if name not in functions]
    if others:
        words = shlex.join(word for name in others for word in ("--allow-transform", name))
        raise ConfigError(
            "the transforms of the run name functions that this data server does not allow: if you trust "
            f"them, start the data server with {words:.800}, and with --step-path DIR if their module is in "
            "folder DIR"
        )


def import_named(kind: str, where: str) -> Callable[..., Any]:
    """Import a function or class by a name such as ``package.module:function``.

    Raises:
        ConfigError: Module or name does not exist, the import fails, or the object is not callable.
    """
    name, _, path = kind.partition(":")
    parts = path.split(".")
    if not all(part.isidentifier() for part in (*name.split("."), *parts)):
        raise ConfigError(f"{where} has the kind {kind!r}, expected package.module:function")
    try:
        found: Any = import_module(name)
    except ModuleNotFoundError as error:
        within = "" if error.name and f"{name}.".startswith(f"{error.name}.") else f" that {name} imports"
        cure = "install it, or name the folder it is in with --step-path or PYTHONPATH"
        if error.name == "torch":
            cure = f"install it with {install_command('torch')}"
        raise ConfigError(f"{where} ({kind}): there is no module {error.name!r}{within}; {cure}") from error
    except (Exception, SystemExit) as error:  # user code may raise anything
        raise ConfigError(f"{where} ({kind}): importing {name} failed: {error!r}") from error
    there = [
        each
        for each, value in vars(found).items()
        if callable(value) and not each.startswith("_") and getattr(value, "__module__", None) == name
    ]
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


def import_layers(names: Mapping[str, str]) -> Mapping[str, "type[Layer]"]:
    """Return all kinds of layers: those of this package, and imported ones.

    Args:
        names: Kind of layer in specs to its import path, ``package.module:Class``.

    Raises:
        ConfigError: A path cannot be imported, or is not a layer; the error names the kind.
    """
    from adam_async.model.layer import Layer  # imports NumPy
    from adam_async.model.layers import BUILTIN_LAYERS

    found: dict[str, type[Layer]] = {}
    for kind, name in names.items():
        layer = import_named(name, f"layer {kind!r}")
        if not (isinstance(layer, type) and issubclass(layer, Layer)):
            raise ConfigError(f"layer {kind!r} ({name}): expected a class that derives from Layer")
        found[kind] = layer
    return {**BUILTIN_LAYERS, **found}


def named_step(step: "TrainStep | str | None", args: Mapping[str, Any] | None) -> NamedStep | None:
    """Return a caller's step (an object, or an import path) with its name; None without a step.

    Raises:
        ConfigError: There are arguments without an import path, or the step cannot be made.
    """
    if isinstance(step, str):
        return import_step(step, args or {})
    if args:
        raise ConfigError(
            "step_args are arguments of a factory, and step names none: give step='package.module:factory'"
        )
    if step is None:
        return None
    if isinstance(step, type):
        raise ConfigError(f"step is the class {step.__name__}, expected an object: give {step.__name__}(...)")
    kind = type(step)
    return NamedStep(step, f"{kind.__module__}:{kind.__qualname__}"[:MOST_STEP_NAME])


def import_factory(path: str) -> Callable[..., Any]:
    """Import the factory of a step.

    Args:
        path: ``package.module:factory``; the module itself must define the factory.

    Raises:
        ConfigError: The path or the import is wrong; names the cause.
    """
    module, colon, name = path.partition(":")
    if not colon or "." in name or len(path) > MOST_STEP_NAME:
        raise ConfigError(
            f"step is {path!r:.200}: give package.module:factory, a function or class of the module"
        )
    factory = import_named(path, "step")
    if getattr(factory, "__module__", None) != module:
        # Otherwise a peer could call any name that an allowed module imports, such as `system` of `os`.
        raise ConfigError(f"step {path}: {module} does not define {name}: define a factory in the module")
    return factory


def import_step(path: str, args: Mapping[str, Any]) -> NamedStep:
    """Import a step's factory, and call it.

    Args:
        path: As for `import_factory`.
        args: Arguments of the factory, as JSON values.

    Raises:
        ConfigError: The path, the arguments, the import or the factory is wrong; names the cause.
    """
    factory = import_factory(path)
    try:
        text = msgspec.json.encode(args)
        same = msgspec.json.decode(text)
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise ConfigError(f"step {path}: its arguments have no form in JSON: {error}") from None
    if not isinstance(same, dict) or same != dict(args) or len(text) > MOST_STEP_ARGS:
        raise ConfigError(
            f"step {path}: its arguments are an object of JSON values of at most {MOST_STEP_ARGS} bytes, "
            f"not {args!r:.80}"
        )
    try:
        step = factory(**same)
    except Exception as error:  # user code may raise anything
        name = path.partition(":")[2]
        raise ConfigError(f"step {path}: {name}(**{same}) failed: {error!r}") from error
    return NamedStep(step, path, same)


def read_args(text: str | None, name: str) -> dict[str, Any]:
    """Read the arguments of user code from JSON text; an empty text means none.

    Args:
        name: Option with the text.

    Raises:
        ConfigError: The text is no JSON object.
    """
    try:
        return msgspec.json.decode(text, type=dict[str, Any]) if text else {}
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(
            f"{name} must be a JSON object such as '{{\"name\": 64}}', not {text!r:.80}: {error}"
        ) from None


def add_import_folder(folder: Path) -> None:
    """Let imports find the modules of a folder, after those of all other folders.

    Raises:
        ConfigError: The folder does not exist.
    """
    if not folder.is_dir():
        raise ConfigError(f"--step-path {folder} is no folder: name the folder that has your module")
    found = str(folder.resolve())
    if found not in sys.path:
        sys.path.append(found)


def allow_steps(modules: Sequence[str]) -> StepSource:
    """Import the step modules that a worker allows, so no run waits for the import.

    Raises:
        ConfigError: A module cannot be imported.
    """
    for name in modules:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ConfigError(f"--allow-step {name!r} is no name of a module such as package.module")
        try:
            import_module(name)
        except (Exception, SystemExit) as error:  # user code may raise anything
            raise ConfigError(
                f"--allow-step {name}: its import failed: {error!r}; install it, or name its folder with "
                "--step-path DIR"
            ) from error
    return StepSource(frozenset(modules))


def allow_functions(names: Sequence[str]) -> dict[str, Callable[..., Any]]:
    """Import the functions that a data server allows, so no run waits for the import.

    Raises:
        ConfigError: A name is not an import path, or cannot be imported.
    """
    return {name: import_named(name, "--allow-transform") for name in names}


def read_layers(texts: Sequence[str]) -> dict[str, str]:
    """Read kinds of layers, each ``kind=package.module:Class``; returns import paths by kind.

    Raises:
        ConfigError: A text has another form, or a kind is named twice.
    """
    found: dict[str, str] = {}
    for text in texts:
        kind, equals, path = text.partition("=")
        if not (kind and equals and path) or kind in found:
            raise ConfigError(f"--layer {text!r}: give each kind of layer once, as KIND=package.module:Class")
        found[kind] = path
    return found


def import_words(layers: Mapping[str, str], step: str | None, folders: Sequence[Path]) -> tuple[str, ...]:
    """Return the words of a worker's command line that let it import these layers and this step."""
    modules = () if step is None else (step.partition(":")[0],)
    return allowed_words(modules, [f"{kind}={path}" for kind, path in layers.items()], folders)


def allowed_words(modules: Sequence[str], layers: Sequence[str], folders: Sequence[Path]) -> tuple[str, ...]:
    """Return the words of a worker's command line for options `--allow-step`, `--layer` and `--step-path`."""
    words = [*folder_words(folders)]
    words += [word for layer in layers for word in ("--layer", layer)]
    words += [word for module in modules for word in ("--allow-step", module)]
    return tuple(words)


def transform_words(
    steps: Sequence[object] | None, folders: Sequence[Path], besides: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return the words of a data server's command line that let it import the functions of these steps.

    Args:
        besides: Further functions, ``package.module:function``.
    """
    functions = dict.fromkeys((*named_functions(steps), *besides))
    words = folder_words(folders) if functions else []
    return (*words, *(word for name in functions for word in ("--allow-transform", name)))


def folder_words(folders: Sequence[Path]) -> list[str]:
    """Return the words of a command line that add folders to those of imports."""
    return [word for folder in folders for word in ("--step-path", str(folder.resolve()))]

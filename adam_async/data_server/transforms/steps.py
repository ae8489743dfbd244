"""Pure: the kinds of steps in a recipe, their options, and checks of steps and options.

    shift       pixels, whole = true, edge                whole pixels, or any fraction
    flip        direction = "horizontal", chance = 0.5
    rotate      degrees, edge                             at most this angle, either way
    scale       by, edge                                  larger or smaller by at most this share
    shear       by, edge                                  at most this share of a row's distance to the centre
    elastic     pixels, grid = 4, edge                    a smooth random field moves every pixel
    crop        rows, columns, padding = 0, edge          at a random place; unless given, of the image's size
    pad         pixels, edge                              on each side
    brightness  by                                        adds at most this share of the range, up or down
    contrast    by                                        at most this share more or less, around the mean
    noise       levels                                    nearly normal, of this standard deviation
    cutout      pixels, level = 0                         a square around a random pixel gets this level
    normalise   mean, std, to_mean = 128, to_std = 64     without mean and std, by those of the image

``edge`` is "black" or "repeat": the pixels beyond the image.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from adam_async.errors import ConfigError
from adam_async.model.toml_text import read_toml
from adam_async.run.user_code import named_functions

REQUIRED = object()

LARGEST = 32_767
"""Maximum of pixels and sizes: positions stay far from the limits of integers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option: a number in a range, one of some words, a boolean, or numbers per channel."""

    default: Any = REQUIRED
    low: float = 0
    high: float = LARGEST
    whole: bool = False
    choices: tuple[str, ...] = ()
    flag: bool = False
    per_channel: bool = False

    def expected(self) -> str:
        """Return the description of a valid value."""
        if self.flag:
            return "true or false"
        if self.choices:
            return " or ".join(f'"{choice}"' for choice in self.choices)
        number = f"{'whole ' if self.whole else ''}number from {self.low:g} to {self.high:g}"
        return f"a {number}, or a list of one for each channel" if self.per_channel else f"a {number}"

    def accepts(self, value: Any) -> bool:
        if self.flag:
            return isinstance(value, bool)
        if self.choices:
            return isinstance(value, str) and value in self.choices
        if self.per_channel and isinstance(value, list):
            return bool(value) and all(map(self._is_number, value))
        return self._is_number(value)

    def _is_number(self, value: Any) -> bool:
        kinds = (int,) if self.whole else (int, float)
        return type(value) in kinds and self.low <= value <= self.high


_EDGE = Option(default="black", choices=("black", "repeat"))
_SHARE = Option(high=1)
_LEVEL = 255

KINDS: Mapping[str, Mapping[str, Option]] = {
    "shift": {"pixels": Option(), "whole": Option(default=True, flag=True), "edge": _EDGE},
    "flip": {
        "direction": Option(default="horizontal", choices=("horizontal", "vertical")),
        "chance": Option(default=0.5, high=1),
    },
    "rotate": {"degrees": Option(high=180), "edge": _EDGE},
    "scale": {"by": Option(high=0.9), "edge": _EDGE},
    "shear": {"by": Option(high=10), "edge": _EDGE},
    "elastic": {"pixels": Option(), "grid": Option(default=4, low=1, high=256, whole=True), "edge": _EDGE},
    "crop": {
        "rows": Option(default=None, low=1, whole=True),
        "columns": Option(default=None, low=1, whole=True),
        "padding": Option(default=0, whole=True),
        "edge": _EDGE,
    },
    "pad": {"pixels": Option(whole=True), "edge": _EDGE},
    "brightness": {"by": _SHARE},
    "contrast": {"by": _SHARE},
    "noise": {"levels": Option(high=_LEVEL)},
    "cutout": {"pixels": Option(low=1, whole=True), "level": Option(default=0, high=_LEVEL, whole=True)},
    "normalise": {
        "mean": Option(default=None, high=_LEVEL, per_channel=True),
        "std": Option(default=None, per_channel=True, low=0.001, high=_LEVEL),
        "to_mean": Option(default=128, high=_LEVEL),
        "to_std": Option(default=64, high=_LEVEL),
    },
}

DRAWS = Option(default=4, whole=True, high=1_000_000)
"""The option `draws` of a user's function: the number of its random values."""


@dataclass(frozen=True, slots=True)
class Step:
    """A checked step with values of all its options."""

    where: str
    kind: str
    options: Mapping[str, Any]

    def error(self, key: str, trouble: str) -> ConfigError:
        """Return the error for the value of an option."""
        return ConfigError(f"{self.where} ({self.kind}): {key} = {self.options[key]!r}, {trouble}")


def read_steps(text: str, origin: str) -> list[dict[str, Any]]:
    """Read the steps of a TOML file: tables ``[[transform]]``, each with a `kind` and its options.

    `Recipe.of` checks unknown kinds, because it has the user's functions.

    Raises:
        ConfigError: The text is not a file of steps, or an option is wrong; the error has origin, step and
            key.
    """
    table = read_toml(text, origin)
    others = sorted(set(table) - {"transform"})
    if others:
        raise ConfigError(f"{origin} has {others[0]!r}; expected nothing but tables [[transform]]")
    steps = table.get("transform")
    if not isinstance(steps, list):
        raise ConfigError(f"{origin} has no [[transform]] tables; write one for each step, with a kind")
    for at, step in enumerate(steps, 1):
        kind = step.get("kind") if isinstance(step, dict) else None
        if not isinstance(kind, str) or kind in KINDS:
            check_step(step, f"{origin}, step {at}")
    return steps


def check_steps(text: str, origin: str) -> None:
    """Check a TOML file's steps, and the functions that they name. For errors see `read_steps`."""
    steps = read_steps(text, origin)
    for at, step in enumerate(steps, 1):
        check_step(step, f"{origin}, step {at}", named_functions(steps))


def check_step(step: object, where: str, functions: Collection[str] = ()) -> Step:
    """Check one step.

    Args:
        functions: Kinds that are user functions, which check all their options except `draws`.

    Raises:
        ConfigError: The step is not a mapping, its kind is unknown, or an option is unknown, missing or
            invalid.
    """
    if not isinstance(step, Mapping):
        raise ConfigError(f"{where} is {step!r}, expected a table with a kind and its options")
    options = dict(step)
    kind = options.pop("kind", None)
    if kind is None:
        raise ConfigError(f"{where} has no kind; known kinds: {_listed([*KINDS, *functions])}")
    if isinstance(kind, str) and kind in functions:
        return Step(where, kind, _of_function(Step(where, kind, {"draws": DRAWS.default, **options})))
    if not isinstance(kind, str) or kind not in KINDS:
        raise ConfigError(f"{where} has the kind {kind!r}; known kinds: {_listed([*KINDS, *functions])}")
    known = KINDS[kind]
    for key, value in options.items():
        if key not in known:
            raise ConfigError(f"{where} ({kind}) has no option {key!r} = {value!r}; known: {_listed(known)}")
        if not known[key].accepts(value):
            raise ConfigError(f"{where} ({kind}): {key} = {value!r}, expected {known[key].expected()}")
    for key, option in known.items():
        if options.setdefault(key, option.default) is REQUIRED:
            raise ConfigError(f"{where} ({kind}) needs the option {key!r}, {option.expected()}")
    checked = Step(where, kind, options)
    if kind == "shift" and options["whole"] and not float(options["pixels"]).is_integer():
        raise checked.error("pixels", "expected a whole number; for fractions say whole = false")
    if kind == "normalise" and (options["mean"] is None) != (options["std"] is None):
        missing = "mean" if options["mean"] is None else "std"
        raise checked.error(missing, "give both mean and std, or neither")
    return checked


def _of_function(step: Step) -> Mapping[str, Any]:
    if not DRAWS.accepts(step.options["draws"]):
        raise step.error("draws", f"expected {DRAWS.expected()}")
    return step.options


def _listed(names: Collection[str]) -> str:
    return ", ".join(names)

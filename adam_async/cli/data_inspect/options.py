"""The options of the command `data inspect`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from adam_async.cli.options import Damaged, LoopName
from adam_async.cli.values import strict

_OnlyOn = Parameter(negative="")


@strict
@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class InspectOptions:
    """What `data inspect` can be told."""

    damaged: Damaged = "skip"
    """Damaged images: leave out and list up to one in twenty, or stop at the first."""
    size: str = ""
    """ROWSxCOLUMNS such as 48x64 to scale and cut images to; by default the images decide."""
    png: Path | None = None
    """Draw a contact sheet of the training images into this file, a row for each class."""
    augment: Annotated[bool, _OnlyOn] = False
    """Show one image of each class, and what the default transforms make of it epoch by epoch."""
    transforms: Path | None = None
    """The same with the transforms of this TOML file instead."""
    seed: int = 0
    """Seed of the run whose variants are shown."""
    epoch: int = 1
    """First epoch that is shown."""
    samples: int = 8
    """Variants of an image, one an epoch; without transforms, images of a class beside its first."""
    classes: int = 10
    """Most classes that are listed and drawn; --json lists all."""
    json: Annotated[bool, _OnlyOn] = False
    """Print what was found as one JSON object."""
    loop: LoopName = "uvloop"
    """The event loop."""

"""The options of the command `predict`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from adam_async.cli.options import Damaged, LoopName


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class PredictOptions:
    """Options of `predict`."""

    top: int = 3
    """Number of classes listed for each image, the likeliest first."""
    json: Annotated[bool, Parameter(negative="")] = False
    """Print one JSON object instead of a table."""
    png: Path | None = None
    """Draw the first hundred images into this file, each with its class under it; needs the extra `data`."""
    damaged: Damaged = "error"
    """Damaged images: stop at the first, or leave them out and list them."""
    loop: LoopName = "uvloop"
    """The event loop."""

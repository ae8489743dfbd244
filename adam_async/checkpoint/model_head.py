"""The head of a model file: its format, its spec and its class names; needs no NumPy.

A command checks the head of its model before it imports the modules that load the tensors.
"""

import json
from pathlib import Path
from typing import Any

from adam_async.checkpoint.names import FILE_NAME
from adam_async.data_server.class_names import is_name
from adam_async.errors import ConfigError, SpecError
from adam_async.model.spec import ModelSpec
from adam_async.runtime.ordinary_files import read_start

FORMAT = "adam-async/model/1"
"""Name and version of the format."""

METADATA_KEY = "adam-async"
"""Key of this package's JSON in the metadata: ``format_version``, ``spec`` and, for data with names,
``class_names``."""

RULE_STATE = "rule_state/"
"""Begin of the names of arrays with an update rule's state, such as ``rule_state/mean/fc1.weight``. A model
takes no value from rule state."""

SUMS = "adam-async/crc32"
"""Key of the checksums in the metadata: a JSON object with the CRC-32 of each array's bytes, by name."""

MAX_HEADER_BYTES = 4 << 20
"""Maximum size of a header in bytes: names, shapes and metadata of some thousand tensors with rule state."""


class SavedModelError(ConfigError):
    """A file is not a usable model."""


def check_head(path: Path) -> None:
    """Check that a file begins as the file of a model. Blocks.

    Raises:
        SavedModelError: See `read_head`.
        OSError: The file cannot be read.
    """
    read_head(*read_start(path, 8 + MAX_HEADER_BYTES), str(path))


def cannot_read(option: str, path: Path, error: OSError) -> ConfigError:
    """Return the error for the file of a model, named by an option or argument, that cannot be read."""
    cure = "name a file that `train --out` wrote"
    if path.name == FILE_NAME:
        cure += f"; from checkpoints `adam-async checkpoint export {path.parent} FILE` writes one"
    return ConfigError(f"{option} {path} cannot be read: {error.strerror or error}; {cure}")


def read_head(data: bytes, whole: int, origin: str) -> tuple[ModelSpec, tuple[str, ...]]:
    """Return the spec, and the names of the classes.

    Args:
        data: The first bytes of the file: at least 8 + `MAX_HEADER_BYTES`, or all.
        whole: Size of the file in bytes.

    Raises:
        SavedModelError: The file is truncated, has another format than safetensors, or was written by another
            package.
    """
    return _metadata(_header(data, whole, origin), origin)


def _header(data: bytes, whole: int, origin: str) -> dict[str, Any]:
    """Read the header, which the library's loader does not return, and check that the file is whole."""
    if whole < 8:
        raise SavedModelError(f"{origin} has {whole} bytes; a safetensors file has at least 10")
    size = int.from_bytes(data[:8], "little")
    if size > MAX_HEADER_BYTES:
        raise SavedModelError(f"{origin} is not a safetensors file (its header would have {size} bytes)")
    if 8 + size > whole:
        raise SavedModelError(
            f"{origin} is truncated: it has {whole} bytes, its header alone ends at {8 + size}"
        )
    try:
        header = json.loads(data[8 : 8 + size])
    except (ValueError, RecursionError):  # also of text that nests too deeply
        header = None
    if not isinstance(header, dict):
        raise SavedModelError(f"{origin} is not a safetensors file (its header is not a JSON object)")
    ends = [_end_of(entry) for name, entry in header.items() if name != "__metadata__"]
    expected = 8 + size + max(ends, default=0)
    if whole < expected:
        raise SavedModelError(f"{origin} is truncated: it has {whole} bytes of {expected}")
    return header


def sums_in(metadata: Any) -> dict[str, Any]:
    """Return the checksums of arrays by name; none if the file has none. Raises ValueError: damaged."""
    text = metadata.get(SUMS, "{}") if isinstance(metadata, dict) else "{}"
    try:
        sums = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        sums = None
    if not isinstance(sums, dict):
        raise ValueError(f"the checksums under {SUMS!r} are no JSON object")
    return sums


def sums_of_model(data: bytes, origin: str) -> dict[str, Any]:
    """Return the checksums in the bytes of a file. Raises ValueError, or SavedModelError as `read_head`."""
    return sums_in(_header(data, len(data), origin).get("__metadata__"))


def values_alone(data: bytes, origin: str) -> bytes:
    """Return a file without the state of update rules.

    Raises:
        SavedModelError: See `read_head`.
    """
    header = _header(data, len(data), origin)
    kept = {name: entry for name, entry in header.items() if not name.startswith(RULE_STATE)}
    if len(kept) == len(header):
        return data
    start, parts, at = 8 + int.from_bytes(data[:8], "little"), list[bytes](), 0
    for name, entry in kept.items():
        if name != "__metadata__" and (end := _end_of(entry)):
            part = data[start + entry["data_offsets"][0] : start + end]
            kept[name] = {**entry, "data_offsets": [at, at + len(part)]}
            parts.append(part)
            at += len(part)
    text = json.dumps(kept).encode()
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


def _end_of(entry: Any) -> int:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if isinstance(offsets, list) and len(offsets) == 2 and all(type(offset) is int for offset in offsets):
        return int(offsets[1])
    return 0


def _metadata(header: dict[str, Any], origin: str) -> tuple[ModelSpec, tuple[str, ...]]:
    """Return the spec and the names of the classes."""
    metadata = header.get("__metadata__")
    ours = metadata.get(METADATA_KEY) if isinstance(metadata, dict) else None
    if not isinstance(ours, str):
        raise SavedModelError(
            f"{origin} is a safetensors file without a model's spec, such as a step's; use one that "
            "`train --out` wrote for a network"
        )
    try:
        values = json.loads(ours)
        version, spec, names = values["format_version"], values["spec"], values.get("class_names", [])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise SavedModelError(f"{origin} has damaged metadata; save it again") from None
    if version != FORMAT:
        raise SavedModelError(f"{origin} has the format {version!r}; this version reads {FORMAT!r}")
    if not isinstance(names, list) or not all(isinstance(name, str) and is_name(name) for name in names):
        raise SavedModelError(
            f"{origin} has damaged metadata: class_names is not a list of names; save it again"
        )
    try:
        return ModelSpec.from_dict(spec), tuple(names)
    except SpecError as error:
        raise SavedModelError(f"{origin} holds no valid spec: {error}") from None

"""The name of the report format, which a command checks before it imports a report's classes."""

import msgspec

from adam_async.errors import ConfigError

SCHEMA = "adam-async/report/3"
"""Name and version of the schema; the version grows when a field changes its meaning or is removed."""


class _Schema(msgspec.Struct):
    schema: str


def check_schema(data: bytes, origin: str) -> None:
    """Check that a file is a report of this version. Raises ConfigError: it is not."""
    try:
        schema = msgspec.json.decode(data, type=_Schema).schema
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise no_report(origin, error) from None
    # Another version may have other fields: name the version rather than the first such field.
    if schema != SCHEMA:
        raise ConfigError(
            f"{origin} has the format {schema!r}; this version reads {SCHEMA!r}: read it with the version "
            "that wrote it, or write a new one with train --report"
        )


def no_report(origin: str, error: Exception) -> ConfigError:
    """Return the error of a file that is no report."""
    return ConfigError(f"{origin} is no report of this version ({SCHEMA}): {error}")

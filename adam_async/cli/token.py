"""Tokens of clusters: read for a command, and written by `token new` and `token derive`."""

import sys
from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path

from adam_async.errors import ConfigError, failing_as
from adam_async.messages.body import ROLES
from adam_async.run.token_file import check_token_is_for, derived_text
from adam_async.runtime.clock import system_entropy
from adam_async.runtime.disk import Disk

TOKEN_BYTES = 32
"""Size of a new root token, in random bytes."""


async def new_token(out: Path | None) -> int:
    """Write a random root token. Raises ConfigError: the file exists or cannot be written."""
    return await _write(b64encode(system_entropy(TOKEN_BYTES)).decode(), out)


async def derive_token(
    role: str | None, token_file: Path | None, out: Path | None, environment: Mapping[str, str]
) -> int:
    """Write the keys of one role.

    Raises:
        ConfigError: The role or root token is missing, the role is unknown, or the keys cannot be written.
    """
    if role is None:
        raise ConfigError(
            f"name the role that gets the keys: --role ROLE, one of {', '.join(ROLES)} (driver is `train`)"
        )
    token = await read_token(token_file, environment)
    if token is None:
        raise ConfigError("there is no token to derive keys from: give --token-file FILE, or set ADAM_TOKEN")
    origin = f"--token-file {token_file}" if token_file else "ADAM_TOKEN"
    return await _write(derived_text(token, role, origin=origin), out)


async def read_token(
    file: Path | None, environment: Mapping[str, str], *, role: str = "", option: str = "--token-file"
) -> str | None:
    """Return the cluster's token or the keys of a role: from the file, else from ADAM_TOKEN, else none.

    Args:
        role: Role of the command; another role's keys are refused. Empty if the command has no role or
            several.
        option: Option that names the file.

    Raises:
        ConfigError: The file is unreadable, empty, not private (see `Disk.read_secret`), or has a secret that
            this command cannot use.
    """
    token = await _token_text(file, environment, option)
    if token and role:
        check_token_is_for(token, role, origin=f"{option} {file}" if file else "ADAM_TOKEN")
    return token


async def _token_text(file: Path | None, environment: Mapping[str, str], option: str) -> str | None:
    if file is None:
        return environment.get("ADAM_TOKEN", "").strip() or None
    async with Disk() as disk:
        try:
            with failing_as(ConfigError, f"{option} {file} cannot be used"):
                token = (await disk.read_secret(file)).decode("utf-8-sig").strip()
        except UnicodeDecodeError:
            raise ConfigError(f"{option} {file} cannot be used: it is not text in UTF-8") from None
    if not token:
        raise ConfigError(f"{option} {file} is empty")
    return token


async def _write(line: str, out: Path | None) -> int:
    if out is None:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
        return 0
    async with Disk() as disk:
        with failing_as(ConfigError, f"--out {out} cannot be written"):
            try:
                await disk.write_private(out, f"{line}\n".encode())
            except FileExistsError:
                raise ConfigError(f"--out {out} exists: remove it, or name another file") from None
    return 0

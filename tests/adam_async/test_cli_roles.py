"""The token of a role, from a file or from its environment."""

from pathlib import Path

import pytest

from adam_async.cli_roles import read_token
from adam_async.errors import ConfigError


async def test_a_token_file_is_private_to_its_owner(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(" a token of many bytes\n")
    file.chmod(0o644)
    with pytest.raises(ConfigError, match=r"--token-file .*token.* mode is 0644: run chmod 600 .*token"):
        await read_token(file, {})

    file.chmod(0o400)
    assert await read_token(file, {"ADAM_TOKEN": "another"}) == "a token of many bytes"


async def test_a_token_file_that_holds_none_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    with pytest.raises(ConfigError, match=r"cannot be used: .*No such file"):
        await read_token(file, {})
    file.touch(0o600)
    with pytest.raises(ConfigError, match="is empty"):
        await read_token(file, {})


async def test_without_a_file_the_environment_has_the_token_or_there_is_none() -> None:
    assert await read_token(None, {"ADAM_TOKEN": " a token "}) == "a token"
    assert await read_token(None, {}) is None

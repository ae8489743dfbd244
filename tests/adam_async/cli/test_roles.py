"""The token of a role, from a file or from its environment, and its wait for a controller."""

import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from adam_async.cli.roles.serving import waits_at_start
from adam_async.cli.token import read_token
from adam_async.errors import ConfigError
from adam_async.run.config import Waits


async def test_a_token_file_is_private_to_its_owner(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(" a token of many bytes\n")
    file.chmod(0o644)
    with pytest.raises(
        ConfigError,
        match=f"^--token-file {file} cannot be used: others can [^/]* 0644: run chmod 600 {file}$",
    ):
        await read_token(file, {})

    file.chmod(0o400)
    assert await read_token(file, {"ADAM_TOKEN": "another"}) == "a token of many bytes"


async def test_a_token_file_that_holds_none_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    with pytest.raises(ConfigError, match=f"^--token-file {file} cannot be used: No such file or directory$"):
        await read_token(file, {})
    file.touch(0o600)
    with pytest.raises(ConfigError, match="is empty"):
        await read_token(file, {})


async def test_without_a_file_the_environment_has_the_token_or_there_is_none() -> None:
    assert await read_token(None, {"ADAM_TOKEN": " a token "}) == "a token"
    assert await read_token(None, {}) is None


def test_a_role_waits_for_its_controller_as_long_as_it_is_told() -> None:
    assert waits_at_start(timedelta(minutes=5)) == Waits(meet_s=300.0)
    assert (Waits().start_s, Waits(meet_s=60.0).start_s) == (Waits().dial_s, 60.0)
    with pytest.raises(ConfigError, match="--wait must be a time above 0, such as 60s or 5m, not 0s"):
        waits_at_start(timedelta())


HEAVY = {"numba", "onnx", "matplotlib", "PIL", "pyarrow", "ray", "torch", "adam_async.store", "tests"}
SERVICES = {"controller", "data_server", "parameter_server", "worker"}


@pytest.mark.parametrize("role", sorted(SERVICES))
def test_the_process_of_a_role_imports_no_other_role(role: str) -> None:
    code = f"import sys, adam_async.cli.commands, adam_async.cli.roles.{role}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    imported = set(done.stdout.split())

    services = {name for name in SERVICES if f"adam_async.{name}.service" in imported}
    assert services == {role}
    assert not imported & HEAVY

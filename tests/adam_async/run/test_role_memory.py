"""The memory of roles is read by role, and sizes that no process can have are refused."""

import pytest

from adam_async.errors import ConfigError
from adam_async.run.config import Config
from adam_async.run.option_sources import from_environment, from_toml, make_config
from adam_async.run.role_memory import asked_bytes, check_room, read_memory


def test_sizes_are_bytes_by_role() -> None:
    assert read_memory(["worker=2G", "ps=512M"]) == {"worker": 2 << 30, "ps": 512 << 20}
    assert read_memory([]) == {}


@pytest.mark.parametrize(
    ("texts", "claim"),
    [
        (["worker"], "'worker' is not of the form ROLE=SIZE, such as worker=2G"),
        (["gpu=2G"], "roles are controller, ps, data, worker, driver"),
        (["ps=1G", "ps=2G"], "memory names ps twice"),
        (["ps=much"], "memory of ps must be a size such as 512M or 4G, not 'much'"),
        (["ps=-1G"], "memory of ps must be a size"),
        (["ps=63M"], "'ps=63M' is out of bounds: a process gets at least 64M"),
        (["ps=2000T"], "is out of bounds"),
    ],
)
def test_a_wrong_size_is_refused_with_the_form(texts: list[str], claim: str) -> None:
    with pytest.raises(ConfigError, match=claim):
        Config(memory=tuple(texts))


def test_a_file_and_a_variable_set_the_same_sizes() -> None:
    file = from_toml('memory = ["ps=1G", "worker=2G"]\n', source="adam.toml")
    variable = from_environment({"ADAM_MEMORY": "ps=1G,worker=2G"})

    assert make_config(file).memory == make_config(variable).memory == ("ps=1G", "worker=2G")


def test_roles_without_a_size_ask_for_nothing() -> None:
    assert asked_bytes({"ps": 3}, ["ps", "worker", "ps"]) == 6


def test_a_machine_with_too_little_memory_is_named_with_the_cure() -> None:
    check_room("host a", 2 << 30, 2 << 30)
    with pytest.raises(ConfigError, match=r"on host a ask for 2\.5 GiB of memory, and it has 512 MiB: lower"):
        check_room("host a", 5 << 29, 512 << 20)

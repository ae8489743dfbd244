"""A role of a batch job gets the options of its run."""

from adam_async.cli.from_environment import Found
from adam_async.cli.options import FromEnvironmentOptions
from adam_async.launch.environment import Assignment
from adam_async.run.config import Config


def words_of(role: str, config: Config) -> list[str]:
    assignment = Assignment(roles=((role, f"{role}-0"),), controllers=("tcp://10.0.0.1:7070",))
    found = Found(config=config, assignment=assignment, arguments={f"{role}-0": ()})
    return found.command(FromEnvironmentOptions(from_env=True))


def test_only_a_parameter_server_gets_an_address_for_other_servers() -> None:
    copies = "tcp://10.1.0.2:0"
    words = words_of("ps", Config(copies_bind=copies))

    assert words[words.index("--copies-bind") + 1] == copies
    assert "--copies-bind" not in words_of("data", Config(copies_bind=copies))
    assert "--copies-bind" not in words_of("ps", Config())

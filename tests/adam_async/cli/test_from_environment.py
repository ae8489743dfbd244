"""A role of a batch job gets the options of its run."""

from pathlib import Path

from adam_async.cli.from_environment import Found, find_roles
from adam_async.cli.options import FromEnvironmentOptions
from adam_async.launch.environment import Assignment
from adam_async.run.config import Config


def words_of(role: str, config: Config) -> list[str]:
    assignment = Assignment(roles=((role, f"{role}-0"),), controllers=("tcp://10.0.0.1:7070",))
    found = Found(config=config, assignment=assignment, arguments={f"{role}-0": ()}, threads=1)
    return found.command(FromEnvironmentOptions(from_env=True))


def test_only_a_parameter_server_gets_an_address_for_other_servers() -> None:
    copies = "tcp://10.1.0.2:0"
    words = words_of("ps", Config(copies_bind=copies))

    assert words[words.index("--copies-bind") + 1] == copies
    assert "--copies-bind" not in words_of("data", Config(copies_bind=copies))
    assert "--copies-bind" not in words_of("ps", Config())


def test_a_role_gets_the_options_of_the_run_that_its_command_has() -> None:
    words = words_of("ps", Config(flush_s=3.0, checksum="on"))
    assert "--flush-s" not in words  # the server has no folder
    assert words[words.index("--checksum") + 1] == "on"


async def test_each_role_allows_the_code_that_the_command_names(tmp_path: Path) -> None:
    (tmp_path / "steps.toml").write_text('[[transform]]\nkind = "mine:invert"\n')
    (tmp_path / "adam.toml").write_text(
        'data = "digits"\naugment = true\ntransforms = "steps.toml"\nrule = "mine:Sign"\n'
    )
    options = FromEnvironmentOptions(
        from_env=True,
        config=tmp_path / "adam.toml",
        allow_step=("mine.steps", "other"),
        layers=("odd=mine:Odd",),
        allow_transform=("mine:darker", "mine:invert"),
        allow_rule=("mine:Lion",),
        step_path=(tmp_path,),
    )
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "7000"}
    found = await find_roles(options, ranks)
    path = ("--step-path", str(tmp_path))
    steps = (*path, "--layer", "odd=mine:Odd", "--allow-step", "mine.steps", "--allow-step", "other")
    transforms = (*path, "--allow-transform", "mine:invert", "--allow-transform", "mine:darker")
    rules = (*path, "--allow-rule", "mine:Sign", "--allow-rule", "mine:Lion")
    for role, node in found.assignment.roles:
        wanted = {"worker": steps, "data": transforms, "ps": rules}.get(role, ())
        assert found.arguments[node][len(found.arguments[node]) - len(wanted) :] == wanted
        assert ("--step-path" in found.arguments[node]) == bool(wanted)


def test_the_command_of_the_only_role_has_the_code_that_it_allows() -> None:
    assignment = Assignment(roles=(("worker", "w"),), controllers=("tcp://10.0.0.1:7070",))
    words = {"w": ("--allow-step", "mine")}
    found = Found(config=Config(), assignment=assignment, arguments=words, threads=1)
    assert found.command(FromEnvironmentOptions(from_env=True))[:5] == [
        "worker",
        "--id",
        "w",
        "--allow-step",
        "mine",
    ]


async def test_a_rank_of_a_launch_takes_the_options_of_its_command_line(tmp_path: Path) -> None:
    (tmp_path / "adam.toml").write_text('data = "digits"\nservers = 1\n')
    options = FromEnvironmentOptions(from_env=True, config=tmp_path / "adam.toml")
    ranks = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "29500"}
    given = {"servers": 2, "flush_s": 3.0, "threads": None, "record": True}
    found = await find_roles(options, ranks, given, tmp_path / "kept")

    assert [node for _, node in found.assignment.roles] == ["ps-0", "data-0"]
    assert found.assignment.rank == 1
    assert found.threads == 1
    assert found.arguments["ps-0"][-2:] == ("--dir", str(tmp_path / "kept" / "ps-0"))
    assert found.config.flush_s == 3.0

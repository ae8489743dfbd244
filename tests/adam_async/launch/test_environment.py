"""A process of a batch job finds its roles and the controllers in the variables of its engine."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_async.errors import ConfigError
from adam_async.launch.environment import Layout, assigned_roles, cores_of_rank, restarts_in
from adam_async.run.config import Config

HERE = {"ADAM_CONTROLLER": "tcp://10.0.0.1:7070"}
SMALL = Layout(controllers=1, servers=2, data_servers=1, workers=2)
GROUP = Layout(controllers=3, servers=1, data_servers=1, workers=1)
PEERS = "tcp://10.0.0.1:7070,tcp://10.0.0.2:7070,tcp://10.0.0.3:7070"


def test_the_layout_of_a_configuration_counts_the_workers_of_all_partitions() -> None:
    layout = Layout.of(Config(servers=2, replicas=2, partitions=2))

    assert layout == Layout(controllers=1, servers=2, data_servers=1, workers=4)
    assert Layout.of(Config(data="tcp://10.0.0.5:7100")).data_servers == 0


@pytest.mark.parametrize(
    ("variables", "roles"),
    [
        ({"ADAM_ROLE": "ps", "ADAM_NODE": "mine", "RANK": "3"}, [("ps", "mine")]),
        ({"ADAM_ROLE": "worker"}, [("worker", "")]),
        ({"ADAM_ROLE": "controller"}, [("controller", "controller")]),
        ({"RANK": "0", "WORLD_SIZE": "6"}, [("controller", "controller")]),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "6"}, [("ps", "ps-0")]),
        ({"PMI_RANK": "3", "PMI_SIZE": "6"}, [("data", "data-0")]),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "6"}, [("worker", "worker-1")]),
        ({"SLURM_PROCID": "7", "SLURM_NTASKS": "8"}, [("worker", "worker-3")]),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "SLURM_PROCID": "5", "SLURM_NTASKS": "6"},
            [("controller", "controller"), ("ps", "ps-1"), ("worker", "worker-0")],
        ),
        ({"POD_NAME": "adam-ps-2"}, [("ps", "ps-2")]),
        ({"POD_NAME": "my-adam-controller-0"}, [("controller", "controller")]),
        ({"POD_NAME": "adam-worker-7d9f8b6c-x2x4z"}, [("worker", "worker-7d9f8b6c-x2x4z")]),
    ],
)
def test_variables_of_an_engine_name_the_roles(
    variables: dict[str, str], roles: list[tuple[str, str]]
) -> None:
    assert assigned_roles({**HERE, **variables}, SMALL).roles == tuple(roles)


@given(st.integers(1, 40), st.sampled_from([SMALL, GROUP]))
def test_all_ranks_together_have_each_role_once(ranks: int, layout: Layout) -> None:
    found: Counter[tuple[str, str]] = Counter()
    for rank in range(ranks):
        here = {"ADAM_CONTROLLER": PEERS if layout is GROUP else HERE["ADAM_CONTROLLER"]}
        here |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
        roles = assigned_roles(here, layout).roles
        assert roles
        found.update(roles)

    assert set(layout.nodes()) <= set(found)
    assert set(found.values()) == {1}
    assert len(found) == max(ranks, len(layout.nodes()))


@pytest.mark.parametrize(
    ("variables", "address"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "29500"}, "tcp://h:29501"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "::1", "MASTER_PORT": "1"}, "tcp://[::1]:2"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_JOB_NODELIST": "n-1"}, "tcp://n-1:7070"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_JOB_NODELIST": "n[08-10,12],m"}, "tcp://n08:7070"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_JOB_NODELIST": "a,n[1-3]"}, "tcp://a:7070"),
        (
            {
                "SLURM_PROCID": "0",
                "SLURM_NTASKS": "1",
                "SLURM_JOB_NODELIST": "n[1-4]",
                "SLURM_STEP_NODELIST": "n[3-4]",
            },
            "tcp://n3:7070",
        ),
        (
            {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "n", "SLURM_JOB_ID": "1234567"},
            "tcp://n:24567",
        ),
        *(
            ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": names}, f"tcp://{first}:7070")
            for names, first in (
                ("rack[0-3]_blade[0-7]", "rack0_blade0"),
                ("rack[01,03-09]-node[007-012,14].site,other", "rack01-node007.site"),
                ("[3-4]", "3"),
                ("n[5]", "n5"),
                ("a-b.c,d[1-2]", "a-b.c"),
            )
        ),
    ],
)
def test_without_an_address_the_controller_is_on_the_host_of_rank_0(
    variables: dict[str, str], address: str
) -> None:
    assert assigned_roles(variables, SMALL).controllers == (address,)


@pytest.mark.parametrize(
    ("variables", "addresses"),
    [
        (
            {"SLURM_NTASKS": "4", "SLURM_STEP_NODELIST": "n[09-10],m[1-2]"},
            ("tcp://n09:7070", "tcp://n10:7071", "tcp://m1:7072"),
        ),
        (
            {"SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "a,b"},
            ("tcp://a:7070", "tcp://b:7071", "tcp://a:7072"),
        ),
        ({"SLURM_NTASKS": "5", "SLURM_STEP_NODELIST": "a"}, ("tcp://a:7070", "tcp://a:7071", "tcp://a:7072")),
        (
            {
                "RANK": "0",
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "h",
                "MASTER_PORT": "29500",
            },
            ("tcp://h:29501", "tcp://h:29502", "tcp://h:29503"),
        ),
    ],
)
def test_controllers_have_the_hosts_of_their_ranks(
    variables: dict[str, str], addresses: tuple[str, ...]
) -> None:
    rank = {} if "RANK" in variables else {"SLURM_PROCID": "0"}
    assert assigned_roles({**rank, **variables}, GROUP).controllers == addresses


def test_ranks_of_a_machine_share_its_cores() -> None:
    assert cores_of_rank({"RANK": "0", "LOCAL_WORLD_SIZE": "3"}, 8) == 2
    assert cores_of_rank({"RANK": "0", "LOCAL_WORLD_SIZE": "30"}, 8) == 1
    assert cores_of_rank({"SLURM_PROCID": "0", "SLURM_CPUS_PER_TASK": "4"}, 8) == 4
    assert cores_of_rank({"SLURM_PROCID": "0", "SLURM_CPUS_PER_TASK": "16"}, 8) == 8
    assert cores_of_rank({"POD_NAME": "adam-ps-0", "LOCAL_WORLD_SIZE": "3"}, 8) == 8


def test_restarts_of_a_job_are_counted() -> None:
    assert restarts_in({}) == 0
    assert restarts_in({"SLURM_RESTART_COUNT": "2"}) == 2
    assert restarts_in({"TORCHELASTIC_RESTART_COUNT": "3"}) == 3


def test_each_of_several_controllers_has_its_own_address() -> None:
    found = assigned_roles({"POD_NAME": "adam-controller-1", "ADAM_CONTROLLER": PEERS}, GROUP)

    assert found.roles == (("controller", "controller-2"),)
    assert found.bind_of("controller-2") == "tcp://10.0.0.2:7070"


@pytest.mark.parametrize(
    ("variables", "layout", "claim"),
    [
        ({}, SMALL, "no variable names the role of this process: set one of ADAM_ROLE, RANK"),
        ({"ADAM_ROLE": "server"}, SMALL, "ADAM_ROLE=server is no role; roles are controller, ps"),
        ({"ADAM_ROLE": "controller"}, GROUP, "needs ADAM_NODE, one of controller-1, controller-2"),
        ({"ADAM_ROLE": "controller", "ADAM_NODE": "c"}, GROUP, "ADAM_NODE=c is no controller"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, SMALL, "RANK='2' must be a whole number within 0 and 1"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, SMALL, "RANK='-1' must be a whole number"),
        ({"RANK": "0"}, SMALL, "WORLD_SIZE is not set, and must be a whole number within 1"),
        ({"SLURM_PROCID": "x", "SLURM_NTASKS": "4"}, SMALL, "SLURM_PROCID='x' must"),
        ({"POD_NAME": "adam-2"}, SMALL, "POD_NAME=adam-2 names no role"),
        ({"POD_NAME": "adam-controller-1"}, SMALL, "is controller 1, counted from 0, of controllers=1"),
        ({"ADAM_ROLE": "ps", "ADAM_CONTROLLER": ""}, SMALL, "set ADAM_CONTROLLER=tcp://HOST:7070"),
        ({"ADAM_ROLE": "ps", "ADAM_CONTROLLER": "h:1"}, SMALL, "ADAM_CONTROLLER: "),
        ({"ADAM_ROLE": "ps"}, GROUP, "controllers=3, and there are addresses of 1"),
        (
            {
                "RANK": "0",
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": "h",
                "MASTER_PORT": "29500",
                "ADAM_CONTROLLER": "",
            },
            GROUP,
            "controllers=3, and there are addresses of 1: tcp://h:29501; set ADAM_CONTROLLER",
        ),
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_JOB_NODELIST": "]", "ADAM_CONTROLLER": ""},
            SMALL,
            r"SLURM_JOB_NODELIST=\] is no list of hosts",
        ),
        *(
            (
                {
                    "SLURM_PROCID": "0",
                    "SLURM_NTASKS": "1",
                    "SLURM_STEP_NODELIST": names,
                    "ADAM_CONTROLLER": "",
                },
                SMALL,
                "SLURM_STEP_NODELIST=.* is no list of hosts",
            )
            for names in ("n[3-", "n3-4]", "n[a-b]", ",n1", "n[1-2[3-4]]", "n[]", "n,,m", "n m")
        ),
    ],
)
def test_a_wrong_variable_is_named_with_its_value_and_the_remedy(
    variables: dict[str, str], layout: Layout, claim: str
) -> None:
    with pytest.raises(ConfigError, match=claim):
        assigned_roles({**HERE, **variables}, layout)


@pytest.mark.parametrize(
    ("host", "address"), [("10.1.0.7", "tcp://10.1.0.7:7070"), ("fd00::7", "tcp://[fd00::7]:7070"), ("", "")]
)
def test_the_roles_of_a_pod_listen_on_its_address(host: str, address: str) -> None:
    assert assigned_roles({**HERE, "POD_NAME": "adam-ps-0", "POD_IP": host}, SMALL).pod == address


def test_an_address_of_a_pod_that_is_none_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"POD_IP='adam-ps-0' is no address: set it from the field status\.podIP"
    ):
        assigned_roles({**HERE, "POD_NAME": "adam-ps-0", "POD_IP": "adam-ps-0"}, SMALL)

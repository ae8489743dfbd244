"""A description of a run on Kubernetes is refused by name before any manifest exists."""

from dataclasses import replace

import pytest

from adam_async.errors import ConfigError
from adam_async.launch.kubernetes import (
    DEFAULTS,
    KubernetesRun,
    Resources,
    Storage,
    check,
    cores,
    files_of,
    read_resources,
)
from adam_async.run.config import Config

RUN = KubernetesRun(
    name="adam", image="adam-async:0.1.0", config=Config(data="digits"), files={"adam.toml": ""}
)


def test_resources_override_the_defaults_of_their_role() -> None:
    found = read_resources(("worker=4,8Gi", "controller=250m,512Mi"), {})

    assert found == {
        **DEFAULTS,
        "worker": Resources("4", "8Gi"),
        "controller": Resources("250m", "512Mi"),
    }


def test_the_memory_of_the_options_replaces_the_default_of_its_role_only() -> None:
    memory = {"ps": 6 << 30, "data": 1536 << 20, "driver": (1 << 30) + 1, "worker": 1 << 30}
    found = read_resources(("worker=4,8Gi",), memory)

    assert found == {
        "controller": DEFAULTS["controller"],
        "ps": Resources(DEFAULTS["ps"].cpu, "6Gi"),
        "data": Resources(DEFAULTS["data"].cpu, "1536Mi"),
        "driver": Resources(DEFAULTS["driver"].cpu, "1073741825"),
        "worker": Resources("4", "8Gi"),
    }


@pytest.mark.parametrize(
    ("word", "claim"),
    [
        ("worker=4", "is not of the form ROLE=CPU,MEMORY, such as worker=4,8Gi"),
        ("gpu=4,8Gi", "roles are controller, ps, data, worker, driver"),
        ("ps=0,2Gi", "--resources ps: processor 0 is zero, and no pod could start"),
        ("ps=1,0Gi", "--resources ps: memory 0Gi is zero"),
        ("ps=1,2Gb", "--resources ps: memory '2Gb' is no quantity of Kubernetes: give one such as 2Gi"),
        ("ps=1Gi,2Gi", "--resources ps: processor '1Gi' is no quantity"),
        ("ps=1,500m", "--resources ps: memory '500m' is no quantity"),
        ("ps=-1,2Gi", "--resources ps: processor '-1' is no quantity"),
    ],
)
def test_resources_that_are_none_are_refused(word: str, claim: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_resources((word,), {})
    assert claim in str(error.value)


@pytest.mark.parametrize(("cpu", "whole"), [("2", 2), ("1.5", 2), ("1500m", 2), ("500m", 1), ("3000m", 3)])
def test_a_processor_quantity_needs_whole_cores(cpu: str, whole: int) -> None:
    assert cores(cpu) == whole


@pytest.mark.parametrize(
    ("changes", "claim"),
    [
        ({"name": "Adam"}, "--name 'Adam' is no name for Kubernetes: give at most 30 small letters"),
        ({"name": "1st"}, "a letter first"),
        ({"name": "adam-"}, "no hyphen last"),
        ({"name": "a" * 31}, "at most 30"),
        ({"image": "two words"}, "--image 'two words' is no"),
        ({"secret": "My_Keys"}, "--secret 'My_Keys' is no name for Kubernetes"),
        ({"storage": Storage(storage_class="a/b")}, "--storage-class 'a/b' is no name"),
        ({"storage": Storage(data_claim="-x")}, "--data-claim '-x' is no name"),
        ({"storage": Storage(results="0Gi")}, "--results 0Gi is zero"),
        ({"storage": Storage(state="much")}, "--state 'much' is no quantity"),
        ({"files": {"adam.toml": "#" * 1_000_001}}, "and a ConfigMap holds 1000000"),
        ({"config": Config(data="/data/images")}, "name its claim with --data-claim, and set data to /srv/"),
        ({"config": Config(data="/srv/adam/data/x")}, "put the images on a volume"),
        ({"config": Config(data="tcp://10.0.0.1:7070")}, "names data servers elsewhere"),
        ({"config": Config(data="digits", weights="aliased")}, "needs all roles in one process"),
        ({"config": Config(data="digits", slow=("worker-0:0.5",))}, "leave it out of adam.toml"),
        ({"config": Config(data="digits", record=True)}, "record=true writes no file on Kubernetes"),
        ({"config": Config(data="digits", threads=3)}, "give --resources worker=3,2Gi, or leave threads out"),
    ],
)
def test_what_pods_cannot_run_is_refused_with_the_cure(changes: dict[str, object], claim: str) -> None:
    check(RUN)
    with pytest.raises(ConfigError) as error:
        check(replace(RUN, **changes))  # type: ignore[arg-type]
    assert claim in str(error.value)


def test_images_on_a_volume_are_named_by_their_path_in_the_pods() -> None:
    config = Config(data="/srv/adam/data/images")
    check(replace(RUN, config=config, storage=Storage(data_claim="images")))


def test_files_beside_the_options_belong_to_the_run() -> None:
    config = Config(model="nets/small.toml", augment=True, transforms="./flips.toml")

    assert files_of(config) == ("nets/small.toml", "flips.toml")
    assert files_of(Config(model="mlp")) == ()


@pytest.mark.parametrize("path", ["/etc/net.toml", "../net.toml", "a/../../net.toml"])
def test_a_file_outside_the_folder_of_the_options_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=r"is outside the folder of adam\.toml"):
        files_of(Config(model=path))


def test_the_options_do_not_name_themselves() -> None:
    with pytest.raises(ConfigError, match="cannot name itself"):
        files_of(Config(model="./adam.toml"))

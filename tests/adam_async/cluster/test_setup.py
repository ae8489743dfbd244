"""Arguments of the clusters: the wrong ones are refused before any role starts, with the right form."""

from pathlib import Path
from typing import Any

import pytest

from adam_async.cluster.local import LocalCluster
from adam_async.cluster.processes import ProcessCluster
from adam_async.errors import ConfigError, RunFailed
from adam_async.run.config import Config
from tests.adam_async.own_layer import OWN_LAYERS
from tests.adam_async.runs import cluster_of, tiny_dataset


class Step:
    """A step of a user, of which these tests call nothing."""


@pytest.mark.parametrize(
    ("kind", "config", "given", "text"),
    [
        (LocalCluster, {"processes": True}, {}, r"use ProcessCluster\(config\)"),
        (LocalCluster, {"augment": True, "transforms": "steps.toml"}, {}, r"give its steps as transforms=\["),
        (LocalCluster, {}, {"transforms": [{"kind": "flip"}]}, "augment is off"),
        (LocalCluster, {}, {"spec": "digits"}, r"spec is a str, expected a ModelSpec"),
        (LocalCluster, {}, {"step": Step}, r"class Step, expected an object: give Step\(\.\.\.\)"),
        (ProcessCluster, {}, {"step": Step()}, "step is a Step, which does not travel to other processes"),
        (ProcessCluster, {}, {"layers": OWN_LAYERS}, "is no text, and classes do not travel"),
    ],
)
def test_an_argument_of_another_form_is_refused_with_the_right_one(
    kind: type[Any], config: dict[str, Any], given: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        kind(Config(**config), **given)


async def test_folders_may_be_given_as_texts(tmp_path: Path) -> None:
    async with cluster_of(Config(threads=1, epochs=1), checkpoint=str(tmp_path / "kept")) as cluster:
        await cluster.train()
    async with cluster_of(Config(threads=1, epochs=2), resume=str(tmp_path / "kept")) as cluster:
        result = await cluster.train()
    assert [epoch.epoch for epoch in result.epochs] == [1, 2]


async def test_a_cluster_is_entered_once() -> None:
    cluster = LocalCluster(Config(threads=1), dataset=tiny_dataset())
    async with cluster:
        with pytest.raises(RunFailed, match="entered once: make another LocalCluster"):
            await cluster.__aenter__()
    with pytest.raises(RunFailed, match="entered once: make another LocalCluster"):
        await cluster.__aenter__()

"""A run settles its transforms before it begins, functions of the user among them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adam_async.cluster.local import LocalCluster
from adam_async.data_server.sources.datasets import load_dataset
from adam_async.driver.preparation import steps_for
from adam_async.errors import ConfigError, TransformFailed
from adam_async.run.config import Config
from adam_async.runtime.disk import Disk

SHAPE = (1, 8, 8)
STEPS = [{"kind": "invert", "draws": 0}]


def test_steps_are_taken_as_they_were_given_or_as_suits_the_images() -> None:
    assert steps_for([{"kind": "flip"}], SHAPE) == ({"kind": "flip"},)
    assert next(step["kind"] for step in steps_for(None, SHAPE)) == "shift"


def test_steps_that_change_the_size_are_refused() -> None:
    with pytest.raises(ConfigError, match="test images stay as they are"):
        steps_for([{"kind": "pad", "pixels": 1}], SHAPE)


def test_a_function_is_a_kind_only_where_it_is_handed_in() -> None:
    assert steps_for(STEPS, SHAPE, {"invert": lambda image, draws: image}) == tuple(STEPS)
    with pytest.raises(ConfigError, match="step 1 has the kind 'invert'"):
        steps_for(STEPS, SHAPE)


async def trained(function: Any, **options: Any) -> None:
    async with Disk() as disk:
        digits = await load_dataset("digits", disk)
    config = Config(epochs=1, augment=True, threads=1, images_per_group=64)
    async with LocalCluster(config, dataset=digits, **options, functions={"invert": function}) as cluster:
        await cluster.train()


async def test_a_cluster_transforms_every_training_image_by_a_function_of_the_user() -> None:
    seen: list[tuple[int, ...]] = []

    def invert(image: Any, draws: Any) -> Any:
        seen.append(image.shape)
        return 255 - image

    await trained(invert, transforms=STEPS)

    assert set(seen) == {SHAPE}
    assert len(seen) >= 1437


async def test_a_function_that_fails_ends_the_run_with_its_error() -> None:
    def fail(image: Any, draws: Any) -> Any:
        return np.zeros(3)

    with pytest.raises(TransformFailed, match=r"^step 1: the function 'invert' returned float64"):
        await trained(fail, transforms=STEPS)


async def test_a_cluster_imports_the_function_that_a_step_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "users_steps.py").write_text(
        "calls = []\ndef same(image, draws):\n    calls.append(len(draws))\n    return image\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    await trained(None, transforms=[{"kind": "users_steps:same", "draws": 3}])

    from users_steps import calls  # type: ignore[import-not-found]

    assert set(calls) == {3}

"""Few photographs, at the defaults."""

import shutil
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from adam_async.cluster.local import LocalCluster
from adam_async.run.config import Config
from tests.photos import CLASSES, write_photos


async def held_back_share(folder: Path, seed: int) -> float:
    """Train on 40 photographs, and return the share of 20 others whose class is found."""
    write_photos(folder / "train", 40, seed=seed)
    write_photos(folder / "test", 20, seed=1000 + seed)
    async with LocalCluster(Config(data=str(folder), seed=seed)) as cluster:
        result = await cluster.train()
    assert len(result.epochs) == 100, "ten groups of four photographs are ten steps of an epoch"
    shutil.rmtree(folder)
    return result.epochs[-1].test_accuracy


@pytest.mark.slow
@pytest.mark.timeout(600)  # five runs, also beside other load
async def test_forty_photographs_are_learned_at_the_defaults(tmp_path: Path) -> None:
    shares = [await held_back_share(tmp_path / str(seed), seed) for seed in range(5)]

    assert median(shares) >= 0.9, shares


def test_the_same_seed_makes_the_same_photographs_of_several_sizes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_photos(tmp_path / name, 6, seed=3)
    files = sorted((tmp_path / "a").glob("*/*.jpg"))

    assert {file.parent.name for file in files} == set(CLASSES)
    assert all(
        file.read_bytes() == (tmp_path / "b" / file.relative_to(tmp_path / "a")).read_bytes()
        for file in files
    )
    assert len(np.unique([len(file.read_bytes()) for file in files])) > 1

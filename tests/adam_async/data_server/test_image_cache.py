"""The cache: the same pixels whatever fits, what it saves, and a disk that fills up."""

import logging
import math
from collections import OrderedDict
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_async.data_server.image_cache import CachedImages
from adam_async.data_server.sources.files import Scratch
from adam_async.model.keyed_random import Dice
from tests.adam_async.data_server.pictures import IMAGE_BYTES, pictures, stored


def cached(images: int, fit: int, spill: Path | None = None, **options) -> CachedImages:
    ticks = count()
    return CachedImages(
        stored(images), size_bytes=fit * IMAGE_BYTES + 3, spill=spill, clock=lambda: next(ticks), **options
    )


@given(
    images=st.integers(1, 30),
    fit=st.integers(0, 40),
    spilling=st.booleans(),
    picks=st.lists(st.lists(st.integers(0, 29), max_size=12), max_size=8),
)
def test_pixels_are_those_of_the_images_in_whatever_order_and_however_few_fit(
    tmp_path_factory, images, fit, spilling, picks
):
    cache = cached(images, fit, tmp_path_factory.getbasetemp() if spilling else None)
    asked = 0
    for pick in picks:
        chosen = np.array([number % images for number in pick], np.int64)
        asked += len(chosen)
        expected = pictures(chosen.tolist()) if pick else np.empty((0, 1, 2, 3))
        assert np.array_equal(cache.take(chosen, axis=0), expected)
    told = cache.statistics()
    seen = len({number % images for pick in picks for number in pick})
    assert told.hits + told.misses == asked
    assert told.decoded + told.read_back == told.misses
    assert told.resident_images == min(seen, fit, images)
    assert told.resident_bytes == told.resident_images * IMAGE_BYTES
    assert cache.complete == (told.resident_images == images)
    if spilling:
        assert told.decoded == seen
        assert told.spilled == seen - told.resident_images
    cache.close()


def found(order, capacity, *, stays):
    """Share of the second epoch that is found in memory, with a set that stays or the least recent out."""
    kept: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for epoch in order:
        hits = 0
        for number in epoch:
            if number in kept:
                hits += 1
                if not stays:
                    kept.move_to_end(number)
            elif len(kept) < capacity:
                kept[number] = None
            elif not stays:
                kept.popitem(last=False)
                kept[number] = None
    return hits / len(order[-1])


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_a_set_that_stays_finds_its_share_and_one_that_throws_out_the_least_recent_far_less(share):
    images = 4000
    orders = [Dice(1).permutation(f"epoch {epoch}", images).tolist() for epoch in range(2)]
    cache = cached(images, int(share * images))
    for order in orders:
        before = cache.statistics().hits
        cache.take(np.array(order))
    stays = (cache.statistics().hits - before) / images

    assert stays == share == found(orders, int(share * images), stays=True)
    least_recent = found(orders, int(share * images), stays=False)
    assert least_recent == pytest.approx(share + (1 - share) * math.log(1 - share), abs=0.02)


def test_images_that_do_not_fit_are_decoded_once_and_leave_no_file_behind(tmp_path):
    cache = cached(10, 4, tmp_path)
    for _ in range(3):
        assert np.array_equal(cache.take(np.arange(10)), pictures(range(10)))
    told = cache.statistics()

    assert (told.decoded, told.spilled, told.read_back, told.hits) == (10, 6, 12, 8)
    assert told.spilled_bytes == 6 * IMAGE_BYTES
    assert told.decode_s == 10
    assert list(tmp_path.iterdir()) == []
    cache.close()
    cache.close()


class Full(Scratch):
    """A disk with room for two images."""

    def write(self, offset, array):
        if offset >= 2 * IMAGE_BYTES:
            raise OSError(28, "No space left on device")
        super().write(offset, array)


class Broken(Scratch):
    """A disk that gives nothing back."""

    def read(self, offset, array):
        raise OSError(5, "Input/output error")


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_full_disk_ends_the_spilling_with_one_warning(tmp_path, caplog):
    cache = cached(10, 3, tmp_path, make_scratch=Full)
    for _ in range(3):
        assert np.array_equal(cache.take(np.arange(10)), pictures(range(10)))

    assert cache.statistics().spilled == 2
    assert cache.statistics().read_back == 4
    assert cache.statistics().decoded == 10 + 2 * 5
    (warning,) = warnings(caplog)
    assert "takes no more decoded images (No space left on device)" in warning
    cache.close()


def test_the_folder_of_the_scratch_file_is_made_if_it_is_missing(tmp_path):
    cache = cached(5, 1, tmp_path / "missing" / "too", make_scratch=Scratch)
    cache.take(np.arange(5))
    assert cache.statistics().spilled == 4
    cache.close()


@pytest.mark.parametrize("broken", ["no folder", "no reading"])
def test_a_disk_that_fails_is_done_without(tmp_path, caplog, broken):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "below" if broken == "no folder" else tmp_path
    cache = cached(5, 1, folder, make_scratch=Scratch if broken == "no folder" else Broken)
    for _ in range(3):
        assert np.array_equal(cache.take(np.arange(5)), pictures(range(5)))

    assert cache.statistics().spilled == cache.statistics().read_back == 0
    assert len(warnings(caplog)) == 1
    cache.close()

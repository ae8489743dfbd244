"""The statistics of data servers in answers and reports keep their names, and unset fields are left out."""

import msgspec

from adam_async.data_server.statistics import (
    CacheStatistics,
    DataStatistics,
    HostStatistics,
    StagingCounts,
    StagingStatistics,
    TransformStatistics,
)


def names(struct):
    return {field.encode_name for field in msgspec.structs.fields(struct)}


def test_the_report_has_the_names_that_readers_know():
    assert names(DataStatistics) == {
        "traffic",
        "process",
        "epoch",
        "groups",
        "finished",
        "drained",
        "clock",
        "images",
        "train_s",
        "skipped_groups",
        "loss",
        "leased",
        "returned",
        "late_reports",
        "skipped",
        "transforms",
        "cache",
        "term",
    }
    assert names(TransformStatistics) == {"late_answers", "pool"}
    assert names(HostStatistics) == {"traffic", "process", "serving"}
    assert names(StagingStatistics) == {"traffic", "process", "staging"}
    assert names(StagingCounts) == {
        "files",
        "kept_files",
        "source_files",
        "source_bytes",
        "copied_files",
        "copied_bytes",
        "retried",
    }


def test_images_that_no_cache_decodes_have_no_counts_of_decoding():
    counts = CacheStatistics(resident_images=2, resident_bytes=8)
    assert msgspec.json.decode(msgspec.json.encode(counts)) == {"resident_images": 2, "resident_bytes": 8}

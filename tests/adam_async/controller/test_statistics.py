"""The statistics of a controller in answers and reports keep their names, and unset fields are left out."""

import msgspec

from adam_async.controller.statistics import ControllerStatistics, GroupStatistics


def names(struct):
    return {field.encode_name for field in msgspec.structs.fields(struct)}


def test_the_report_has_the_names_that_readers_know():
    assert names(ControllerStatistics) == {"traffic", "process", "version", "controllers"}
    assert names(GroupStatistics) == {
        "group",
        "role",
        "term",
        "leader",
        "commit",
        "log",
        "voters",
        "learners",
    }


def test_a_controller_without_a_group_reports_no_term():
    counts = GroupStatistics(group="", role="founding")
    assert msgspec.json.decode(msgspec.json.encode(counts)) == {"group": "", "role": "founding"}

"""Reports side by side: a row for each quantity with a value."""

import msgspec

from adam_async.report.compare import compare
from tests.adam_async.reports import real_report


async def test_every_row_has_a_value_for_each_report() -> None:
    one = await real_report(epochs=1)
    two = await real_report(epochs=2, weights="copy", schedule="cosine", rate=0.05, warm_up=0.5)

    rows = {name: values for name, *values in compare([one, two])}

    assert all(len(values) == 2 for values in rows.values())
    assert rows["epochs"] == ["1", "2"]
    assert rows["consistency"] == ["asp", "asp"]
    assert rows["weights"] == ["aliased", "copy"]
    assert rows["rate"] == [f"{one.config['rate']:.4g}, cosine, warm-up 0.1", "0.05, cosine, warm-up 0.5"]
    assert rows["test accuracy"] == [f"{each.totals.test_accuracy:.2%}" for each in (one, two)]
    assert rows["staleness, mean / max"] == [
        f"{each.staleness.mean:.2f} / {each.staleness.max}" for each in (one, two)
    ]
    assert float(rows["sent, MB"][0]) < float(rows["sent, MB"][1])


async def test_rows_without_anything_to_say_are_left_out() -> None:
    report = await real_report(epochs=1)
    names = [row[0] for row in compare([report])]
    cut_short = msgspec.structs.replace(report, ended="interrupted", epochs=[])
    rows = {name: values for name, *values in compare([report, cut_short])}

    assert not {"ended", "efficiency", "push / pull every", "events"} & set(names)
    assert rows["ended"] == ["", "interrupted"]
    assert rows["train loss"][1] == ""


async def test_how_models_are_cut_stands_beside_those_that_are_not() -> None:
    whole, cut = await real_report(epochs=1), await real_report(epochs=1, partitions=2, halo="recompute")
    rows = {name: values for name, *values in compare([whole, cut])}

    assert rows["partitions"] == ["1", "2"]
    assert rows["plan"] == ["", "vertical, halo recompute"]
    assert "plan" not in [row[0] for row in compare([whole])]

"""Helpers for tests of reports: the report of a real run, a short one."""

from typing import Any

from adam_async.cluster.local import LocalCluster
from adam_async.report.report import Report, build_report
from adam_async.run.config import Config
from adam_async.runtime.machine import describe_machine
from tests.adam_async.runs import tiny_dataset


async def real_report(**options: Any) -> Report:
    """Train a little, and report it."""
    asked = Config(model="digits", threads=1, images_per_group=4, **options)
    async with LocalCluster(asked, dataset=tiny_dataset()) as cluster:
        return build_report(
            await cluster.train(),
            config=cluster.driver.config,
            command=["adam-async", "train"],
            machine=describe_machine(loop="asyncio"),
            baseline=None,
        )

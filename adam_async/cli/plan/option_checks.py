"""The checks of the options of `plan`, made before the modules of its work are imported."""

from adam_async.cli.option_checks import check_model_option, check_result, check_threads
from adam_async.cli.options import PlanOptions, check_within
from adam_async.cli.plan.link_speed import parse_bandwidth, parse_latency
from adam_async.data_server.sources.kinds import check_source
from adam_async.errors import ConfigError
from adam_async.run.config import MOST

MOST_PARTITIONS = 64
"""Maximum number of workers of a replica that `plan` compares."""


def check_plan(options: PlanOptions) -> None:
    """Check the options of `plan`.

    Raises:
        ConfigError: A value is wrong, two options contradict each other, or a file cannot be used.
        DataError: There are no data at ``--data``.
    """
    for option, value, least, most in (
        ("--partitions", options.partitions, 1, MOST_PARTITIONS),
        ("--images-per-group", options.images_per_group, 1, MOST["images_per_group"]),
        ("--in-flight", options.in_flight, 0, MOST["in_flight"]),
        ("--servers", options.servers, 1, MOST["servers"]),
    ):
        if value is not None:
            check_within(option, value, least, most)
    check_threads(options.threads)
    if options.halo != "auto" and options.plan == "layers":
        raise ConfigError(
            f"--halo {options.halo} belongs to plan vertical, not layers, which cuts no layer: leave it out, "
            "or give --plan vertical"
        )
    if options.bandwidth is not None:
        parse_bandwidth(options.bandwidth)
    if options.latency is not None:
        parse_latency(options.latency)
    check_result(options.json, "--json")
    check_source(options.data or "auto")
    check_model_option(options.model or "auto")

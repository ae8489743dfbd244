"""Lines of a role's log have time, level and node; as JSON each is one object."""

import json
import logging
import re

import pytest

from adam_async.cli.terminal import JsonLine, NodeLine, RoleLine, describe_logs, log_to_stderr, name_node

HOSTILE = "ps-0\x1b]0;owned\x07\nadam-async: forged"
TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


pytestmark = pytest.mark.usefixtures("no_handlers")


def test_a_line_of_a_role_has_time_level_and_node(capsys: pytest.CaptureFixture[str]) -> None:
    log_to_stderr(verbose=False, lines=RoleLine())
    logging.getLogger("adam_async.test").warning("before it has a name")
    name_node("ps-0")
    logging.getLogger("adam_async.test").error("lost %s", HOSTILE)

    first, second = capsys.readouterr().err.splitlines()
    assert re.fullmatch(f"{TIME} WARNING - before it has a name", first)
    assert second.endswith(r"Z ERROR   ps-0 lost ps-0\x1b]0;owned\x07\nadam-async: forged")


@pytest.mark.parametrize("lines", [NodeLine, RoleLine, JsonLine])
def test_a_line_names_its_node_once(lines: type[NodeLine], capsys: pytest.CaptureFixture[str]) -> None:
    log_to_stderr(verbose=True, lines=lines())
    name_node("ps-1")
    logger = logging.getLogger("adam_async.test")
    logger.info("ps-1 waits for the controller")
    logger.info("ps-1: the controller at tcp://a:1 leads")
    logger.info("ps-10 joined")
    logger.info("store 'ps-1' is open")

    found = capsys.readouterr().err.splitlines()
    texts = [json.loads(line)["message"] if lines is JsonLine else line for line in found]
    named = "ps-1 " if lines is RoleLine else ""
    for text, rest in zip(
        texts,
        (
            "waits for the controller",
            "the controller at tcp://a:1 leads",
            "ps-10 joined",
            "store 'ps-1' is open",
        ),
        strict=True,
    ):
        assert re.fullmatch(rf"({TIME} INFO    )?{named}{re.escape(rest)}", text)


def test_a_line_of_json_is_one_object_with_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    log_to_stderr(verbose=False, lines=JsonLine())
    name_node("worker-3")
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logging.getLogger("adam_async.test").exception("it failed")

    (line,) = capsys.readouterr().err.splitlines()
    said = json.loads(line)
    assert "\x1b" not in line
    assert said["time"].endswith("Z")
    assert (said["level"], said["node"], said["logger"]) == ("error", "worker-3", "adam_async.test")
    assert (said["message"], said["traceback"].endswith(HOSTILE)) == ("it failed", True)


@pytest.mark.parametrize(
    ("level", "verbose", "shown"),
    [
        (None, False, ["warning"]),
        (None, True, ["info", "warning"]),
        ("debug", False, ["debug", "info", "warning"]),
        ("error", True, []),
    ],
)
def test_the_level_decides_what_is_written(
    level: str | None, verbose: bool, shown: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    log_to_stderr(verbose=verbose, level=level)
    logger = logging.getLogger("adam_async.test")
    for name in ("debug", "info", "warning"):
        logger.log(logging.getLevelNamesMapping()[name.upper()], name)
    assert capsys.readouterr().err.splitlines() == shown


def test_a_line_of_json_has_role_run_and_stores_as_soon_as_they_are_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log_to_stderr(verbose=False, lines=JsonLine())
    logging.getLogger("adam_async.test").warning("early")
    describe_logs(lambda: {"role": "ps", "run": "driver-1/0", "stores": ["net"]})
    logging.getLogger("adam_async.test").warning("late")
    early, late = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert "run" not in early
    assert (late["role"], late["run"], late["stores"]) == ("ps", "driver-1/0", ["net"])

"""Errors of Ray have remedies.

tests/processes/test_launch_ray.py runs roles on real nodes of Ray.
"""

import sys

import pytest

from adam_async.errors import ConfigError
from adam_async.launch.ray import RayCluster, check_ray, last_line, refusal_text, require_ray
from adam_async.launch.ray_actor import CACHE, MOST_EVENTS, NODE_ADDRESS, RoleActor, check_version, own_words
from adam_async.run.config import Config


def test_a_missing_ray_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)

    with pytest.raises(ConfigError, match=r"of the extra `ray`: .*pip install .*\[ray\]"):
        require_ray()


async def test_a_cluster_without_ray_is_refused_as_it_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)

    with pytest.raises(ConfigError, match=r"of the extra `ray`: .*pip install .*\[ray\]"):
        async with RayCluster(Config()):
            raise AssertionError("the cluster opened")


@pytest.mark.parametrize("version", ["2.9.3", "2.59.1", "1.13.0", "0", "x.y"])
def test_an_old_ray_is_refused_with_the_oldest_version_that_will_do(version: str) -> None:
    with pytest.raises(ConfigError, match=rf"Ray {version}, older than 2\.60: .*pip install .*--upgrade"):
        check_ray(version)


@pytest.mark.parametrize("version", ["2.60.0", "2.61.0rc1", "3.0.0", "2.100"])
def test_a_newer_ray_is_accepted(version: str) -> None:
    check_ray(version)


@pytest.mark.parametrize(
    ("why", "cure"),
    [
        ("Could not find any running Ray instance.", "start one with `ray start --head`"),
        (
            "Version mismatch: The cluster was started with: Ray: 2.60.0",
            "the same versions of Ray and Python",
        ),
        ("Can't find a raylet on this machine", "make this machine a node: `ray start --address=h:1`"),
    ],
)
def test_a_refusal_of_ray_names_the_cure(why: str, cure: str) -> None:
    text = refusal_text("h:1", why)

    assert text.startswith(f"cannot join Ray at --address h:1: {why[:20]}")
    assert cure in text


def test_another_version_on_a_node_is_named_with_the_cure() -> None:
    with pytest.raises(
        ConfigError, match=r"node h of Ray has adam-async .* and the launching process '9\.9\.9'"
    ):
        check_version("9.9.9", "h")


def test_words_of_a_role_get_the_address_and_the_cache_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")

    words = own_words(
        ["ps", "--bind", NODE_ADDRESS, "--dir", f"{CACHE}/launch/x", "~/mine"], "tcp://10.0.0.2:0"
    )

    assert words == ["ps", "--bind", "tcp://10.0.0.2:0", "--dir", "/caches/adam-async/launch/x", "~/mine"]


def test_the_last_line_of_an_error_of_ray_is_short() -> None:
    assert last_line(RuntimeError("actor_id: 1\n\tpid: 2\n  The node is gone.\n")) == "The node is gone."
    assert last_line(RuntimeError("")) == "RuntimeError"
    assert len(last_line(RuntimeError("x" * 999))) == 200


async def test_an_actor_keeps_few_lines_that_its_launcher_does_not_read() -> None:
    actor = RoleActor()
    events = actor.events()
    for number in range(3 * MOST_EVENTS):
        actor._forward(f"ps-0 | line {number}")
    read = [await anext(events) for _ in range(MOST_EVENTS)]
    actor._forward("ps-0 | last")

    assert read[-1] == ("line", f"ps-0 | line {MOST_EVENTS - 1}")
    assert await anext(events) == ("line", f"{2 * MOST_EVENTS} lines are left out")
    assert await anext(events) == ("line", "ps-0 | last")
    await events.aclose()

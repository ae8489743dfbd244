"""Texts of `--slow` are read, or refused with the right form."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_async.errors import ConfigError
from adam_async.run.stragglers import (
    SlowLink,
    SlowNode,
    check_names,
    check_own,
    describe,
    pace_of,
    read_slow,
    slow_links,
    texts_for,
)

TEXTS = ("worker-1:0.2", "worker-0~worker-1:5ms", "worker-0~ps-0:500us+1ms")


def test_a_pace_and_links_are_read_with_their_units() -> None:
    assert read_slow(TEXTS) == [
        SlowNode(node="worker-1", pace=0.2),
        SlowLink(nodes=("worker-0", "worker-1"), delay_s=0.005, jitter_s=0.0),
        SlowLink(nodes=("worker-0", "ps-0"), delay_s=0.0005, jitter_s=0.001),
    ]
    assert read_slow(["a~b:.5s"]) == [SlowLink(nodes=("a", "b"), delay_s=0.5, jitter_s=0.0)]
    assert read_slow([" w:1 "]) == [SlowNode(node="w", pace=1.0)]
    assert read_slow([]) == []


@given(st.floats(1e-6, 1))
def test_any_share_is_read_as_it_is_written(share: float) -> None:
    assert read_slow([f"worker-0:{share!r}"]) == [SlowNode(node="worker-0", pace=share)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("worker-1", "slow 'worker-1' is not of the form NODE:SHARE, as in worker-1:0.2, or NODE~NODE:DELAY"),
        ("worker-1:fast", "is not of the form"),
        ("worker-1:-", "is not of the form"),
        ("worker-1:0", "the share of a core must be above 0 and at most 1, not 0"),
        ("worker-1:20", "not 20"),
        ("worker-1:5ms", "is not of the form"),
        ("a~b", "is not of the form"),
        ("a~b:5min", "worker-0~worker-1:5ms"),
        ("a~b:5", "slow 'a~b:5': 5 has no unit; write 5us, 5ms or 5s"),
        ("a~b:0.2+1ms", "0.2 has no unit; write 0.2us, 0.2ms or 0.2s"),
        ("a~b:5ms+1", "slow 'a~b:5ms+1': 1 has no unit; write 1us, 1ms or 1s"),
        ("a~b:-5ms", "is not of the form"),
        ("a~b~c:5ms", "is not of the form"),
        ("a~a:5ms", "slow 'a~a:5ms': a node has no link to itself; name two nodes"),
        ("a~b:0ms", "the delay must be above 0 and at most 1s"),
        ("a~b:1s+1us", "the delay must be above 0 and at most 1s"),
    ],
)
def test_text_of_another_form_is_refused_with_the_form(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as failure:
        read_slow([text])
    assert said in str(failure.value)


@pytest.mark.parametrize("texts", [("w:0.2", "w:0.3"), ("a~b:1ms", "b~a:2ms")])
def test_nodes_named_twice_are_refused(texts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"slow names (w|a and b) twice: name each once"):
        read_slow(texts)


def test_nodes_that_a_cluster_does_not_have_are_named_with_those_it_has() -> None:
    check_names(TEXTS, workers=2, servers=1)
    check_names(["controller~driver:1ms", "data-0~ps-1:1ms"], workers=1, servers=2)
    with pytest.raises(ConfigError, match=r"there is no worker 'worker-1' here; there are worker-0$"):
        check_names(TEXTS, workers=1, servers=1)
    with pytest.raises(
        ConfigError, match="no node 'ps-1' here; there are controller, driver, data-0, ps-0, "
    ):
        check_names(["ps-1~worker-0:1ms"], workers=1, servers=1)
    with pytest.raises(ConfigError, match="no worker 'ps-0' here"):
        check_names(["ps-0:0.5"], workers=1, servers=1)
    with pytest.raises(
        ConfigError, match="no node 'controller' here; there are controller-1, controller-2, "
    ):
        check_names(
            ["controller~driver:1ms"], workers=1, servers=1, controllers=["controller-1", "controller-2"]
        )


def test_each_node_is_told_what_concerns_it() -> None:
    assert texts_for(TEXTS, "worker-0") == [TEXTS[1], TEXTS[2]]
    assert texts_for(TEXTS, "worker-1") == [TEXTS[0], TEXTS[1]]
    assert texts_for(TEXTS, "ps-0") == [TEXTS[2]]
    assert texts_for(TEXTS, "data-0") == []
    assert (pace_of(TEXTS, "worker-1"), pace_of(TEXTS, "worker-0")) == (0.2, 1.0)
    assert [link.nodes for link in slow_links(TEXTS)] == [("worker-0", "worker-1"), ("worker-0", "ps-0")]


def test_a_role_started_alone_is_told_of_itself_only() -> None:
    check_own(["w:0.5", "w~ps-0:1ms"], "w", computes=True)
    with pytest.raises(ConfigError, match=r"--slow w:0\.5: this node is v \(see --id\)"):
        check_own(["w:0.5"], "v", computes=True)
    with pytest.raises(ConfigError, match=r"--slow p:0\.5: only workers have a pace; slow the links of p"):
        check_own(["p:0.5"], "p", computes=False)


def test_one_line_describes_the_stragglers() -> None:
    assert describe(TEXTS) == (
        "worker-1 computes 0.2 of the time, messages between worker-0 and worker-1 are 5 ms late, "
        "messages between worker-0 and ps-0 are 0.5 ms and up to 1 ms late"
    )
    assert describe([]) == ""

"""What was left open is explained, and nothing else."""

import msgspec
import pytest

from adam_async.config import Config
from adam_async.defaults import explain_defaults


def explained(asked: Config, **decided: object) -> dict[str, str]:
    config = msgspec.structs.replace(asked.decided(0), weights="copy")
    return explain_defaults(asked, msgspec.structs.replace(config, **decided), kernels="numba")


def test_only_what_was_left_open_is_explained() -> None:
    given = Config(
        rate=0.1,
        schedule="constant",
        momentum=0.5,
        threads=1,
        in_flight=2,
        weights="copy",
        protocol="delta",
        kernels="numpy",
    )

    assert explained(given) == {}
    assert explained(Config()).keys() == {
        "rate",
        "schedule",
        "momentum",
        "threads",
        "in_flight",
        "weights",
        "protocol",
        "kernels",
    }


def test_a_rate_says_from_how_many_images_it_comes_and_why_it_was_lowered() -> None:
    fresh, stale = Config(), Config().default_rate(groups_in_flight=4)

    assert "scaled to 16 and" in explained(fresh)["rate"]
    assert "lowered" not in explained(fresh)["rate"]
    assert "lowered from 0.06 because" in explained(fresh, rate=stale)["rate"]
    assert "scaled to 64 and" in explained(Config(consistency="bsp", replicas=4))["rate"]
    assert explained(Config(rule="adam"))["rate"].startswith("what rule adam begins with")


def test_the_rate_of_a_cut_model_falls_by_itself_and_says_why() -> None:
    cut = Config(partitions=2)

    assert cut.decided(8).schedule == "cosine"
    constant = Config(partitions=2, schedule="constant").default_rate(8)
    assert cut.decided(8).rate == pytest.approx(3.2 * constant)
    assert cut.decided(4).rate == pytest.approx(2 / 3 * Config().default_rate())
    assert cut.decided(8).warm_up == 1.0
    assert Config(partitions=2, epochs=1).decided(8).warm_up == pytest.approx(1 / 3)
    assert explained(cut)["schedule"].startswith("cosine after a short warm-up")
    for waits in (Config(partitions=2, consistency="bsp"), Config(replicas=2), Config()):
        assert waits.decided(8).schedule == "constant"
    assert Config(partitions=2, schedule="step").decided(8).schedule == "step"


def test_the_way_of_training_names_its_reason() -> None:
    assert explained(Config(), weights="aliased")["weights"].startswith("aliased: one process")
    assert explained(Config(processes=True))["weights"].endswith("a process of its own")
    assert "consistency ssp:4 decides" in explained(Config(consistency="ssp:4"))["weights"]
    assert "cannot be done in place" in explained(Config(push_every=2))["weights"]


def test_momentum_of_other_rules_is_not_explained() -> None:
    assert "momentum" not in explained(Config(rule="adagrad"))

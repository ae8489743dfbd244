"""Reasons of open options, and of no others."""

import msgspec

from adam_async.report.defaults import explain_defaults
from adam_async.run.config import Config
from adam_async.run.learning_rate import decide, default_rate


def explained(asked: Config, **decided: object) -> dict[str, str]:
    config = msgspec.structs.replace(decide(asked, 0), weights="copy")
    return explain_defaults(asked, msgspec.structs.replace(config, **decided), kernels="numba")


def test_only_open_options_are_explained() -> None:
    given = Config(
        epochs=2,
        rule="sgd",
        rate=0.1,
        copies=1,
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
        "epochs",
        "rule",
        "rate",
        "schedule",
        "momentum",
        "copies",
        "threads",
        "in_flight",
        "weights",
        "protocol",
        "kernels",
    }


def test_the_reason_of_a_rate_has_its_images_and_its_factors() -> None:
    fresh, stale = Config(), default_rate(Config(), groups_in_flight=4)

    assert "scaled to 16 and" in explained(fresh)["rate"]
    assert explained(fresh)["rate"].endswith("times 2, for it falls to nothing")
    assert "lowered from 0.12 because" in explained(fresh, rate=stale)["rate"]
    assert "scaled to 64 and" in explained(Config(consistency="bsp", replicas=4))["rate"]
    assert explained(Config(rule="adam"))["rate"].startswith("the default of rule adam")

    constant = Config(until_accuracy=0.99)
    assert explained(constant)["rate"].endswith("by 1 - momentum")
    assert "lowered from 0.06 because" in explained(constant, rate=default_rate(constant, 4))["rate"]


def test_the_reason_of_a_rate_names_large_bright_images() -> None:
    asked = Config()
    decided = decide(asked, 0, squared_norm=1000.0)

    text = explain_defaults(asked, decided, kernels="numba", squared_norm=1000.0)["rate"]

    assert "; times 0.1, because the images have more or brighter pixels than those of MNIST; times 2" in text
    assert "stale" not in text


def test_the_reason_of_a_schedule_names_its_fall() -> None:
    fresh, stale = explained(Config())["schedule"], explained(Config(), warm_up=1.0)["schedule"]
    assert fresh.startswith("cosine after a warm-up: steps that shrink to nothing")
    assert stale == f"{fresh}, and stale gradients upset the first ones"
    assert explained(Config(until_accuracy=0.99))["schedule"] == (
        "constant: a run that ends at an accuracy does not know its last epoch"
    )


def test_the_training_mode_has_its_reason() -> None:
    assert explained(Config(), weights="aliased")["weights"].startswith("aliased: one process")
    assert explained(Config(processes=True))["weights"].endswith("a process of its own")
    assert "consistency ssp:4 decides" in explained(Config(consistency="ssp:4"))["weights"]
    assert "excludes training in place" in explained(Config(push_every=2))["weights"]


def test_momentum_of_other_rules_is_not_explained() -> None:
    assert "momentum" not in explained(Config(rule="adagrad"))

"""Rules of users by import path: which servers apply which, and how a wrong path, file or constant ends."""

import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from adam_async.errors import ConfigError
from adam_async.model.rules import UserRule, rule_of
from adam_async.run.config import Config
from adam_async.run.user_rules import (
    RuleSource,
    allow_rules,
    digest_of,
    path_of_rule,
    record_of,
    rule_kind,
    rule_words,
    with_rule,
)
from tests.adam_async.rules import Means, Picky, Wrong

MEANS = "tests.adam_async.rules:Means"


def module(folder: Path, name: str, text: str) -> str:
    """Write a module; returns its name."""
    (folder / f"{name}.py").write_text(text)
    return name


RULE = """
from adam_async.model.rules import UserRule
class Mine(UserRule):
    by: float = 1.0
    def step(self, values, gradient, state, *, rate):
        return values - self.by * rate * gradient, state
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with modules of a test."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path


def test_a_record_has_all_that_a_server_without_the_code_needs() -> None:
    record = record_of(Means(rate=0.5, share=0.75))
    assert record.path == path_of_rule(Means) == MEANS
    assert record.digest == digest_of(Means)
    assert record.arrays == (("mean", 0.25),)
    assert msgspec.json.decode(record.constants) == {"share": 0.75, "first": 0.25}
    assert record.rate == 0.5


def test_a_server_makes_the_rule_of_a_record_that_it_allows() -> None:
    rule = Means(rate=0.5, share=0.75)
    assert allow_rules([MEANS]).rule_for(record_of(rule)) == rule
    assert RuleSource([Means]).rule_for(record_of(rule)) == rule


def test_a_rule_that_is_not_allowed_is_named_with_its_option_and_not_imported(folder: Path) -> None:
    module(folder, "a_trap", "raise AssertionError('imported')")
    forged = msgspec.structs.replace(record_of(Means()), path="a_trap:Means")
    with pytest.raises(
        ConfigError, match=r"does not allow rule a_trap:Means: .* with --allow-rule a_trap:Means, and"
    ):
        RuleSource([Means]).rule_for(forged)
    assert "a_trap" not in sys.modules
    # A class beside an allowed one is not allowed.
    with pytest.raises(ConfigError, match=r"--allow-rule tests\.adam_async\.rules:Picky"):
        RuleSource([Means]).rule_for(record_of(Picky()))


def test_another_file_is_named_with_both_digests(folder: Path) -> None:
    kind = rule_kind(f"{module(folder, 'changes', RULE)}:Mine")
    source, record = RuleSource([kind]), record_of(kind())
    module(folder, "changes", f"{RULE}\n# edited")
    with pytest.raises(ConfigError, match=rf"SHA-256 {record.digest[:12]} instead of {digest_of(kind)[:12]}"):
        source.rule_for(record_of(kind()))
    assert source.rule_for(record) == kind()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"constants": '{"share": 2.0}'}, "Means: share must be at least 0 and below 1, not 2.0"),
        ({"constants": '{"other": 1}'}, "Means has no constant 'other'; it has share, first, rate"),
        ({"constants": "[]"}, "its constants are no JSON object"),
        ({"constants": "{"}, "its constants are no JSON object"),
        ({"arrays": ()}, r"has the state arrays .*'mean', 0.25.* here, and its record \(\)"),
        ({"arrays": (("mean", 1.0),)}, "has the state arrays"),
    ],
)
def test_a_forged_record_of_an_allowed_rule_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        RuleSource([Means]).rule_for(msgspec.structs.replace(record_of(Means()), **changes))


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("nowhere:Lion", "there is no module 'nowhere'"),
        ("tests.adam_async.rules:Absent", "has no 'Absent'; it has"),
        ("tests.adam_async.rules:apply_means", "is no rule: expected a class that derives from UserRule"),
        ("tests.adam_async.rules:UserRule", "is no rule: expected a class that derives from UserRule"),
        ("adam_async.model.rules:Sgd", "is no rule: expected a class that derives from UserRule"),
        ("tests.adam_async.run.test_user_rules:Means", "define it: give tests.adam_async.rules:Means"),
        ("lion", "give package.module:Class"),
        ("os:system", "is no rule"),
    ],
)
def test_a_path_that_names_no_rule_is_refused_with_the_cause(path: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        allow_rules([path])


def test_a_module_that_fails_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"rule \(fails:Lion\): importing fails failed: ZeroDivisionError"):
        rule_kind(f"{module(folder, 'fails', '1 / 0')}:Lion")


def test_a_rule_that_servers_cannot_import_is_refused_with_the_cure() -> None:
    class Inner(UserRule):
        def step(self, values, gradient, state, *, rate):  # type: ignore[no-untyped-def]
            return values, state

    with pytest.raises(ConfigError, match="servers cannot import it: define it at the top of a module"):
        record_of(Inner())


def test_constants_without_a_form_in_json_are_refused(folder: Path) -> None:
    text = RULE.replace("by: float = 1.0", "by: object = 1.0")
    kind = rule_kind(f"{module(folder, 'odd', text)}:Mine")
    with pytest.raises(ConfigError, match="have no form in JSON"):
        record_of(kind(by=np.float32))
    with pytest.raises(ConfigError, match="make another rule"):
        record_of(kind(by=(1, 2)))


@pytest.mark.parametrize("body", ["1 / 0", "return 3", "return {'mean': 'x'}"])
def test_arrays_that_are_no_mapping_to_numbers_are_refused(folder: Path, body: str) -> None:
    name = f"arrays_{abs(hash(body))}"
    text = f"{RULE}    @property\n    def arrays(self):\n        {body}\n"
    with pytest.raises(ConfigError, match="arrays is no mapping of names to numbers"):
        record_of(rule_kind(f"{module(folder, name, text)}:Mine")())


def test_a_run_names_its_rule_and_gets_its_record() -> None:
    config = with_rule(Config(rule=MEANS, rule_args='{"share": 0.5, "rate": 0.125}'))
    assert rule_of(config) == record_of(Means(share=0.5, rate=0.125))
    assert with_rule(config) is config
    plain = Config(rule="adam")
    assert with_rule(plain) is plain


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rule": MEANS, "rule_args": "[]"}, "rule_args must be a JSON object"),
        ({"rule": MEANS, "rule_args": '{"share": 2}'}, "Means: share must be"),
        ({"rule": MEANS, "rule_args": '{"other": 2}'}, "Means has no constant 'other'"),
        ({"rule": MEANS, "momentum": 0.5}, "momentum=0.5 has no effect with rule=tests"),
        ({"rule": MEANS, "weights": "aliased"}, "weights=aliased excludes rule=tests"),
        ({"rule": "adam", "rule_args": "{}"}, "rule_args={} has no effect with rule=adam"),
        ({"rule": "lion"}, "rule must be auto, sgd, adagrad, adam, adamw, or package.module:Class"),
        ({"rule": "a b:Lion"}, "rule must be auto"),
        ({"rule": MEANS, "rule_record": "{}"}, "is no record"),
        ({"rule": "a:B", "rule_record": msgspec.json.encode(record_of(Means())).decode()}, "not of a:B"),
    ],
)
def test_options_that_contradict_a_rule_of_the_user_are_named(options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        with_rule(Config(**options))  # type: ignore[arg-type]


def test_words_of_a_server_allow_each_rule_once(tmp_path: Path) -> None:
    assert rule_words(["a:B", "c:D", "a:B"], [tmp_path]) == (
        *("--step-path", str(tmp_path), "--allow-rule", "a:B", "--allow-rule", "c:D"),
    )
    assert rule_words([], [tmp_path]) == ()


def test_a_rule_without_a_step_is_none() -> None:
    assert rule_kind(path_of_rule(Wrong)) is Wrong

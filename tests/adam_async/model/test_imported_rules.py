"""A rule of the user is checked at each call, and its record at each border."""

import msgspec
import numpy as np
import pytest

from adam_async.errors import ConfigError
from adam_async.model.rules import AnyRule, ImportedRule, Sgd, UserRule
from adam_async.model.rules.imported import RuleRefused, checked_step
from adam_async.option_types import fault_of_path
from tests.adam_async.rules import MISTAKES, SAID, Means, Wrong, apply_means

DIGEST = "0" * 64
RECORD = ImportedRule(
    path="lion:Lion", digest=DIGEST, arrays=(("mean", 0.5),), constants='{"decay":0.1}', rate=0.2
)


def test_a_step_gets_its_arrays_and_returns_new_ones():
    values, gradient = np.linspace(-1, 1, 5, dtype=np.float32), np.ones(5, np.float32)
    state = {"mean": np.full(5, 0.25, np.float32)}
    new, mean = checked_step(Means(), values, gradient, state, rate=0.5)
    wanted = apply_means(values, [gradient], rate=0.5)
    np.testing.assert_array_equal([new, mean], wanted)
    assert values[0] == -1
    assert (state["mean"] == 0.25).all()


@pytest.mark.parametrize("how", MISTAKES)
def test_each_mistake_is_named_and_changes_nothing(how):
    arrays = np.zeros(5, np.float32), np.ones(5, np.float32), np.zeros(5, np.float32)
    before = [array.copy() for array in arrays]
    values, gradient, kept = arrays
    with pytest.raises(RuleRefused) as refused:
        checked_step(Wrong(how=how), values, gradient, {"kept": kept}, rate=0.5)
    assert str(refused.value) == SAID[how]
    np.testing.assert_array_equal(arrays, before)


def test_every_mistake_has_its_words():
    assert MISTAKES.keys() == SAID.keys()


class Full(UserRule):
    def step(self, values, gradient, state, *, rate):
        raise MemoryError


def test_a_full_memory_is_no_refusal_because_other_copies_may_have_room():
    with pytest.raises(MemoryError):
        checked_step(Full(), np.zeros(1), np.zeros(1), {}, rate=0.5)


class Strict(UserRule):
    def step(self, values, gradient, state, *, rate):
        np.seterr(all="raise")
        return values + gradient, state


def test_a_rule_cannot_change_how_numpy_treats_the_sums_of_others():
    before = np.geterr()
    checked_step(Strict(), np.zeros(1), np.zeros(1), {}, rate=0.5)
    assert np.geterr() == before


@pytest.mark.parametrize("name", ["rate", "share"])
def test_constants_keep_the_bounds_of_their_class(name):
    with pytest.raises(ConfigError, match=f"Means: {name} must be"):
        Means(**{name: -1.0})


def test_a_record_travels_like_every_rule():
    text = msgspec.json.encode((RECORD, Sgd(momentum=0.5)))
    assert msgspec.json.decode(text, type=tuple[AnyRule, ...]) == (RECORD, Sgd(momentum=0.5))
    assert hash(RECORD) == hash(msgspec.json.decode(msgspec.json.encode(RECORD), type=AnyRule))
    assert (RECORD.name, RECORD.state_names, RECORD.scalar_names) == ("lion:Lion", ("mean",), ())
    assert RECORD.text == 'lion:Lion {"decay":0.1} (file 000000000000)'
    assert (RECORD.new_state((3,), np.float32)["mean"] == np.full(3, 0.5, np.float32)).all()
    assert not RECORD.is_plain


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("path", "lion", "give package.module:Class"),
        ("path", "../lion:Lion", "give package.module:Class"),
        ("path", "lion:Lion.step", "give package.module:Class"),
        ("path", f"{'a' * 256}:B", "path must have 0 to 256"),
        ("digest", "00", "expected 64 hexadecimal digits"),
        ("digest", "G" * 64, "expected 64 hexadecimal digits"),
        ("weight_decay", 0.1, "a constant of yours is in constants"),
        ("arrays", tuple((f"a{number}", 0.0) for number in range(9)), "arrays must have 0 to 8"),
        ("arrays", (("mean", 0.0), ("mean", 1.0)), "give each another name"),
        ("arrays", (("a b", 0.0),), "the name of a Python variable"),
        ("arrays", (("a" * 65, 0.0),), "the name of a Python variable"),
        ("arrays", (("mean", float("nan")),), "give a finite one"),
        ("arrays", (("mean", 1e300),), "give a finite one"),
        ("constants", '"' * 5000, "constants must have 0 to 4096"),
    ],
)
def test_a_record_out_of_bounds_is_refused_here_and_in_messages(field, value, said):
    with pytest.raises(ConfigError, match=said):
        msgspec.structs.replace(RECORD, **{field: value})
    forged = {**msgspec.to_builtins(RECORD), field: value}
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(forged, AnyRule)


def test_a_record_computes_nothing():
    with pytest.raises(ConfigError, match="its code is not here"):
        RECORD.apply(np.zeros(1), {}, np.zeros(1), rate=0.1, scratch=np.zeros(1))


def test_paths_of_rules_are_names_of_python():
    assert not fault_of_path("package.module:Class")
    for wrong in ("", ":", "a:", ":A", "a:A:B", "a b:C", "a/b:C", "a..b:C", "1:A"):
        assert fault_of_path(wrong)

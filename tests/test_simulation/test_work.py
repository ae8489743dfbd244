"""Work of a child process: seeds, one run with its trace, and a shrunk plan."""

import msgspec

from tests.simulation.runner import draw_case, run_case, run_seed
from tests.simulation.work import Answer, Repeat, Seeds, Shrink, Work, answers_to, do, shrink_case
from tests.test_simulation.toy import BROKEN, toy

SCENARIOS = {scenario.name: scenario for scenario in (toy(), BROKEN)}


def test_each_seed_is_answered_with_its_result() -> None:
    work = Seeds(scenario="toy", seeds=(3, 5))

    answers = list(do(work, SCENARIOS))

    assert len(answers) == answers_to(work)
    assert [answer.result for answer in answers] == [run_seed(toy(), 3), run_seed(toy(), 5)]


def test_a_run_is_repeated_with_its_trace() -> None:
    (answer,) = do(Repeat(case=draw_case(toy(), 3)), SCENARIOS)

    assert answer.result == run_seed(toy(), 3)
    assert answer.trace is not None
    assert answer.trace["otherData"]["replay_hash"] == answer.result.replay_hash


def test_a_broken_scenario_is_shrunk_to_the_one_fault_that_it_takes() -> None:
    for seed in range(3):
        case = draw_case(BROKEN, seed)
        assert len(case.plan.faults) == 8

        (answer,) = do(Shrink(case=case), SCENARIOS)

        (fault,) = answer.result.case.plan.faults
        assert (fault.kind, fault.targets) == ("kill", ("b",))
        assert fault.at_s <= 0.1
        assert (answer.result.invariant, answer.result.text) == ("I0", "b came back as 2")
        assert 0 < answer.tries <= 200
        assert run_case(BROKEN, answer.result.case).replay_hash == answer.result.replay_hash


def test_making_smaller_tells_after_each_run_how_far_it_has_come() -> None:
    told: list[Answer] = []

    (answer,) = do(Shrink(case=draw_case(BROKEN, 0)), SCENARIOS, report=told.append)

    assert [each.tries for each in told] == list(range(1, answer.tries + 1))
    assert all(each.under_way for each in told)
    assert not answer.under_way
    left = [len(each.result.case.plan.faults) for each in told]
    assert left == sorted(left, reverse=True)
    assert left[-1] == len(answer.result.case.plan.faults) == 1


def test_a_case_that_fails_no_more_is_left_as_it_is() -> None:
    case = draw_case(toy(), 3)

    answer = shrink_case(toy(), case)

    assert answer.result.ok
    assert answer.result.case == case


def test_work_and_answers_are_lines() -> None:
    case = draw_case(toy(), 0)

    for work in (Seeds(scenario="toy", seeds=(1, 2)), Repeat(case=case), Shrink(case=case, most_tries=5)):
        line = msgspec.json.encode(work)
        assert b"\n" not in line
        assert msgspec.json.decode(line, type=Work) == work
    (answer,) = do(Repeat(case=case), SCENARIOS)
    assert msgspec.json.decode(msgspec.json.encode(answer), type=Answer) == answer

"""Factors of a step with several rows for each image, from the step to the messages of its pushes."""

from itertools import pairwise

import numpy as np
import pytest

from adam_async.run.arrays import ArraySpec, Factors
from adam_async.run.partition import table_of
from adam_async.run.shard_table import assign_buckets
from adam_async.run.step_model import StepModel
from adam_async.run.train_step import Batch, Gradients, Metrics, StepOutcome, StepSpec
from adam_async.worker.gradient_clipping import gradient_norms
from adam_async.worker.push_plan import PushBuffer, plan_pushes

ROWS, GROUP = {"w": 3, "v": 1}, 4


class Rows:
    """A step of two matrices: `w` has up to three rows of factors for each image, `v` one."""

    arrays = {"w": ArraySpec((40, 30), "float64"), "v": ArraySpec((40, 30), "float64")}
    factors = ROWS

    def initial(self, seed: int) -> dict[str, np.ndarray]:
        return {name: np.zeros((40, 30)) for name in self.arrays}

    def step(self, values: dict[str, np.ndarray], batch: Batch, out: Gradients) -> StepOutcome:
        random = np.random.default_rng(batch.number)
        for name, rows in ROWS.items():
            count = len(batch) * rows - (rows > 1)  # fewer rows than the maximum
            out[name] = Factors(random.normal(size=(count, 30)), random.normal(size=(count, 40)))
        return StepOutcome(0.5, weight=len(batch))

    def evaluate(self, values: dict[str, np.ndarray], batch: Batch) -> Metrics:
        return {"accuracy": 0.0}


def trained(model: StepModel, images: int, number: int, factored: object = None) -> object:
    context = model.context(GROUP, factored)
    context.load(np.zeros((images, 1, 2, 2), np.uint8), np.zeros(images, np.int64), keys=(1, number))
    model.forward(model.initial(0), context)
    return context


def dense(model: StepModel, context: object, name: str) -> np.ndarray:
    out = np.empty((40, 30))
    model.deltas(context, {name: out})
    return out


@pytest.fixture
def model() -> StepModel:
    return StepModel(Rows(), StepSpec(name="rows", shape=(1, 2, 2), classes=2))


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("groups", [(GROUP, GROUP), (GROUP, 1), (2,)], ids=str)
def test_messages_of_factors_multiply_to_the_sum_of_the_gradients(model, groups, servers) -> None:
    table = table_of(model, shard_bytes=4 << 10)
    buckets = assign_buckets(table, [f"ps-{number}" for number in range(servers)])
    plan = plan_pushes(model, table, buckets, images=2 * GROUP, wanted="factors")
    assert plan.factor_rows == ROWS
    step, group = PushBuffer(model, plan, 2 * GROUP), PushBuffer(model, plan, GROUP)
    contexts = [trained(model, images, number) for number, images in enumerate(groups)]
    for _ in range(2):  # the second time over the values of the first
        step.clear()
        for context in contexts:
            group.fill(context)
            step.add(group)
    expected = {name: sum(dense(model, each, name) for each in contexts) for name in ROWS}

    found = {name: np.full(1200, np.nan) for name in ROWS}
    for index, message in enumerate(plan.messages):
        tensors = iter(step.tensors(index))
        for part in message.parts:
            inputs, errors = next(tensors), next(tensors)
            tensor = part.shards[0].tensor
            assert inputs.shape[1] == sum(groups) * ROWS[tensor]
            flat, at = (errors @ inputs.T).ravel(), 0
            for shard in part.shards:
                found[tensor][shard.start : shard.stop] = flat[at : at + shard.size]
                at += shard.size
    for name, gradient in expected.items():
        np.testing.assert_allclose(found[name].reshape(40, 30), gradient, rtol=0, atol=1e-9)
    for name, norm in gradient_norms(step).items():
        assert norm == pytest.approx(np.linalg.norm(expected[name]), rel=1e-12)


def test_each_array_travels_by_the_fewer_bytes_and_the_others_keep_no_factors(model) -> None:
    table = table_of(model, shard_bytes=1 << 20)
    buckets = assign_buckets(table, ["ps-0"])
    chosen = []
    for images in (1, 5, 6, 17, 18):
        plan = plan_pushes(model, table, buckets, images=images)
        chosen.append(frozenset(plan.factor_rows))
        context = trained(model, 1, 0, plan.factor_rows)
        assert context.gradients.factored == frozenset(plan.factor_rows)
        assert {name for name in ROWS if model.factors(context, name) is None} == set(ROWS) - chosen[-1]
        for name in ROWS:
            np.testing.assert_allclose(
                dense(model, context, name), dense(model, trained(model, 1, 0), name), rtol=0, atol=1e-12
            )
    # 1,200 values against 70 for each row: w travels as factors up to 5 images, v up to 17.
    assert chosen == [{"w", "v"}, {"w", "v"}, {"v"}, {"v"}, set()]
    assert all(later <= earlier for earlier, later in pairwise(chosen))

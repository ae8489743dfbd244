"""All parts of a cut network in one thread have the bits of parts that exchange messages."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adam_async.model import NAMED_MODELS, named_model
from adam_async.model.partition.joint import JointNetwork, runnable_order
from adam_async.model.partition.network import Partition
from tests.adam_async.model.parts import (
    DICE,
    EVERYTHING,
    KEYS,
    Parts,
    group_of,
    network_of,
    networks,
    plans_of,
    weights_of,
)

KERNELS = ("numpy", "numba")


def run_joint(joint, context, weights, images, labels):
    """Loss and gradients of one group."""
    context.load(images, labels, dice=DICE, keys=KEYS)
    loss = joint.forward(weights, context)
    joint.backward(weights, context)
    gradients = {}
    for parameter in joint.trained:
        gradients[parameter.name] = np.full(parameter.shape, np.nan, joint.dtype)
        joint.delta(context, parameter.name, out=gradients[parameter.name])
    return loss, gradients


def check_all_plans(network, workers, images):
    weights, group = weights_of(network), group_of(network, images)
    for plan in plans_of(network, workers).values():
        expected = Parts(network, plan, weights).run(*group)
        joint = JointNetwork(network, plan)
        context = joint.context(images + 2)
        run_joint(joint, context, weights, *group_of(network, images + 2, seed=2))

        loss, gradients = run_joint(joint, context, weights, *group)

        assert loss == expected.loss
        assert gradients.keys() == expected.gradients.keys()
        for name, found in gradients.items():
            assert found.tobytes() == expected.gradients[name].tobytes(), name


@pytest.mark.thorough
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("workers", [1, 2, pytest.param(4, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", NAMED_MODELS)
def test_joint_named_models_have_the_results_of_separate_parts(name, workers, kernels):
    check_all_plans(network_of(named_model(name), kernels), workers, images=3)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("workers", [2, 3])
def test_a_joint_network_of_all_layers_has_the_results_of_separate_parts(workers, kernels):
    check_all_plans(network_of(EVERYTHING, kernels), workers, images=5)


@pytest.mark.thorough
@settings(max_examples=30, deadline=None)
@given(spec=networks(), workers=st.integers(2, 4), images=st.integers(1, 4), kernels=st.sampled_from(KERNELS))
def test_joint_random_networks_have_the_results_of_separate_parts(spec, workers, images, kernels):
    check_all_plans(network_of(spec, kernels), workers, images)


@pytest.mark.parametrize("workers", [2, 3])
def test_factors_of_all_parts_multiply_to_the_gradient_of_the_whole_tensor(workers):
    network = network_of(EVERYTHING)
    weights, group = weights_of(network), group_of(network, 4)
    whole = network.context(4)
    for plan in plans_of(network, workers).values():
        joint = JointNetwork(network, plan)
        context = joint.context(6)
        _, gradients = run_joint(joint, context, weights, *group)
        for parameter in network.trained:
            found = joint.factors(context, parameter.name)
            assert (found is None) == (network.factors(whole, parameter.name) is None)
            if found is not None:
                x, errors = found
                np.testing.assert_allclose(errors.T @ x, gradients[parameter.name], rtol=1e-9, atol=1e-12)


def test_each_segment_runs_after_those_that_send_to_it():
    network = network_of(EVERYTHING)
    for plan in plans_of(network, 3).values():
        parts = [Partition(network, plan, worker) for worker in range(3)]
        sent = set()
        done = [0] * 3
        for worker, number in runnable_order(parts):
            assert number == done[worker]
            segment = parts[worker].segments[number]
            assert sent.issuperset(segment.receives)
            sent.update(segment.sends)
            done[worker] += 1
        assert done == [len(part.segments) for part in parts]

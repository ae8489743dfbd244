"""Modules of PyTorch as steps: their arrays, gradients, further tensors and errors."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Barrier, BrokenBarrierError, Lock

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed (extra torch)")

from torch import Tensor, nn
from torch.nn import functional

from adam_async.errors import ConfigError, StepFailed
from adam_async.run.step_model import StepModel
from adam_async.run.train_step import StepSpec
from adam_async.run.user_code import NamedStep
from adam_async.torch.step import TorchBatch, TorchStep
from tests.adam_async.torch.modules import (
    Characters,
    Residual,
    Tokens,
    characters_step,
    dropout_step,
    mlp,
    mlp_step,
    next_tokens,
    residual_step,
    token_loss,
)


def model_of(step: TorchStep) -> StepModel:
    """The step as its driver sees it."""
    return StepModel(step, NamedStep(step, "tests:step").spec({"shape": [1, 8, 8], "classes": 10}))


def images_of(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    images = random.integers(0, 256, (count, 1, 8, 8), np.uint8)
    return images, random.integers(0, 10, count, np.int64)


def gradients_of(
    step: TorchStep, values: dict[str, np.ndarray], images: np.ndarray, labels: np.ndarray
) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and dense gradients of a batch, as a worker computes them."""
    model = model_of(step)
    context = model.context(len(labels))
    context.load(images, labels, keys=(1, 0))
    loss = model.forward(values, context)
    found = {name: np.empty(spec.shape, spec.dtype) for name, spec in step.arrays.items()}
    model.deltas(context, found)
    return loss, found


def values_of(module: nn.Module) -> dict[str, np.ndarray]:
    return {name: p.detach().numpy().copy() for name, p in module.named_parameters() if p.requires_grad}


MODULES = {
    "mlp": (mlp, functional.cross_entropy, {}),
    "residual network": (lambda: Residual().double(), functional.cross_entropy, {}),
    "several rows per image": (Tokens, functional.cross_entropy, {}),
    "language model": (lambda: Characters().double(), token_loss, {"forward": next_tokens}),
}


@pytest.mark.parametrize("kind", MODULES)
def test_gradients_are_those_of_autograd(kind: str) -> None:
    make, loss_of, options = MODULES[kind]
    module = make()
    step = TorchStep(module, loss_of, **options)
    other = make()  # values that the module does not have
    images, labels = images_of(6)
    found_loss, found = gradients_of(step, values_of(other), images, labels)

    output = (
        next_tokens(other, type("Images", (), {"images": torch.from_numpy(images)}))
        if options
        else other(torch.from_numpy(images).double() / 255)
    )
    loss = loss_of(output, torch.from_numpy(labels))
    loss.backward()
    assert found_loss == pytest.approx(loss.item(), rel=1e-12)
    for name, gradient in found.items():
        expected = other.get_parameter(name).grad.numpy()
        np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-9)


def factors_of(step: TorchStep) -> dict[str, int]:
    step.prepare((1, 8, 8), 10)
    return dict(step.factors)


def test_linear_layers_have_factors_if_those_of_one_image_have_fewer_bytes() -> None:
    assert factors_of(mlp_step()) == {"1.weight": 1, "3.weight": 1}
    assert factors_of(TorchStep(Tokens, functional.cross_entropy)) == {"first.weight": 2, "second.weight": 2}
    wide = TorchStep(nn.Linear(8, 10), lambda output, labels: output.square().mean())  # 8 rows of each image
    assert factors_of(wide) == {}
    assert factors_of(characters_step()) == {}  # its only linear layer is tied
    assert factors_of(TorchStep(mlp, functional.cross_entropy, factors=False)) == {}


def test_weights_that_travel_as_deltas_get_dense_gradients_of_autograd() -> None:
    step = TorchStep(Tokens, functional.cross_entropy)
    model = model_of(step)
    values = step.initial(0)
    found = []
    for factored in ((), ("first.weight",), None):
        context = model.context(4, factored)
        context.load(*images_of(4), keys=(1, 0))
        model.forward(values, context)
        pair = model.factors(context, "first.weight")
        assert (pair is None) is (factored == ())
        if pair is not None:
            assert pair[0].shape == (8, 32)
        gradients = {name: np.empty(spec.shape, spec.dtype) for name, spec in step.arrays.items()}
        model.deltas(context, gradients)
        found.append(gradients)
    for gradients in found[1:]:
        for name, gradient in gradients.items():
            np.testing.assert_allclose(gradient, found[0][name], rtol=0, atol=1e-9)


def test_more_rows_than_in_the_trial_are_an_error_with_its_remedy() -> None:
    class Growing(Tokens):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.cat([x, x], 3) if x.any() else x)

    step = TorchStep(Growing, lambda output, labels: output.square().mean())
    with pytest.raises(ConfigError, match=r"'first.weight' got 16 rows for 4 images, and in the trial 2 for"):
        try:
            gradients_of(step, step.initial(0), *images_of(4))
        except StepFailed as error:
            raise error.__cause__ from None
    step = TorchStep(Growing, lambda output, labels: output.square().mean(), factors=False)
    assert all(gradient.any() for gradient in gradients_of(step, step.initial(0), *images_of(4))[1].values())


def test_a_weight_with_a_penalty_is_dense_and_whole() -> None:
    module = mlp()

    def penalised(module: nn.Module, batch: object) -> Tensor:
        return module(batch.scaled()) + module[1].weight.square().sum()

    step = TorchStep(module, lambda output, labels: output.square().sum(), forward=penalised)
    images, labels = images_of(4)
    _, found = gradients_of(step, values_of(module), images, labels)
    assert step.factors == {"3.weight": 1}
    output = module(torch.from_numpy(images).double() / 255) + module[1].weight.square().sum()
    output.square().sum().backward()
    np.testing.assert_allclose(found["1.weight"], module[1].weight.grad.numpy(), rtol=1e-9, atol=1e-9)


def test_a_step_changes_neither_values_nor_the_module() -> None:
    module = mlp()
    step = TorchStep(module, functional.cross_entropy)
    values = values_of(mlp())
    before = {name: value.copy() for name, value in values.items()}
    kept = {name: value.copy() for name, value in values_of(module).items()}
    gradients_of(step, values, *images_of(4))
    assert all(np.array_equal(values[name], before[name]) for name in values)
    assert all(np.array_equal(value, kept[name]) for name, value in values_of(module).items())


def test_first_values_are_those_of_a_module_or_of_the_seed() -> None:
    module = mlp()
    assert all(
        np.array_equal(value, values_of(module)[name])
        for name, value in TorchStep(module, functional.cross_entropy).initial(5).items()
    )
    step = mlp_step()
    torch.manual_seed(3)
    stream = torch.get_rng_state()
    first, again, other = step.initial(5), mlp_step().initial(5), step.initial(6)
    assert torch.equal(stream, torch.get_rng_state())
    assert np.array_equal(first["1.weight"], again["1.weight"])
    assert not np.array_equal(first["1.weight"], other["1.weight"])


# --- further tensors --------------------------------------------------------------------------------


def prepared(step: TorchStep, sample: int = 0) -> StepModel:
    model = model_of(step)
    if sample:
        model.take_sample(*images_of(sample, seed=1))
    return model


@pytest.mark.parametrize("make", [residual_step, characters_step, mlp_step])
def test_all_tensors_of_a_model_load_into_the_module(make: Callable[[], TorchStep]) -> None:
    step = make()
    tensors = prepared(step, 40).tensors(step.initial(0))
    fresh = {"residual_step": Residual, "characters_step": Characters, "mlp_step": mlp}[make.__name__]()
    fresh.load_state_dict({name: torch.from_numpy(each.copy()) for name, each in tensors.items()})


def test_running_statistics_are_means_over_the_sample_under_the_given_values() -> None:
    step = residual_step()
    assert step.sample > 0
    values = step.initial(4)
    tensors = prepared(step, 200).tensors(values)
    module = Residual()
    module.load_state_dict({name: torch.from_numpy(each.copy()) for name, each in tensors.items()})
    images = torch.from_numpy(images_of(200, seed=1)[0]) / 255
    hidden = module.stem(images)
    torch.testing.assert_close(module.norm.running_mean, hidden.mean((0, 2, 3)))
    torch.testing.assert_close(module.norm.running_var, hidden.var((0, 2, 3)))
    assert tensors["norm.num_batches_tracked"].shape == ()
    # Without a difference between the modes, the statistics are those of the images.
    before = module.train()(images)
    torch.testing.assert_close(module.eval()(images), before, rtol=0.02, atol=0.02)


def test_an_evaluation_uses_the_derived_statistics() -> None:
    step = residual_step()
    model = prepared(step, 200)
    tensors = model.tensors(step.initial(4))
    images, labels = images_of(64, seed=2)
    module = Residual().eval()
    module.load_state_dict({name: torch.from_numpy(each.copy()) for name, each in tensors.items()})
    right = (module(torch.from_numpy(images) / 255).argmax(1).numpy() == labels).sum()
    assert model.count_right(tensors, images, labels) == right


class Pretrained(Residual):
    """A network that keeps its running statistics in training."""

    def train(self, mode: bool = True) -> "Pretrained":
        super().train(mode)
        for part in self.modules():
            if isinstance(part, nn.BatchNorm2d):
                part.eval()
        return self


def test_a_module_without_running_statistics_needs_no_sample() -> None:
    assert mlp_step().sample == 0
    assert TorchStep(Pretrained(), functional.cross_entropy).sample == 0


# --- random numbers ---------------------------------------------------------------------------------


def test_dropout_depends_on_epoch_and_number_only() -> None:
    step = dropout_step()
    model = model_of(step)
    values, context = step.initial(0), model.context(4)

    def loss(epoch: int, number: int) -> float:
        context.load(*images_of(4), keys=(epoch, number))
        return model.forward(values, context)

    first = loss(1, 2)
    assert loss(1, 3) != first
    assert loss(2, 2) != first
    torch.manual_seed(9)
    assert loss(1, 2) == first
    assert not step.deterministic


def test_a_module_without_random_numbers_is_deterministic_and_leaves_the_stream() -> None:
    step = mlp_step()
    torch.manual_seed(9)
    state = torch.get_rng_state()
    gradients_of(step, step.initial(0), *images_of(4))
    assert step.deterministic
    assert torch.equal(state, torch.get_rng_state())
    residual = residual_step()
    residual.prepare((1, 8, 8), 10)
    assert residual.deterministic  # running statistics do not change gradients


def noise_of(stream: str, images: torch.Tensor) -> torch.Tensor:
    """Return noise for images from one of the random streams of the process."""
    if stream == "PyTorch":
        return torch.rand_like(images)
    if stream == "Python":
        return torch.full_like(images, random.random())
    return torch.from_numpy(np.random.random(images.shape)).to(images.dtype)


def test_draws_of_threads_at_the_same_time_are_those_of_one_thread_after_another() -> None:
    met = Barrier(2)

    def forward(module: nn.Module, batch: TorchBatch) -> Tensor:
        if batch.epoch:
            with suppress(BrokenBarrierError):
                met.wait(0.1)  # the other thread, if it also draws now
        return module(batch.scaled() + torch.rand(batch.images.shape).double())

    step = TorchStep(mlp, functional.cross_entropy, forward=forward)
    model, (images, labels) = model_of(step), images_of(4)
    values = model.initial(0)

    def loss_of(number: int) -> float:
        context = model.context(len(labels))
        context.load(images, labels, keys=(1, number))
        return model.forward(values, context)

    expected = [loss_of(0), loss_of(1)]
    met.reset()
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(loss_of, range(2))) == expected


@pytest.mark.parametrize("stream", ["PyTorch", "Python", "NumPy"])
def test_draws_from_any_stream_of_the_process_depend_on_epoch_and_number_and_bar_a_record(stream) -> None:
    def forward(module: nn.Module, batch: TorchBatch) -> torch.Tensor:
        return module(batch.scaled() + noise_of(stream, batch.images.float()))

    def make() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    step = TorchStep(make, functional.cross_entropy, forward=forward)
    before = (random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().tolist())
    step.prepare((1, 8, 8), 10)
    assert before == (random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().tolist())
    assert not step.deterministic
    model = model_of(step)
    values, context = step.initial(0), model.context(4)

    def loss(epoch: int, number: int) -> float:
        context.load(*images_of(4), keys=(epoch, number))
        return model.forward(values, context)

    first = loss(1, 2)
    assert loss(1, 3) != first
    noise_of(stream, torch.zeros(3))
    assert loss(1, 2) == first


@pytest.mark.parametrize("stream", ["PyTorch", "Python", "NumPy"])
def test_a_module_made_from_any_stream_of_the_process_depends_on_the_seed_only(stream) -> None:
    def make() -> nn.Module:
        module = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        module[1].weight.data = noise_of(stream, module[1].weight.data)
        return module

    one, other = (TorchStep(make, functional.cross_entropy) for _ in range(2))
    np.testing.assert_array_equal(one.initial(3)["1.weight"], other.initial(3)["1.weight"])
    assert (one.initial(3)["1.weight"] != one.initial(4)["1.weight"]).any()


def test_buffers_that_training_changes_are_named_and_make_a_module_not_deterministic(
    caplog: pytest.LogCaptureFixture,
) -> None:
    module = nn.Sequential(nn.Flatten(), nn.utils.parametrizations.spectral_norm(nn.Linear(64, 10)))
    step = TorchStep(module, functional.cross_entropy)
    step.prepare((1, 8, 8), 10)
    assert not step.deterministic
    assert "training changes buffers 1.parametrizations.weight.0._u" in caplog.text


# --- errors -----------------------------------------------------------------------------------------


class Bad(nn.Module):
    """A module with one mistake."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.passes = 0
        self.embed = nn.Embedding(2, 4)
        self.layer = nn.Linear(64, 10)
        self.spare = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        if self.how == "replaced":
            self.spare = nn.Parameter(torch.zeros(3))
        if self.how == "sparse":
            hidden = functional.embedding(x.flatten(1).long(), self.embed.weight, sparse=True)
        else:
            hidden = self.embed(x.flatten(1).long())
        output = self.layer(x.flatten(1)) + hidden.sum()
        if self.how != "unused":
            output = output + self.spare.sum()
        match self.how:
            case "in place":
                with torch.no_grad():
                    self.layer.bias.clamp_(-1, 1)
            case "data in place":
                self.layer.bias.data.clamp_(-1e-6, 1e-6)
            case "new shape":
                self.spare.data = torch.zeros(4)
        return output


MISTAKES = {
    "replaced": r"parameter 'spare' got no gradient: .*a forward pass must not replace",
    "sparse": r"parameter 'embed\.weight' has a gradient of layout torch\.sparse_coo.*sparse=False",
    "in place": r"parameter 'layer\.bias' was changed in place by the module, but only the servers' rule",
    "data in place": r"parameter 'layer\.bias' was changed in place by the module",
    "new shape": r"parameter 'spare' changed its shape from \(3,\) to \(4,\): keep the shapes",
}


@pytest.mark.parametrize("how", MISTAKES)
def test_a_mistake_in_a_pass_names_parameter_and_remedy(how: str) -> None:
    module = Bad(how)
    with pytest.raises(ConfigError, match=MISTAKES[how]):
        model_of(TorchStep(module, functional.cross_entropy))


def test_a_parameter_without_gradient_is_an_error_before_the_run() -> None:
    with pytest.raises(ConfigError, match=r"'spare' got no gradient: .*requires_grad_\(False\).*unused=True"):
        model_of(TorchStep(Bad("unused"), functional.cross_entropy))


def test_unused_parameters_get_zero_gradients_if_they_are_allowed() -> None:
    step = TorchStep(Bad("unused"), functional.cross_entropy, unused=True)
    _, found = gradients_of(step, step.initial(0), *images_of(4))
    assert np.array_equal(found["spare"], np.zeros(3))
    assert found["layer.weight"].any()


class Locked(nn.Linear):
    """A module with an attribute that cannot be copied."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.lock = Lock()


CANNOT = {
    "lock": (Locked, "module Locked cannot be copied for a compute thread .*keep no locks"),
    "frozen": (lambda: nn.Linear(2, 2).requires_grad_(False), r"all 2 parameters.*requires_grad_\(True\)"),
    "complex": (lambda: nn.Linear(2, 2, dtype=torch.complex64), "'weight' has complex values"),
    "buffer": (lambda: half_buffer(), "buffer 'mask' has values of type torch.bfloat16"),
    "two types": (lambda: Mixed(), "give all arrays one"),
    "no module": (lambda: 3, "returned a int: return a torch.nn.Module"),
}


class Mixed(nn.Module):
    """A module with parameters of two types."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 2), nn.Linear(2, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.one(x.float()).double())


def half_buffer() -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_buffer("mask", torch.ones(2, dtype=torch.bfloat16))
    return module


@pytest.mark.parametrize("kind", CANNOT)
def test_a_module_that_cannot_be_trained_is_refused(kind: str) -> None:
    make, text = CANNOT[kind]
    with pytest.raises(ConfigError, match=text):
        model_of(TorchStep(make, lambda output, labels: output.square().mean()))


def test_images_that_the_module_cannot_take_are_an_error_before_the_run() -> None:
    with pytest.raises(ConfigError, match=r"fails on 2 images of shape \(3, 32, 32\).*that converts"):
        mlp_step().prepare((3, 32, 32), 10)


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (lambda output, labels: output.square(), r"the loss is a shape \(2, 10\): return a scalar"),
        (lambda output, labels: 0.5, "the loss is a float: return a scalar tensor"),
        (lambda output, labels: output.detach().sum(), "that depends on the parameters"),
    ],
)
def test_a_loss_that_is_no_scalar_is_an_error(loss: Callable[..., object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        TorchStep(mlp, loss).prepare((1, 8, 8), 10)


def test_an_evaluation_without_accuracy_is_an_error() -> None:
    step = TorchStep(Characters, token_loss, forward=next_tokens)
    model = prepared(step)
    with pytest.raises(StepFailed, match="without accuracy: return"):
        model.count_right(model.tensors(step.initial(0)), *images_of(4))


def test_other_constants_than_those_of_the_driver_are_refused() -> None:
    step, other = TorchStep(Residual(), functional.cross_entropy), Residual()
    with torch.no_grad():
        other.shift.add_(torch.linspace(-0.1, 0.1, 8).reshape(8, 1, 1))
    spec = StepSpec(name="s", shape=(1, 8, 8), classes=10, constants=step.constants)
    StepModel(TorchStep(Residual(), functional.cross_entropy), spec)
    with pytest.raises(ConfigError, match="tensor 'shift' differs from that of the run's driver"):
        StepModel(TorchStep(other, functional.cross_entropy), spec)

"""Factors of linear layers against dense gradients."""

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed (extra torch)")

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from adam_async.errors import ConfigError, StoreError
from adam_async.torch.factors import LinearFactors, linear_weights


class Checkpointed(nn.Module):
    """A layer whose activations are computed again in the backward pass."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.layer = nn.Linear(5, 5)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(
            lambda y: torch.tanh(self.layer(torch.tanh(y))), self.first(x), use_reentrant=self.reentrant
        )
        return found


class Twice(nn.Module):
    """One layer, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(torch.tanh(self.layer(x)))
        return found


def sequence() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5, bias=False), nn.LayerNorm(5))


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "two layers": (sequence, (4, 6)),
    "three axes": (sequence, (4, 3, 6)),
    "one axis": (sequence, (6,)),
    "first layer without bias": (lambda: nn.Linear(6, 3, bias=False), (4, 6)),
    "change in place behind it": (
        lambda: nn.Sequential(nn.Linear(6, 5, bias=False), nn.ReLU(inplace=True), nn.Linear(5, 2)),
        (4, 6),
    ),
    "called twice": (Twice, (4, 6)),
    "checkpoint": (lambda: Checkpointed(reentrant=False), (4, 6)),
    "reentrant checkpoint": (lambda: Checkpointed(reentrant=True), (4, 6)),
}


def dense_gradients(module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    module.zero_grad()
    module(x).pow(3).sum().backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", MODULES)
def test_factors_multiply_to_the_dense_gradient(kind: str) -> None:
    torch.manual_seed(1)
    make, shape = MODULES[kind]
    module = make().double()
    x = torch.randn(shape, dtype=torch.float64)
    expected = dense_gradients(module, x)
    module.zero_grad()
    with LinearFactors(module) as factors:
        module(x).pow(3).sum().backward()
        found = factors.take()
    assert set(found) == set(linear_weights(module))
    for name, parameter in module.named_parameters():
        if name in found:
            assert parameter.grad is None  # the dense gradient was not computed
            pair = found[name].factors()
            assert abs(pair.errors.T @ pair.activations - expected[name].numpy()).max() <= 1e-9
            assert torch.allclose(found[name].dense(), expected[name], rtol=0, atol=1e-9)
        else:
            assert parameter.grad is not None
            assert torch.allclose(parameter.grad, expected[name], rtol=0, atol=1e-9)


def test_after_close_gradients_are_dense_again() -> None:
    module = sequence().double()
    x = torch.randn(4, 6, dtype=torch.float64)
    expected = dense_gradients(module, x)
    with LinearFactors(module):
        pass
    assert all(torch.equal(gradient, expected[name]) for name, gradient in dense_gradients(module, x).items())


def test_several_passes_stack_their_rows() -> None:
    module = nn.Linear(6, 5).double()
    first, second = torch.randn(4, 6, dtype=torch.float64), torch.randn(2, 6, dtype=torch.float64)
    with LinearFactors(module) as factors:
        module(first).pow(2).sum().backward()
        module(second).pow(2).sum().backward()
        (gradient,) = factors.take().values()
        assert not factors.take()
    module.zero_grad()
    (module(first).pow(2).sum() + module(second).pow(2).sum()).backward()
    assert gradient.rows == 6
    assert torch.allclose(gradient.dense(), module.weight.grad, rtol=0, atol=1e-9)


def test_a_penalty_on_the_weight_is_part_of_the_gradient() -> None:
    module = nn.Linear(6, 5).double()
    x = torch.randn(4, 6, dtype=torch.float64)
    (module(x).sum() + module.weight.pow(2).sum()).backward()
    expected = module.weight.grad
    module.zero_grad()
    with LinearFactors(module) as factors:
        (module(x).sum() + module.weight.pow(2).sum()).backward()
        gradient = factors.take()["weight"]
    assert not gradient.fewer
    assert torch.allclose(gradient.dense(), expected, rtol=0, atol=1e-9)
    with pytest.raises(ConfigError, match="use `dense`"):
        gradient.factors()


@pytest.mark.parametrize(("rows", "fewer"), [(23, True), (24, False)])
def test_factors_are_fewer_values_up_to_a_number_of_rows(rows: int, fewer: bool) -> None:
    module = nn.Linear(40, 60)  # 24 * (40 + 60) = 40 * 60
    with LinearFactors(module) as factors:
        module(torch.zeros(rows, 40)).sum().backward()
        assert factors.take()["weight"].fewer is fewer


def test_a_layer_that_is_not_called_has_no_factors() -> None:
    module = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    with LinearFactors(module) as factors:
        module[0](torch.zeros(2, 3)).sum().backward()
        assert list(factors.take()) == ["0.weight"]


def test_a_pass_without_gradients_captures_nothing_and_leaves_the_weight() -> None:
    module = nn.Linear(3, 3)
    with LinearFactors(module) as factors:
        with torch.no_grad():
            module(torch.zeros(2, 3))
        assert not factors.take()
    assert module.weight.requires_grad


def test_a_failed_pass_leaves_the_weight() -> None:
    module = nn.Linear(3, 3)
    with LinearFactors(module) as factors:
        with pytest.raises(RuntimeError, match="shapes"):
            module(torch.zeros(2, 4))
        assert module.weight.requires_grad
        module(torch.zeros(2, 3)).sum().backward()
        assert factors.take()


def test_clear_forgets_factors() -> None:
    module = nn.Linear(3, 3)
    with LinearFactors(module) as factors:
        module(torch.zeros(2, 3)).sum().backward()
        factors.clear()
        assert not factors.take()


def remove_by_optimizer(module: nn.Module) -> None:
    torch.optim.SGD(module.parameters()).zero_grad(set_to_none=False)


def remove_one_by_one(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad = None


def remove_in_place(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


def clip(module: nn.Module) -> None:
    nn.utils.clip_grad_norm_(module.parameters(), 1e-3)


REMOVALS: dict[str, Callable[[nn.Module], object]] = {
    "module": nn.Module.zero_grad,
    "zeros": lambda module: module.zero_grad(set_to_none=False),
    "wrapper": lambda module: nn.Sequential(module).zero_grad(),
    "optimizer": remove_by_optimizer,
    "one by one": remove_one_by_one,
    "in place": remove_in_place,
}


@pytest.mark.parametrize("with_penalty", [False, True], ids=["plain", "penalty"])
@pytest.mark.parametrize("remove", REMOVALS.values(), ids=REMOVALS)
def test_gradients_that_the_program_removes_take_their_factors_along(remove, with_penalty) -> None:
    module, x = nn.Linear(6, 5, bias=False), torch.randn(2, 6)

    def backward(rows: torch.Tensor) -> None:
        penalty = module.weight.square().sum() if with_penalty else 0.0
        (module(rows).square().sum() + penalty).backward()

    backward(x)
    expected, module.weight.grad = module.weight.grad.clone(), None
    with LinearFactors(module) as factors:
        for _ in range(3):
            backward(100 * x)
            remove(module)
            backward(x)
            torch.testing.assert_close(factors.take()["weight"].dense(), expected)
            assert module.weight.grad is None
        backward(100 * x)
        remove(module)
        assert not factors.take()


def test_gradients_that_are_summed_and_not_changed_by_clipping_keep_their_factors() -> None:
    module, x = nn.Linear(6, 5, bias=False), torch.randn(2, 6)
    module(x).square().sum().backward()
    expected, module.weight.grad = 2 * module.weight.grad, None
    with LinearFactors(module) as factors:
        for _ in range(2):
            for _ in range(2):
                module(x).square().sum().backward()
                clip(module)
            found = factors.take()["weight"]
            assert found.rest is None
            torch.testing.assert_close(found.dense(), expected)


def unscale(module: nn.Module) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    scaler.unscale_(torch.optim.SGD(module.parameters()))


def replace_scaled(module: nn.Module) -> None:
    module.weight.grad = module.weight.grad / 2


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "unscaled": unscale,
    "less": lambda module: module.weight.grad.mul_(0.5),
    "more": lambda module: module.weight.grad.mul_(1e6),
    "negated": lambda module: module.weight.grad.neg_(),
    "replaced": replace_scaled,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_gradient_that_the_program_scales_without_its_factors_is_refused(change) -> None:
    module, x = nn.Linear(6, 5, bias=False), torch.randn(2, 6)
    with LinearFactors(module) as factors:
        for _ in range(2):
            module(x).square().sum().backward()
            change(module)
            with pytest.raises(StoreError, match=r"of parameter 'weight' was changed .* factors=False"):
                factors.take()
            module.zero_grad()
            module(x).square().sum().backward()
            assert factors.take()["weight"].rest is None


def test_a_callback_has_the_names_in_the_order_of_the_backward_pass() -> None:
    module = sequence()
    captured: list[str] = []
    with LinearFactors(module, on_captured=captured.append):
        module(torch.zeros(2, 6)).sum().backward()
    assert captured == ["2.weight", "0.weight"]


def test_tied_weights_subclasses_and_frozen_weights_stay_dense() -> None:
    tied = nn.ModuleDict({"in": nn.Embedding(5, 3), "out": nn.Linear(3, 5), "free": nn.Linear(3, 3)})
    tied["out"].weight = tied["in"].weight
    assert list(linear_weights(tied)) == ["free.weight"]
    assert not linear_weights(nn.MultiheadAttention(4, 2))  # uses the weight of its subclass outside of it
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    assert not linear_weights(normed)
    frozen = nn.Linear(3, 3)
    frozen.weight.requires_grad_(False)
    assert not linear_weights(frozen)


def test_only_named_weights_are_captured() -> None:
    module = sequence()
    with LinearFactors(module, ["2.weight"]) as factors:
        module(torch.zeros(2, 6)).sum().backward()
        assert factors.names == ("2.weight",)
        assert list(factors.take()) == ["2.weight"]
    assert module[0].weight.grad is not None


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"'1\.weight' is not the weight of a plain nn\.Linear"):
        LinearFactors(sequence(), ["1.weight"])


def test_inputs_changed_in_place_are_an_error() -> None:
    module = nn.Linear(3, 3)
    x = torch.zeros(2, 3)
    with LinearFactors(module):
        loss = module(x).sum()
        x.add_(1)
        with pytest.raises(ConfigError, match="'weight' were changed in place"):
            loss.backward()


def test_gradients_of_gradients_are_an_error() -> None:
    module = nn.Linear(3, 3)
    x = torch.zeros(2, 3, requires_grad=True)
    with LinearFactors(module), pytest.raises(ConfigError, match="gradients of gradients"):
        torch.autograd.grad(module(x).pow(2).sum(), x, create_graph=True)


def test_half_precision_in_autocast_gives_factors_of_the_parameter_type() -> None:
    module = nn.Linear(3, 3)
    with LinearFactors(module) as factors:
        with torch.autocast("cpu", torch.bfloat16):
            loss = module(torch.ones(2, 3)).sum()
        loss.backward()
        pair = factors.take()["weight"].factors()
    assert pair.activations.dtype == pair.errors.dtype == "float32"


def test_autograd_grad_and_chosen_inputs_leave_the_factors_alone() -> None:
    layer, x = nn.Linear(6, 3), torch.randn(4, 6, requires_grad=True)
    with LinearFactors(layer) as factors:
        torch.autograd.grad(layer(x).sum(), x)
        layer(x).sum().backward(inputs=[layer.bias])
        (of_weight,) = torch.autograd.grad(layer(x).sum(), layer.weight)
        assert not factors.take()
        layer(x).sum().backward()
        captured = factors.take()["weight"].dense()
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    torch.testing.assert_close(captured, layer.weight.grad)
    torch.testing.assert_close(of_weight, layer.weight.grad)


@pytest.mark.parametrize("again", ["backward", "take"])
def test_a_spent_gradient_is_removed_before_its_next_use(again: str) -> None:
    layer, x = nn.Linear(6, 3), torch.randn(4, 6)
    with LinearFactors(layer) as factors:
        for remove in (
            layer.zero_grad,
            lambda: layer.zero_grad(set_to_none=False),
            factors.clear,
            lambda: setattr(layer.weight, "grad", None),
        ):
            layer(x).sum().backward()
            assert factors.take(spend=True)["weight"].rest is None
            remove()
            assert not factors.take(spend=True)
        layer(x).sum().backward()
        factors.take(spend=True)
        with pytest.raises(StoreError, match=r"'weight' was not removed .*: call zero_grad\(\) before"):
            layer(x).sum().backward() if again == "backward" else factors.take(spend=True)

"""Modules of PyTorch for tests of steps, on images of 8 x 8 pixels, and the factories of their steps."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from adam_async.data_server.dataset import Dataset
from adam_async.torch.datasets import from_torch
from adam_async.torch.step import TorchBatch, TorchStep


def mlp(dtype: torch.dtype = torch.float64) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10)).to(dtype)


def ones() -> nn.Module:
    """A module whose gradient is 1 everywhere, whatever its values are."""
    module = nn.Linear(8, 4, bias=False).double()
    nn.init.zeros_(module.weight)
    return module


X = torch.ones(1, 8, dtype=torch.float64)
"""Input of `ones`."""


def steps(module: nn.Module, optimizer: torch.optim.Optimizer, number: int = 1) -> None:
    """Train `ones` for some steps."""
    for _ in range(number):
        optimizer.zero_grad()
        module(X).sum().backward()
        optimizer.step()


class Residual(nn.Module):
    """A small residual network with batch normalisation, a frozen scale and a constant buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.block = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
            nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8),
        )  # fmt: skip
        self.head = nn.Linear(8 * 16, 10)
        self.scale = nn.Parameter(torch.ones(8, 1, 1), requires_grad=False)
        self.register_buffer("shift", torch.full((8, 1, 1), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.norm(self.stem(x)))
        x = functional.relu(x + self.block(x)) * self.scale + self.shift
        found: Tensor = self.head(functional.avg_pool2d(x, 2).flatten(1))
        return found


class Tokens(nn.Module):
    """A network in float64 whose linear layers get two rows of each image."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.second = nn.Linear(32, 20, bias=False)
        self.register_buffer("mix", torch.linspace(-1, 1, 200).reshape(20, 10))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(1).unflatten(1, (-1, 32))
        found: Tensor = self.second(torch.tanh(self.first(rows))).mean(1) @ self.mix
        return found


def normalised() -> nn.Module:
    """A small network with batch normalisation that trains fast."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10)
    )


class Characters(nn.Module):
    """A language model over the bytes of an image, with one matrix for both embeddings."""

    def __init__(self, tokens: int = 16, width: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.recur = nn.GRU(width, width, batch_first=True)
        self.score = nn.Linear(width, tokens, bias=False)
        self.score.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.score(self.recur(self.embed(tokens))[0])
        return found


def next_tokens(module: nn.Module, batch: TorchBatch) -> tuple[Tensor, Tensor]:
    """Scores (N, T - 1, tokens) and targets (N, T - 1) of the positions of each image."""
    tokens = batch.images.flatten(1).long() // 16
    return module(tokens[:, :-1]), tokens[:, 1:]


def token_loss(output: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    scores, targets = output
    return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


def token_metrics(output: tuple[Tensor, Tensor], labels: Tensor) -> dict[str, float]:
    scores, targets = output
    return {"accuracy": float((scores.argmax(-1) == targets).double().mean())}


def mlp_step() -> TorchStep:
    return TorchStep(mlp, functional.cross_entropy)


def residual_step() -> TorchStep:
    return TorchStep(Residual, functional.cross_entropy)


def normalised_step() -> TorchStep:
    return TorchStep(normalised, functional.cross_entropy)


def dropout_step() -> TorchStep:
    def make() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Dropout(0.5), nn.Linear(16, 10))

    return TorchStep(make, functional.cross_entropy)


def characters_step() -> TorchStep:
    return TorchStep(Characters, token_loss, token_metrics, forward=next_tokens)


async def random_images() -> Dataset:
    """60 images of 10 classes, of which 6 are for tests."""
    torch.manual_seed(0)
    return await from_torch(TensorDataset(torch.rand(60, 1, 8, 8), torch.arange(60) % 10), name="random")

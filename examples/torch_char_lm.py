"""A character language model in PyTorch, trained on the standard library's documentation through a server.

    python examples/torch_char_lm.py [tcp://HOST:PORT]

With a controller's address several processes share the store.
"""

import importlib
import inspect
import sys

import torch
from torch import nn

from adam_async import AdamW, sync
from adam_async.torch import RemoteOptimizer, parameter_arrays

MODULES = ("argparse", "ast", "decimal", "enum", "functools", "json", "logging", "pathlib", "statistics")
LENGTH = 64


def text() -> str:
    members = [vars(importlib.import_module(name)) for name in MODULES]
    return "\n\n".join(inspect.getdoc(each) or "" for names in members for each in names.values())


class CharacterModel(nn.Module):
    def __init__(self, characters: int, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, width)
        self.positions = nn.Parameter(torch.zeros(LENGTH, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0, batch_first=True, norm_first=True)
        self.attention = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.scores = nn.Linear(width, characters)
        self.scores.weight = nn.init.normal_(self.embedding.weight, std=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.scores(self.attention(self.embedding(x) + self.positions, mask=mask, is_causal=True))


def train(where: str = "local", *, steps: int = 300) -> list[float]:
    characters = sorted(set(text()))
    numbers = torch.tensor([characters.index(each) for each in text()])
    model, losses = CharacterModel(len(characters)), []
    with sync.ParameterStore.open(where, parameter_arrays(model), name="lm", rule=AdamW(rate=3e-3)) as store:
        optimizer = RemoteOptimizer(model, store)
        for _ in range(steps):
            rows = numbers[torch.randint(len(numbers) - LENGTH, (32, 1)) + torch.arange(LENGTH + 1)]
            loss = nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(*(f"{loss:.3f}" for loss in train(*sys.argv[1:2])[::50]))

"""A denoiser in PyTorch with BatchNorm and tied weights, trained through a parameter server.

    python examples/torch_denoiser.py [tcp://HOST:PORT]   # of a controller; processes share its store

Encoder and decoder share a matrix, so the store has it once. The store averages BatchNorm's statistics.
"""

import asyncio
import sys

from adam_async.errors import install_command

try:
    import torch
    from torch import Tensor, nn
except ImportError:
    sys.exit(f"this example needs PyTorch: {install_command('torch')}")

from adam_async import Adam, Disk, load_dataset, sync
from adam_async.torch import RemoteOptimizer, arrays_with_buffers


class Denoiser(nn.Module):
    """Maps noisy pixels (N, 64) to pixels (N, 64)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.norm, self.decoder = nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64)
        self.decoder.weight = self.encoder.weight

    def forward(self, noisy: Tensor) -> Tensor:
        return self.decoder(self.norm(self.encoder(noisy)).relu())


async def digits() -> Tensor:
    async with Disk() as disk:
        images = (await load_dataset("digits", disk)).train_images
    return torch.tensor(images).flatten(1) / 255


def train(where: str = "local", *, epochs: int = 10) -> list[float]:
    torch.manual_seed(0)
    images, module, losses = asyncio.run(digits()), Denoiser(), []
    arrays, rules = arrays_with_buffers(module, Adam(rate=3e-3))
    with sync.ParameterStore.open(where, arrays, name="denoiser", rule=rules) as store:
        optimizer = RemoteOptimizer(module, store, buffers="averaged")
        for _ in range(epochs):
            for batch in images[torch.randperm(len(images))].split(32):
                loss = nn.functional.mse_loss(module(batch + 0.3 * torch.randn_like(batch)), batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(*(f"{loss:.4f}" for loss in train(*sys.argv[1:2])[::50]))

"""A small ResNet in PyTorch as a training step, on images of CIFAR's shape; two workers, three servers.

    python examples/torch_resnet.py [--kill]   # kill -9 of a worker after an epoch, then of a server

`adam-async train --step torch_resnet:resnet --step-path examples --data FOLDER` trains it on other images.
"""

import asyncio
import sys
from pathlib import Path

from torch import Tensor, nn

from adam_async import Config, EpochResult, ProcessCluster, RunResult, synthetic
from adam_async.torch import TorchStep


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.convolutions(x) + self.shortcut(x))


def resnet_module() -> nn.Module:
    blocks = [nn.Conv2d(3, 8, 3, 1, 1), Block(8, 8, 1), Block(8, 16, 2), Block(16, 32, 2)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def resnet() -> TorchStep:
    return TorchStep(resnet_module, nn.functional.cross_entropy)


async def main(*, epochs: int = 4, kill: bool = False) -> RunResult:
    config = Config(epochs=epochs, replicas=2, servers=3, copies=3, controllers=3, rate=0.1, processes=True)
    images, here = synthetic(1200, shape=(3, 32, 32)), [Path(__file__).parent]
    victims = iter(["worker-0", "ps-1"] if kill else [])
    async with ProcessCluster(config, dataset=images, step="torch_resnet:resnet", step_path=here) as cluster:

        def on_epoch(epoch: EpochResult) -> None:
            print(epoch)
            if victim := next(victims, None):
                cluster.children[victim].kill()

        return await cluster.train(on_epoch)


if __name__ == "__main__":
    print(f"test accuracy {asyncio.run(main(kill='--kill' in sys.argv)).test_accuracy:.1%}")

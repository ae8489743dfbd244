"""A PyTorch module as a training step: a small convolutional network with batch normalisation.

    adam-async train --data digits --step torch_step:cnn --step-path examples --replicas 2

The example needs the extra torch: pip install "adam-async[torch]".
"""

from torch import nn
from torch.nn.functional import cross_entropy

from adam_async.torch import TorchStep


def network(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(width * 16, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def cnn(*, width: int = 16) -> TorchStep:
    # A function that makes the module: its first values then depend on --seed.
    return TorchStep(lambda: network(width), cross_entropy)

"""PyTorch's side of `benchmarks.augmentation`: one process, one thread.

The script needs only torch and numpy.

The script reads a NumPy file of images (n, 1, H, W) from its input. Our recipe from PyTorch's parts: an
affine map and displacements of a coarse grid for each image, `affine_grid`, a bicubic `interpolate` of the
displacements, `grid_sample`, and the conversion to whole numbers. PyTorch draws the random numbers. With
`--batch 1` each image is transformed alone, as in data sets that transform on request.

The script prints images per second of the process's time.
"""

import argparse
import io
import json
import sys
import time

import numpy as np
import torch
from torch.nn.functional import affine_grid, grid_sample, interpolate

WARM_UP_BATCHES = 20


def transformed(images: torch.Tensor) -> torch.Tensor:
    """Transform by at most 1 pixel of shift, 7 degrees, 0.07 of scale and shear, and 2 pixels of bending."""
    n, _, rows, columns = images.shape
    angle, scale, shear, right, down = (torch.rand(n, 5) * 2 - 1).unbind(1)
    angle, scale, shear = angle * 0.1222, 1 + 0.07 * scale, 0.07 * shear
    cosine, sine = torch.cos(angle) / scale, torch.sin(angle) / scale
    right, down = torch.round(right) * 2 / columns, torch.round(down) * 2 / rows
    first = torch.stack([cosine, -sine - cosine * shear, right], 1)
    second = torch.stack([sine, cosine - sine * shear, down], 1)
    grid = affine_grid(torch.stack([first, second], 1), [n, 1, rows, columns], align_corners=False)
    moves = (torch.rand(n, 2, 7, 7) * 2 - 1) * (2 * 2 / columns)
    grid += interpolate(moves, size=(rows, columns), mode="bicubic").permute(0, 2, 3, 1)
    return grid_sample(images.float(), grid, align_corners=False).round_().to(torch.uint8)


def rate(images: torch.Tensor, batch: int, seconds: float) -> float:
    """Transform batch after batch; return images per second."""
    places = len(images) // batch
    for turn in range(WARM_UP_BATCHES):
        transformed(images[turn % places * batch :][:batch])
    began, turn = time.process_time(), 0
    while time.process_time() - began < seconds:
        transformed(images[turn % places * batch :][:batch])
        turn += 1
    return turn * batch / (time.process_time() - began)


def main() -> None:
    """Measure, and print the rate as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batch", type=int, default=80)
    parser.add_argument("--seconds", type=float, default=1.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images = torch.from_numpy(np.load(io.BytesIO(sys.stdin.buffer.read())))
    with torch.inference_mode():
        print(json.dumps({"images_per_s": rate(images, options.batch, options.seconds)}))


if __name__ == "__main__":
    main()

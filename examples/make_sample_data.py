"""Write the digits of the package in every format of images that training reads.

python examples/make_sample_data.py OUT, and then, for example: adam-async train --data OUT/shards
"""

import asyncio
import io
import sys
import tarfile
from pathlib import Path

import numpy as np
import pyarrow.parquet
from PIL import Image

from adam_async import Disk, load_dataset


def png(image: np.ndarray) -> bytes:
    Image.fromarray(image).save(file := io.BytesIO(), "PNG")
    return file.getvalue()


def write(out: Path, split: str, images: np.ndarray, labels: np.ndarray) -> None:
    """Write images (N, rows, columns) with their labels (N,), as one split, in each format."""
    for kind in ("shards", "csv", "csv-paths/images", "npy", "npz", "parquet", "idx"):
        (out / kind).mkdir(parents=True, exist_ok=True)
    for letter, content, name in (("x", images, "images-idx3-ubyte"), ("y", labels, "labels-idx1-ubyte")):
        np.save(out / "npy" / f"{letter}_{split}.npy", content)
        idx = bytes(np.array([0x0800 + content.ndim, *content.shape], ">u4")) + bytes(content.astype("u1"))
        (out / "idx" / f"{split.replace('test', 't10k')}-{name}").write_bytes(idx)
    header = ",".join(["label", *(f"pixel{i}" for i in range(images[0].size))])
    rows = np.column_stack([labels, images.reshape(len(images), -1)])
    np.savetxt(out / "csv" / f"{split}.csv", rows, "%d", ",", header=header, comments="")
    encoded, lines = [png(image) for image in images], ["path,label"]
    table = pyarrow.table({"image": [{"bytes": data, "path": None} for data in encoded], "label": labels})
    pyarrow.parquet.write_table(table, out / "parquet" / f"{split}.parquet")
    with tarfile.open(out / "shards" / f"{split}.tar", "w") as shard:
        for i, (data, label) in enumerate(zip(encoded, labels, strict=True)):
            (folder := out / "folders" / split / str(label)).mkdir(parents=True, exist_ok=True)
            (folder / f"{i:05}.png").write_bytes(data)
            (out / "csv-paths" / "images" / f"{split}-{i:05}.png").write_bytes(data)
            lines.append(f"images/{split}-{i:05}.png,{label}")
            for suffix, content in (("png", data), ("cls", str(label).encode())):
                (member := tarfile.TarInfo(f"{i:05}.{suffix}")).size = len(content)
                shard.addfile(member, io.BytesIO(content))
    (out / "csv-paths" / f"{split}.csv").write_text("\n".join(lines) + "\n")
    np.savez(out / "npz" / "digits.npz", **{path.stem: np.load(path) for path in (out / "npy").iterdir()})


async def main(out: str) -> None:
    async with Disk() as disk:
        digits = await load_dataset("digits", disk)
    write(Path(out), "train", digits.train_images[:, 0], digits.train_labels)
    write(Path(out), "test", digits.test_images[:, 0], digits.test_labels)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1])) if len(sys.argv) == 2 and sys.argv[1][0] != "-" else sys.exit(__doc__)

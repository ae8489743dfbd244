"""Two unrelated programs share a store: one trains a model, the other serves its predictions as a reader.

adam-async controller --bind tcp://127.0.0.1:7000
adam-async ps --controller tcp://127.0.0.1:7000
python examples/store_shared.py train tcp://127.0.0.1:7000
python examples/store_shared.py serve tcp://127.0.0.1:7000 7001   # send it 64 pixels a line
"""

import asyncio
import sys

import numpy as np

from adam_async import Adam, Disk, ParameterStore, load_dataset

NAME = "digits"


def probabilities(images: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the probability of each class, (N, 10), for images (N, 64) with pixels 0 to 255."""
    scores = np.exp(images / np.float32(255) @ weights)
    return scores / scores.sum(axis=1, keepdims=True)


async def train(where: str, *, steps: int = 2000) -> None:
    async with Disk() as disk:
        digits = await load_dataset("digits", disk)
    images, labels = digits.train_images.reshape(-1, 64), digits.train_labels
    start = {"weights": np.zeros((64, 10), np.float32)}
    async with ParameterStore.open(where, start, name=NAME, rule=Adam(rate=0.01)) as store:
        print(f"trains in {store}", flush=True)
        for step in range(steps):
            values = await store.pull()
            batch = np.arange(step * 32, step * 32 + 32) % len(images)
            errors = probabilities(images[batch], values["weights"])
            errors[np.arange(32), labels[batch]] -= 1
            gradient = (images[batch] / np.float32(255)).T @ errors / 32
            await store.push({"weights": gradient}, read=values)


async def serve(where: str, port: str = "7001") -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async for line in reader:
            image = np.array(line.split(), np.float32)[None]
            weights = (await store.pull())["weights"]  # the newest, while the other program trains
            writer.write(b"%d\n" % probabilities(image, weights).argmax())
        writer.close()

    async with ParameterStore.open(where, name=NAME, reader=True) as store:
        async with await asyncio.start_server(answer, "127.0.0.1", int(port)) as server:
            print(f"serves at port {server.sockets[0].getsockname()[1]}", flush=True)
            await server.serve_forever()


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4) or sys.argv[1] not in ("train", "serve"):
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    asyncio.run({"train": train, "serve": serve}[sys.argv[1]](*sys.argv[2:]))

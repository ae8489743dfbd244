"""A dataflow graph alone: of two tags in flight, the second gets its inputs first, and overtakes.

left  ---> [double, in a thread] --+
                                   +--> [add] --> sum
right -----------------------------+
"""

import asyncio

from dataflow import ComputePool, Engine, Firing, Graph, Node, Tag


def double(firing: Firing, left: int) -> int:
    return 2 * left


def add(firing: Firing, doubled: int, right: int) -> int:
    return doubled + right


GRAPH = Graph(
    inputs=("left", "right"),
    nodes=(
        Node("double", double, inputs=("left",), outputs=("doubled",), heavy=True),
        Node("add", add, inputs=("doubled", "right"), outputs=("sum",)),
    ),
    outputs=("sum",),
)


async def main() -> list[tuple[int, int]]:
    sums: list[tuple[int, int]] = []
    summed = asyncio.Event()

    def on_output(port: str, tag: Tag, value: int) -> None:
        print(f"tag {tag.number}: {port} = {value}")
        sums.append((tag.number, value))
        summed.set()

    first, second = Tag(1, 1, 1), Tag(1, 2, 1)
    async with (
        ComputePool(threads=2, name="example") as pool,
        Engine(GRAPH, pool=pool, in_flight=2, on_output=on_output) as engine,
    ):
        await engine.admit(first)
        await engine.admit(second)
        engine.deliver("left", first, 10)  # the first tag now waits for its right half ...
        engine.deliver("right", second, 3)
        engine.deliver("left", second, 20)
        await summed.wait()  # ... and the second finishes first
        engine.deliver("right", first, 1)
        await engine.drain()
    return sums


if __name__ == "__main__":
    asyncio.run(main())

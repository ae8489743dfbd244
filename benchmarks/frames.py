"""Cost of framing: nanoseconds to encode and to decode a message, and its share of the bytes.

The peer column is a plain copy of the payload (times) or the payload itself (bytes).

    python -m benchmarks.frames --json FILE
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import msgspec
import numpy as np

from transport import BufferPool, LinkConfig, Message
from transport.decoder import FrameDecoder
from transport.frames import REQUEST
from transport.protocol import Conversation

SIZES = [0, 1 << 10, 1 << 16, 1 << 20, 1 << 24]


def median_ns(run: Callable[[], object], repeats: int) -> float:
    """Return the median nanoseconds of one run, over rounds of about a millisecond."""
    times = []
    for _ in range(7):
        begin = time.perf_counter_ns()
        for _ in range(repeats):
            run()
        times.append((time.perf_counter_ns() - begin) / repeats)
    return statistics.median(times)


def measure(size: int) -> list[dict[str, object]]:
    config, pool = LinkConfig(), BufferPool()
    conversation = Conversation(config, pool, now=0.0)
    decoder = FrameDecoder(config, pool)
    tensors = (np.ones(size, np.uint8),) if size else ()
    message = Message(type="push", meta=msgspec.msgpack.encode({"shard": 17, "step": 3}), tensors=tensors)

    def encode() -> list[bytes | memoryview]:
        conversation.queue(conversation.encode(REQUEST, 1, message))
        wire: list[bytes | memoryview] = []
        while buffers := conversation.next_frame():
            wire += buffers
        return wire

    wire = memoryview(b"".join(encode()))

    def decode() -> None:
        left = wire
        while left:
            room = decoder.get_buffer()
            count = min(len(room), len(left))
            room[:count] = left[:count]
            left = left[count:]
            decoder.updated(count)

    source, target = memoryview(bytes(size)), memoryview(bytearray(size))

    def copy() -> None:
        target[:] = source

    repeats = max(3, min(3000, (1 << 25) // max(size, 1 << 13)))
    copied = median_ns(copy, repeats)
    rows = []
    for name, run in (("encode", encode), ("decode, one copy included", decode)):
        ours = median_ns(run, repeats)
        rows.append(
            {
                "case": f"{name}, {size} B",
                "ours": round(ours),
                "peer": round(copied),
                "ratio": round(ours / max(copied, 1), 3),
                "unit": "ns",
            }
        )
    rows.append(
        {
            "case": f"bytes on the wire, {size} B",
            "ours": len(wire),
            "peer": size,
            "ratio": round(len(wire) / max(size, 1), 6),
            "unit": "B",
        }
    )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE", help="file for the rows, as JSON")
    args = parser.parse_args()
    rows = [row for size in SIZES for row in measure(size)]
    for row in rows:
        print(
            f"{row['case']:42s} {row['ours']:>10} {row['unit']}  peer {row['peer']:>10}  ratio {row['ratio']}"
        )
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()

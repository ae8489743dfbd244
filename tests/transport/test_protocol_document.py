"""The bytes printed in docs/reference/protocol.md are those of the code."""

import re
from pathlib import Path

import numpy as np
from msgspec.msgpack import decode, encode

from transport.config import LinkConfig
from transport.decoder import FrameDecoder
from transport.frames import REQUEST
from transport.messages import Message
from transport.protocol import Conversation
from transport.tensors import BufferPool

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "protocol.md"


def printed_frame() -> bytes:
    (dump,) = re.findall(r"```\n(54 4c.*?)```", DOCUMENT.read_text(), re.DOTALL)
    groups = [re.match(r"(?:[0-9a-f]{2}(?: |$))+", line) for line in dump.splitlines()]
    return b"".join(bytes.fromhex(group[0]) for group in groups if group)


def test_the_printed_frame_decodes_to_the_values_beside_it() -> None:
    wire = printed_frame()
    decoder = FrameDecoder(LinkConfig(), BufferPool())
    decoder.get_buffer()[: len(wire)] = wire
    (frame,) = decoder.updated(len(wire))
    assert (frame.kind, frame.request_id, frame.payload_bytes) == (REQUEST, 5, 16)
    assert frame.message is not None
    assert (frame.message.type, decode(frame.message.meta)) == ("push", {"shard": 17, "step": 3})
    assert [tensor.tolist() for tensor in frame.message.tensors] == [[1.0, 2.0, 3.0], [7]]


def test_the_message_encodes_to_the_printed_frame() -> None:
    tensors = (np.array([1, 2, 3], np.float32), np.array([7], np.int32))
    message = Message(type="push", meta=encode({"shard": 17, "step": 3}), tensors=tensors)
    (buffer,) = Conversation(LinkConfig(), BufferPool(), now=0.0).encode(REQUEST, 5, message).buffers
    assert buffer == printed_frame()

"""The decoder inverts the encoder for any division into reads, and raises only ProtocolError."""

import tracemalloc
from collections.abc import Iterable
from pathlib import Path

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transport.config import LinkConfig
from transport.decoder import FrameDecoder, Registered
from transport.errors import LocalProtocolError, ProtocolError, RemoteProtocolError
from transport.frames import (
    CHECKED,
    CHUNK,
    CLOSE,
    MESSAGE,
    MORE,
    PING,
    PLACED,
    PRELUDE_BYTES,
    REPLY,
    REQUEST,
    Frame,
    checksum,
    head,
    pack_meta,
)
from transport.messages import Message
from transport.protocol import Conversation
from transport.tensors import BufferPool, lay_out

CONFIG = LinkConfig(chunk_bytes=4096, gather_bytes=1024, max_message_bytes=1 << 20)
HOSTILE_LIMIT_BYTES = 4 << 20


def encode(
    message: Message,
    kind: int = REQUEST,
    request_id: int = 1,
    config: LinkConfig = CONFIG,
    *,
    checked: bool = False,
) -> bytes:
    """Return all frames of a message, as one string of bytes."""
    conversation = Conversation(config, BufferPool(), now=0.0, checked=checked)
    conversation.queue(conversation.encode(kind, request_id, message))
    wire = b""
    while buffers := conversation.next_frame():
        wire += b"".join(buffers)
    return wire


def feed(decoder: FrameDecoder, wire: bytes, step: int | None = None) -> list[Frame]:
    """Pass bytes to the decoder, at most ``step`` at a time."""
    frames: list[Frame] = []
    while wire:
        room = decoder.get_buffer()
        count = min(len(room), len(wire), step or len(wire))
        room[:count] = wire[:count]
        frames += decoder.updated(count)
        wire = wire[count:]
    return frames


def new_decoder(config: LinkConfig = CONFIG) -> FrameDecoder:
    return FrameDecoder(config, BufferPool())


def registered(*targets: np.ndarray) -> Registered:
    return Registered(targets, lay_out(targets, CONFIG.max_message_bytes, to_fill=True).packed)


def assert_same_message(one: Message | None, other: Message) -> None:
    assert one is not None
    assert (one.type, one.meta) == (other.type, other.meta)
    assert [tensor.dtype for tensor in one.tensors] == [tensor.dtype for tensor in other.tensors]
    assert [tensor.shape for tensor in one.tensors] == [tensor.shape for tensor in other.tensors]
    for mine, yours in zip(one.tensors, other.tensors, strict=True):
        assert mine.tobytes() == yours.tobytes()


DTYPES = ["f4", "f2", "f8", "i1", "i2", "i4", "i8", "u1", "?"]


@st.composite
def messages(draw: st.DrawFn) -> Message:
    def tensor(shape: Iterable[int], dtype: str) -> np.ndarray:
        array = np.arange(int(np.prod(tuple(shape))), dtype="i8")
        return array.astype(dtype).reshape(tuple(shape))

    shapes = st.lists(st.integers(0, 12), max_size=3)
    tensors = draw(st.lists(st.builds(tensor, shapes, st.sampled_from(DTYPES)), max_size=4))
    meta = draw(st.binary(max_size=40))
    return Message(type=draw(st.text(max_size=12)), meta=meta, tensors=tuple(tensors))


@settings(max_examples=60)
@given(
    st.lists(st.tuples(messages(), st.booleans()), min_size=1, max_size=3),
    st.sampled_from([None, 1, 7, 33, 1000]),
)
def test_messages_survive_any_division_into_reads(
    drawn: list[tuple[Message, bool]], step: int | None
) -> None:
    sent = [message for message, _ in drawn]
    wire = b"".join(encode(message, checked=checked) for message, checked in drawn)
    tail = head(PING, 0, b"", 0)
    frames = feed(new_decoder(), wire + tail, step)
    assert frames[-1].kind == PING
    for frame, message in zip(frames[:-1], sent, strict=True):
        assert_same_message(frame.message, message)


def test_sizes_around_the_chunk_limit_survive() -> None:
    for size in (4095, 4096, 4097, 8192, 8193, 50_000):
        message = Message(type="push", tensors=(np.arange(size).astype(np.uint8), np.ones(3)))
        for step, checked in ((None, False), (1000, False), (None, True), (1000, True)):
            wire = encode(message, checked=checked)
            (frame,) = feed(new_decoder(), wire, step)
            assert_same_message(frame.message, message)
            assert frame.payload_bytes + frame.frame_bytes == len(wire)


@pytest.mark.parametrize("checked", [False, True])
def test_a_bfloat16_tensor_survives(checked: bool) -> None:
    dtypes = pytest.importorskip("ml_dtypes")
    message = Message(type="push", tensors=(np.arange(5).astype(dtypes.bfloat16),))
    (frame,) = feed(new_decoder(), encode(message, checked=checked))
    assert_same_message(frame.message, message)


def test_tensors_are_aligned_where_they_land() -> None:
    message = Message(type="push", tensors=(np.ones(3, np.uint8), np.ones(5), np.ones(1, np.float32)))
    (frame,) = feed(new_decoder(), encode(message))
    assert frame.message is not None
    assert all(tensor.ctypes.data % 64 == 0 for tensor in frame.message.tensors)
    assert frame.payload_bytes == 3 + 40 + 4
    assert frame.payload_bytes + frame.frame_bytes == len(encode(message))


def test_framing_is_small_from_64_kib() -> None:
    for size in (64 << 10, 1 << 20):
        config = LinkConfig()
        message = Message(type="push", meta=b"shard 1", tensors=(np.zeros(size, np.uint8),))
        assert len(encode(message, config=config)) - size <= 0.02 * size


def test_other_frames_pass_between_chunks() -> None:
    large = encode(Message(type="push", tensors=(np.arange(10_000).astype(np.uint8),)))
    first = PRELUDE_BYTES + int.from_bytes(large[16:20], "little") + CONFIG.chunk_bytes
    small = encode(Message(type="note", tensors=(np.ones(2),)), MESSAGE, 0)
    frames = feed(new_decoder(), large[:first] + small + large[first:])
    assert [frame.message.type for frame in frames if frame.message] == ["note", "push"]


@pytest.mark.parametrize("checked", [False, True])
def test_a_large_payload_is_received_in_place(checked: bool) -> None:
    config = LinkConfig()
    decoder = new_decoder(config)
    array = np.arange(1 << 20, dtype=np.float32)
    (frame,) = feed(decoder, encode(Message(type="push", tensors=(array,)), config=config, checked=checked))
    assert frame.message is not None
    assert np.array_equal(frame.message.tensors[0], array)
    assert decoder.bytes_moved <= config.scratch_bytes


@pytest.mark.parametrize("checked", [False, True])
def test_a_forgotten_destination_is_not_written_to_any_more(checked: bool) -> None:
    array = np.ones(10_000, np.float32)
    target = np.zeros(10_000, np.float32)
    wire = encode(Message(type="ack", tensors=(array,)), REPLY, 7, checked=checked)
    decoder = new_decoder()
    decoder.registered[7] = registered(target)
    feed(decoder, wire[:20_000])
    received = int(target.sum())
    assert 0 < received < 10_000
    decoder.forget(7)
    (frame,) = feed(decoder, wire[20_000:])
    assert frame.request_id == 7
    assert int(target.sum()) == received


def test_a_damaged_small_reply_is_not_written_to_the_registered_array() -> None:
    target = np.zeros(9, np.float32)
    wire = bytearray(encode(Message(type="ack", tensors=(np.ones(9, np.float32),)), REPLY, 7, checked=True))
    wire[-1] ^= 1
    decoder = new_decoder()
    decoder.registered[7] = registered(target)
    with pytest.raises(RemoteProtocolError, match="payload-checksum"):
        feed(decoder, bytes(wire))
    assert not target.any()


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("step", [None, 50])
def test_several_small_tensors_land_in_registered_arrays(checked: bool, step: int | None) -> None:
    sent = (np.arange(5, dtype=np.float32), np.arange(3), np.empty(0, np.int8), np.ones((2, 2), np.uint8))
    targets = tuple(np.zeros_like(array) for array in sent)
    decoder = new_decoder()
    decoder.registered[7] = registered(*targets)
    (frame,) = feed(decoder, encode(Message(type="ack", tensors=sent), REPLY, 7, checked=checked), step)
    assert_same_message(frame.message, Message(type="ack", tensors=sent))
    assert frame.message is not None
    assert all(got is target for got, target in zip(frame.message.tensors, targets, strict=True))


def test_a_second_reply_of_one_id_does_not_reach_an_array_that_its_caller_has_back() -> None:
    array, target = np.ones(10_000, np.float32), np.zeros(10_000, np.float32)
    large = encode(Message(type="ack", tensors=(array,)), REPLY, 7)
    first = PRELUDE_BYTES + int.from_bytes(large[16:20], "little") + CONFIG.chunk_bytes
    whole = encode(Message(type="ack", tensors=(2 * array,)), REPLY, 7, LinkConfig())
    decoder = new_decoder()
    decoder.registered[7] = registered(target)
    (frame,) = feed(decoder, large[:first] + whole)
    assert frame.message is not None
    assert frame.message.tensors[0] is target
    decoder.forget(7)  # the owner does this as it delivers the reply
    target[:] = 3
    feed(decoder, large[first:])
    assert (target == 3).all()


@pytest.mark.parametrize("checked", [False, True])
def test_an_ended_conversation_stores_nothing_and_finds_the_close(checked: bool) -> None:
    pool = BufferPool(retain_bytes=0)
    decoder = FrameDecoder(CONFIG, pool)
    array = np.ones(100_000, np.float32)
    wire = encode(Message(type="ack", tensors=(array,)), REQUEST, 7, checked=checked)
    feed(decoder, wire[:200_000])
    assert pool.statistics().outstanding_bytes >= array.nbytes
    decoder.discard()
    assert pool.statistics().outstanding == 0
    frames = feed(decoder, wire[200_000:] + wire + encode(Message(type="closed"), CLOSE, 0))
    assert pool.statistics().acquired == 1
    assert [frame.kind for frame in frames] == [REQUEST, REQUEST, CLOSE]


def test_an_empty_reply_is_the_empty_arrays_that_were_registered_for_it() -> None:
    targets = [np.empty((0, 3), np.float32), np.empty(0, np.int64)]
    decoder = new_decoder()
    decoder.registered[7] = registered(*targets)

    [frame] = feed(decoder, encode(Message(type="m", tensors=tuple(targets)), REPLY, 7))

    assert frame.message is not None
    assert all(got is target for got, target in zip(frame.message.tensors, targets, strict=True))


# Faults of a peer


def prelude(**changes: int | bytes) -> bytes:
    wire = bytearray(head(REQUEST, 1, msgpack.packb(["push", b"", b""]), 0))
    places = {
        "magic": (0, 4),
        "version": (4, 1),
        "kind": (5, 1),
        "flags": (6, 2),
        "meta": (16, 4),
        "payload": (20, 8),
    }
    for name, value in changes.items():
        offset, size = places[name]
        wire[offset : offset + size] = value if isinstance(value, bytes) else value.to_bytes(size, "little")
    return bytes(wire)


def packed(meta: object, payload: int) -> bytes:
    return head(REQUEST, 1, msgpack.packb(meta), payload)


@pytest.mark.parametrize(
    ("wire", "rule"),
    [
        (prelude(magic=b"HTTP"), "magic"),
        (prelude(version=9), "version"),
        (prelude(kind=0), "kind"),
        (prelude(kind=99), "kind"),
        (prelude(flags=8), "flags"),
        (head(REQUEST, 1, b"meta" + bytes(4), 0, PLACED), "flags"),
        (head(PING, 0, b"", 0, PLACED), "flags"),
        (head(CHUNK, 0, b"", 4, PLACED), "flags"),
        (head(REQUEST, 1, b"abc", 4, PLACED | CHECKED), "flags"),
        (head(REQUEST, 1, b"meta" + bytes(4), 0, CHECKED), "flags"),
        (head(REQUEST, 1, b"abc", 4, CHECKED), "flags"),
        (head(PING, 0, b"", 0, CHECKED), "flags"),
        (head(CHUNK, 0, bytes(5), 5, CHECKED), "meta-length"),
        (prelude(meta=1 << 31), "meta-length"),
        (prelude(meta=CONFIG.max_meta_bytes + 1), "meta-length"),
        (prelude(payload=1 << 60), "payload-length"),
        (prelude(kind=PING), "meta-length"),
        (head(PING, 0, b"", 5), "payload-length"),
        (prelude(kind=MESSAGE), "checksum"),
        (head(CHUNK, 0, b"", 5), "chunk"),
        (head(REQUEST, 1, b"\xc1", 0), "meta"),
        (head(REQUEST, 1, b"", 0), "meta"),
        (packed(["push", b"", b""], 5), "payload-length"),
        (packed([1, b"", b""], 0), "meta"),
        (packed(["push", b""], 0), "meta"),
        (packed(["push", b"", b"", b""], 0), "meta"),
        (packed({"push": b""}, 0), "meta"),
        (packed(["push", {}, b""], 0), "meta"),
        (packed(["push", "text", b""], 0), "meta"),
        (packed(["push", None, b""], 0), "meta"),
        (packed(["push", b"", "text"], 0), "meta"),
        (packed(["push", b"", []], 0), "meta"),
        (packed([b"push", b"", b""], 0), "meta"),
        (packed([msgpack.ExtType(3, b"push"), b"", b""], 0), "meta"),
        (packed(["push", msgpack.ExtType(3, b""), b""], 0), "meta"),
        (packed(["push", msgpack.Timestamp(1), b""], 0), "meta"),
        (packed(["push", [[[[[[[[]]]]]]]], b""], 0), "meta"),
        (head(REQUEST, 1, msgpack.packb(["push", b"", b""]) + b"\0", 0), "meta"),
        (head(REQUEST, 1, b"\x93\xa1\xff\xc4\0\xc4\0", 0), "meta"),
        (head(REQUEST, 1, b"\x93\xa4push\xc6\xff\xff\xff\xff\xc4\0", 0), "meta"),
        (head(REQUEST, 1, b"\xdd\xff\xff\xff\xff\xa4push", 0), "meta"),
        (head(REQUEST, 1, b"\x91" * 5000, 0), "meta"),
        (packed(["push", b"", b"\x77\x00"], 4), "tensor-dtype"),
        (packed(["push", b"", b"\x01\x09" + b"\1\0\0\0" * 9], 4), "tensor-specs"),
        (packed(["push", b"", b"\x01\x02" + b"\xff" * 8], 4), "message-size"),
        (packed(["push", b"", b"\x01\x02" + b"\xff" * 4 + b"\0" * 4], 0), "message-size"),
    ],
)  # fmt: skip
def test_a_broken_rule_is_named(wire: bytes, rule: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        feed(new_decoder(), wire)
    assert caught.value.rule == rule


@pytest.mark.parametrize("size", [9, 2000, 10_000], ids=["one write", "one frame", "several frames"])
@given(data=st.data())
@settings(max_examples=60)
def test_a_flipped_bit_of_a_checked_message_is_found(size: int, data: st.DataObject) -> None:
    message = Message(type="push", meta=b"shard 1", tensors=(np.arange(size).astype(np.uint8), np.ones(2)))
    wire = bytearray(encode(message, checked=True))
    bit = data.draw(st.integers(0, 8 * len(wire) - 1))
    wire[bit // 8] ^= 1 << bit % 8
    try:
        frames = feed(new_decoder(), bytes(wire), data.draw(st.sampled_from([None, 100])))
    except RemoteProtocolError:
        return
    assert frames == []


def test_damage_of_a_payload_is_named() -> None:
    for size in (9, 2000, 10_000):
        wire = bytearray(encode(Message(type="push", tensors=(np.ones(size, np.uint8),)), checked=True))
        wire[-1] ^= 1
        for step in (None, 100):
            with pytest.raises(RemoteProtocolError, match="payload-checksum: a payload is damaged: CRC-32C"):
                feed(new_decoder(), bytes(wire), step)


def test_a_second_large_message_may_not_begin_within_the_first() -> None:
    large = encode(Message(type="push", tensors=(np.zeros(10_000, np.uint8),)))
    first = PRELUDE_BYTES + int.from_bytes(large[16:20], "little") + CONFIG.chunk_bytes
    with pytest.raises(RemoteProtocolError, match="chunk"):
        feed(new_decoder(), large[:first] * 2)


def test_a_chunk_may_not_exceed_its_message() -> None:
    large = encode(Message(type="push", tensors=(np.zeros(5_000, np.uint8),)))
    first = PRELUDE_BYTES + int.from_bytes(large[16:20], "little") + CONFIG.chunk_bytes
    for size, flags in ((2_000, 0), (904, MORE), (100, 0), (0, MORE)):
        with pytest.raises(RemoteProtocolError, match="chunk"):
            feed(new_decoder(), large[:first] + head(CHUNK, 0, b"", size, flags))


CORPUS = [
    encode(Message(type="push", meta=b"fields", tensors=(np.arange(9.0), np.ones(2, "i4")))),
    encode(Message(type="push", tensors=(np.arange(9000).astype(np.uint8),))),
    encode(Message(type="push", tensors=(np.arange(9000).astype(np.uint8),)), checked=True),
    encode(Message(type="ack", meta=b"x" * 100), REPLY) + head(PING, 0, b"", 0),
]


@settings(max_examples=200)
@given(st.sampled_from(CORPUS), st.data(), st.booleans())
def test_only_protocol_errors_leave_the_decoder(wire: bytes, data: st.DataObject, resign: bool) -> None:
    damaged = bytearray(wire)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    if resign:  # a malicious peer computes the checksum
        meta = min(int.from_bytes(damaged[16:20], "little"), CONFIG.max_meta_bytes)
        fixed = head(
            damaged[5],
            1,
            bytes(damaged[32 : 32 + meta]),
            int.from_bytes(damaged[20:22], "little"),
            damaged[6] & (MORE | CHECKED),
        )
        damaged[: len(fixed)] = fixed
    try:
        feed(new_decoder(), bytes(damaged), data.draw(st.sampled_from([None, 1, 100])))
    except ProtocolError:
        pass


def hostile_inputs() -> list[bytes]:
    """Return short inputs that claim, or expand to, much memory."""
    bombs = [
        msgpack.packb(["x", [{}] * 16_000, b""]),
        msgpack.packb(["x", [[]] * 16_000, b""]),
        msgpack.packb(["x", b"\x80" * 16_000, b""]),
        msgpack.packb(["x", b"", b"\x09\x00" * 8_000]),
        msgpack.packb(["x", b"", b"\x09\x01\0\0\0\0" * 2_700]),
    ]
    wires = [head(REQUEST, 1, bomb, min(512_000, 1 << 20)) for bomb in bombs if len(bomb) <= 16_384]
    claim = msgpack.packb(["x", b"", b"\x09\x01" + (64 << 20).to_bytes(4, "little")])
    wires.append(head(REQUEST, 1, claim, 1 << 20, MORE) + bytes(100_000))
    whole = msgpack.packb(["x", b"", b"\x09\x01" + (1 << 20).to_bytes(4, "little")])
    wires.append(head(REQUEST, 1, whole, 1 << 20) + b"x")
    return wires


@pytest.mark.parametrize("wire", hostile_inputs(), ids=range(len(hostile_inputs())))
def test_a_hostile_input_takes_little_memory(wire: bytes) -> None:
    decoder = new_decoder(LinkConfig())
    before = _resident_bytes()
    tracemalloc.start()
    try:
        try:
            feed(decoder, wire)
        except ProtocolError:
            pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= HOSTILE_LIMIT_BYTES
    # Mapped memory is not traced; its pages exist only for received bytes.
    assert _resident_bytes() - before <= 2 * HOSTILE_LIMIT_BYTES


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


# Faults of the caller


@pytest.mark.parametrize(
    ("message", "rule"),
    [
        (Message(type="push", meta={"a": 1}), "meta"),  # type: ignore[arg-type]
        (Message(type="push", meta="text"), "meta"),  # type: ignore[arg-type]
        (Message(type="push", meta=bytearray(b"a")), "meta"),  # type: ignore[arg-type]
        (Message(type="push", meta=b"x" * (CONFIG.max_meta_bytes - 10)), "meta-length"),
        (Message(type="push", tensors=(np.zeros((2, 2))[:, :1],)), "tensor-layout"),
        (Message(type="push", tensors=(np.zeros(2, complex),)), "tensor-dtype"),
        (Message(type="push", tensors=([1, 2],)), "tensor-dtype"),  # type: ignore[arg-type]
        (Message(type="push", tensors=(np.zeros((1,) * 9),)), "tensor-dims"),
        (Message(type="push", tensors=(np.zeros(1 << 18),)), "message-size"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_sender_refuses_a_message_that_no_frame_can_hold(message: Message, rule: str) -> None:
    with pytest.raises(LocalProtocolError) as caught:
        encode(message)
    assert caught.value.rule == rule


def test_the_largest_meta_of_a_message_without_tensors_fills_its_frame() -> None:
    message = Message(type="push", meta=b"x" * (CONFIG.max_meta_bytes - 11))
    assert len(pack_meta(message, b"", CONFIG.max_meta_bytes)) == CONFIG.max_meta_bytes
    (frame,) = feed(new_decoder(), encode(message))
    assert_same_message(frame.message, message)


@given(st.integers(0, 9))
def test_the_check_value_of_crc32c_is_independent_of_the_cuts(cut: int) -> None:
    digits = b"123456789"
    assert checksum([digits[:cut], memoryview(digits)[cut:]]) == 0xE3069283
    assert checksum([memoryview(bytearray(digits[cut:]))], checksum([digits[:cut]])) == 0xE3069283


@pytest.mark.parametrize("dtype", ["f4", "i8", "?"])
def test_the_checksum_of_an_array_is_that_of_its_bytes(dtype: str) -> None:
    array = np.arange(12).astype(dtype).reshape(3, 4)
    assert checksum([array]) == checksum([array.tobytes()])

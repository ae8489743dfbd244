"""Pure: what an error is called on the command line: one sentence and an exit code."""

from adam_async.errors import AdamError, first_cause
from transport.errors import BindRefused, HandshakeRejected, RemoteProtocolError, TransportError

USAGE, HANDSHAKE, ADDRESS, PEER = 2, 6, 7, 5

LESS = "lower --images-per-group, --in-flight, --threads or --replicas, or take a smaller model"


def explain(error: BaseException) -> tuple[int, str]:
    """Return the exit code and the sentence for an error, or for the first cause within a group."""
    cause = first_cause(error)
    match cause:
        case AdamError():
            return cause.exit_code, str(cause)
        case MemoryError():
            return USAGE, f"not enough memory: {cause}; ask for less: {LESS}"
        case HandshakeRejected(code="token"):
            return HANDSHAKE, f"{cause} (--token-file, or ADAM_TOKEN)"
        case HandshakeRejected() | RemoteProtocolError():
            return HANDSHAKE, str(cause)
        case BindRefused():
            return ADDRESS, str(cause)
        case TransportError():
            return PEER, str(cause) or type(cause).__name__
        case _:
            what = f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__
            return 1, f"unexpected {what} (ADAM_TRACEBACK=1 shows where)"

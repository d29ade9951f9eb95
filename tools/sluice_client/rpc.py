"""Channels to Sluice's services, and their errors in one sentence for people."""

from dataclasses import dataclass
from pathlib import Path

import grpc
from google.rpc import error_details_pb2, status_pb2

from sluice.v1 import ingest_pb2
from sluice_client.errors import ToolError

_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # Each channel its own connection, so that several streams are several sockets.
    ("grpc.use_local_subchannel_pool", 1),
]
_DETAILS = (error_details_pb2.BadRequest, error_details_pb2.ErrorInfo, error_details_pb2.RetryInfo,
            ingest_pb2.MissingBlocks)


@dataclass(frozen=True)
class Credentials:
    """The paths of the PEM files, and the token itself, that a client uses with nodes that speak TLS."""

    ca: str  # the authority that issues the nodes' certificates
    cert: str = ""
    key: str = ""
    token: str = ""

    def __repr__(self) -> str:  # the token must not be printed by accident
        return f"Credentials(ca={self.ca!r}, cert={self.cert!r})"

    def of_channel(self) -> grpc.ChannelCredentials:
        tls = grpc.ssl_channel_credentials(_read(self.ca), _read(self.key), _read(self.cert))
        if not self.token:
            return tls
        return grpc.composite_channel_credentials(tls, grpc.access_token_call_credentials(self.token))


def _read(path: str) -> bytes | None:
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ToolError(f"{path}: {error.strerror}") from None


def credentials_from(ca: str | None, cert: str | None, key: str | None, token: str | None) -> Credentials | None:
    """Returns the credentials that the command line names, or None for calls that are not encrypted.

    `token` is @FILE or, in tests, the token itself.
    """
    if bool(cert) != bool(key):
        raise ToolError("--cert and --key go together: give both or neither")
    if not ca:
        if cert or token:
            raise ToolError("--cert and --token need --ca FILE: without TLS they would be sent to anybody")
        return None
    if token and token.startswith("@"):
        token = _read(token[1:]).decode().strip()
    return Credentials(ca, cert or "", key or "", token or "")


_credentials: Credentials | None = None  # for channels that are opened without any


def use(credentials: Credentials | None) -> None:
    """Sets the credentials for channels that are opened without any."""
    global _credentials
    _credentials = credentials


def open_channel(address: str, credentials: Credentials | None = None) -> grpc.Channel:
    """Returns a channel to host:port, over TLS with `credentials` or those of use(), else not encrypted."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ToolError(f"'{address}' is not an address: give host:port, e.g. 127.0.0.1:7000")
    credentials = credentials or _credentials
    if credentials is None:
        return grpc.insecure_channel(address, options=_OPTIONS)
    return grpc.secure_channel(address, credentials.of_channel(), options=_OPTIONS)


def details_of(error: grpc.RpcError) -> dict[str, object]:
    """Returns the google.rpc details of an error by message name: {"RetryInfo": RetryInfo(...), ...}."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            status = status_pb2.Status.FromString(value)
            found = {}
            for packed in status.details:
                for kind in _DETAILS:
                    if packed.Is(kind.DESCRIPTOR):
                        found[kind.__name__] = kind.FromString(packed.value)
            return found
    return {}


def reason_of(error: grpc.RpcError) -> str:
    """Returns ErrorInfo.reason, or the empty string."""
    info = details_of(error).get("ErrorInfo")
    return info.reason if info else ""


def retry_seconds(error: grpc.RpcError) -> float | None:
    """Returns the seconds after which the server asks to try again, or None."""
    info = details_of(error).get("RetryInfo")
    return info.retry_delay.seconds + info.retry_delay.nanos / 1e9 if info else None


def range_text(r: "ingest_pb2.BlockRange") -> str:
    return (f"layer {r.layer} {r.kind} heads {r.head_begin}-{r.head_end} "
            f"tokens {r.token_begin}-{r.token_end}")


class CallError(ToolError):
    """A call that failed, in one sentence, with its status code and ErrorInfo.reason."""

    def __init__(self, error: grpc.RpcError, address: str):
        super().__init__(explain(error, address))
        self.code = error.code()
        self.reason = reason_of(error)
        bad = details_of(error).get("BadRequest")
        self.fields = [violation.field for violation in bad.field_violations] if bad else []


def explain(error: grpc.RpcError, address: str) -> str:
    """Returns one sentence: the address, the status, the server's message, and what its details add."""
    code = error.code()
    text = (error.details() or "").strip()
    if code == grpc.StatusCode.UNAVAILABLE and ("onnect" in text or "DNS" in text):
        return f"no server answers at {address}: is it running there? ({text.splitlines()[0]})"
    parts = [f"{address} answered {code.name}: {text or 'no message'}"]
    details = details_of(error)
    for violation in getattr(details.get("BadRequest"), "field_violations", ()):
        if violation.field and violation.field not in text:
            parts.append(f"field {violation.field}: {violation.description}")
        elif violation.description and violation.description not in text:
            parts.append(violation.description)
    info = details.get("ErrorInfo")
    if info and info.reason and info.reason not in text:
        parts.append(f"reason {info.reason}")
    missing = details.get("MissingBlocks")
    if missing:
        ranges = ", ".join(range_text(r) for r in missing.ranges[:3])
        parts.append(f"{missing.count} blocks are missing: {ranges}"
                     + (", ..." if len(missing.ranges) > 3 else ""))
    seconds = retry_seconds(error)
    if seconds is not None:
        parts.append(f"try again in {seconds:g} s")
    return "; ".join(parts)

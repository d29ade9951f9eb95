"""An HTTP/2 client written by hand, for messages that no gRPC library sends: messages that announce more than they
bring, endless headers, compressed bombs, noise.
"""

import socket
import struct

from support.nodes import TIMEOUT_S

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, END_HEADERS, ACK = 1, 4, 1
FRAME_BYTES = 16384  # largest frame that a server must take


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes | memoryview = b"") -> bytes:
    head = struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream)
    return b"".join((head, payload))


def connect(address: str) -> socket.socket:
    host, port = address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=TIMEOUT_S)


def header_block(fields: dict[str, str]) -> bytes:
    """Returns headers in HPACK, as literals without indexing and without Huffman."""
    def text(value: str) -> bytes:
        assert len(value) < 127
        return bytes([len(value)]) + value.encode()
    return b"".join(b"\0" + text(name) + text(value) for name, value in fields.items())


class Http2:
    """One connection and one call on it."""

    def __init__(self, address: str):
        self.socket = connect(address)
        self.socket.sendall(PREFACE + frame(SETTINGS))
        self.received = b""
        self.connection_window = self.stream_window = self.initial_window = 65535
        # Whether the server has answered the call, or ended it.
        self.ended = False

    def call(self, method: str, **headers: str) -> None:
        fields = {":method": "POST", ":scheme": "http", ":path": method, ":authority": "x", "te": "trailers",
                  "content-type": "application/grpc", **{k.replace("_", "-"): v for k, v in headers.items()}}
        self.socket.sendall(frame(HEADERS, END_HEADERS, 1, header_block(fields)))

    def message(self, announced: int, sent: int, compressed: bool = False, body: bytes = b"") -> None:
        """Sends a message of `announced` bytes of which only `sent` come: `body`, or zeros. Stops where the server
        does.
        """
        left = memoryview(struct.pack(">BI", compressed, announced) + body)
        zeros = memoryview(bytes(FRAME_BYTES))
        total, done = 5 + sent, 0
        while done < total and not self.ended:
            room = min(FRAME_BYTES, total - done, self.connection_window, self.stream_window)
            if room <= 0:
                self.read()
                continue
            piece = left[done:done + room] if done < len(left) else zeros[:room]
            self.socket.sendall(frame(DATA, 0, 1, piece))
            done += len(piece)
            self.connection_window -= len(piece)
            self.stream_window -= len(piece)

    def read(self) -> None:
        """Takes the next frames of the server, and sets `ended` where they end the call."""
        data = self.socket.recv(65536)
        self.ended |= not data
        self.received += data
        while len(self.received) >= 9:
            length = int.from_bytes(self.received[:3], "big")
            if len(self.received) < 9 + length:
                return
            kind, flags = self.received[3], self.received[4]
            stream = int.from_bytes(self.received[5:9], "big")
            payload, self.received = self.received[9:9 + length], self.received[9 + length:]
            self._take(kind, flags, stream, payload)

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == WINDOW_UPDATE:
            more = int.from_bytes(payload, "big")
            if stream == 0:
                self.connection_window += more
            else:
                self.stream_window += more
        elif kind == SETTINGS and not flags & ACK:
            for at in range(0, len(payload), 6):
                name, value = struct.unpack(">HI", payload[at:at + 6])
                if name == 4:  # SETTINGS_INITIAL_WINDOW_SIZE counts for open streams, too
                    self.stream_window += value - self.initial_window
                    self.initial_window = value
            self.socket.sendall(frame(SETTINGS, ACK))
        elif kind == PING and not flags & ACK:
            self.socket.sendall(frame(PING, ACK, 0, payload))
        elif kind in (RST_STREAM, GOAWAY) or (kind == HEADERS and flags & END_STREAM):
            self.ended = True

    def wait_for_end(self) -> None:
        while not self.ended:
            self.read()

    def close(self) -> None:
        self.socket.close()

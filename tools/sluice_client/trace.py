"""The command `trace`: writes what a decode node's last steps did, as a file for ui.perfetto.dev."""

import json
from pathlib import Path

import grpc

from sluice.v1 import admin_pb2, admin_pb2_grpc
from sluice_client import rpc
from sluice_client.errors import ToolError

_TIMEOUT_S = 60.0


def fetch(channel: grpc.Channel, steps: int) -> bytes:
    """Returns the trace of at most `steps` steps (0: all that the node keeps) as JSON. Raises grpc.RpcError."""
    pieces = admin_pb2_grpc.AdminStub(channel).Trace(admin_pb2.TraceRequest(steps=steps), timeout=_TIMEOUT_S)
    return b"".join(piece.json for piece in pieces)


def run(args) -> int:
    """The command `trace`."""
    with rpc.open_channel(args.decode) as channel:
        try:
            data = fetch(channel, args.steps)
        except grpc.RpcError as error:
            raise rpc.CallError(error, args.decode) from error
    try:
        Path(args.out).write_bytes(data)
    except OSError as error:
        raise ToolError(f"cannot write {args.out}: {error.strerror}") from error
    steps = sum(event["name"] == "step" for event in json.loads(data)["traceEvents"])
    print(f"{args.out}: {steps} steps, {len(data)} bytes; open it at https://ui.perfetto.dev")
    return 0

"""The command `drain`: takes a decode node out of service."""

import json
import time

import grpc
from google.protobuf import duration_pb2

from sluice.v1 import admin_pb2, admin_pb2_grpc
from sluice_client import rpc
from sluice_client.errors import ToolError

_TIMEOUT_S = 10.0
_LOOK_S = 0.2


def drain(channel: grpc.Channel, address: str, timeout: float | None, wait: bool) -> dict:
    """Drains the node, with `wait` until nothing runs or waits there. Returns what is left, as plain values."""
    admin = admin_pb2_grpc.AdminStub(channel)
    request = admin_pb2.DrainRequest()
    if timeout is not None:
        seconds = int(timeout)
        request.timeout.CopyFrom(
            duration_pb2.Duration(seconds=seconds, nanos=int((timeout - seconds) * 1e9)))
    try:
        answer = admin.Drain(request, timeout=_TIMEOUT_S)
        running, waiting = answer.running, answer.waiting
        while wait and running + waiting > 0:
            time.sleep(_LOOK_S)
            now = admin.GetCapacity(admin_pb2.GetCapacityRequest(), timeout=_TIMEOUT_S)
            if not now.draining:
                raise ToolError(f"{address} was resumed before it was idle")
            running, waiting = now.running, now.waiting
    except grpc.RpcError as error:
        raise rpc.CallError(error, address) from error
    return {"idle": running + waiting == 0, "running": running, "waiting": waiting,
            "was_draining": answer.was_draining}


def run(args) -> int:
    """The command `drain`."""
    with rpc.open_channel(args.decode) as channel:
        result = drain(channel, args.decode, args.timeout, not args.no_wait)
    if args.json:
        print(json.dumps(result))
    elif result["idle"]:
        print(f"{args.decode} is drained: nothing runs or waits")
    else:
        print(f"{args.decode} is draining: {result['running']} running, {result['waiting']} waiting")
    return 0

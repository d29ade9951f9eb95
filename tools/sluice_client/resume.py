"""The command `resume`: takes a drained decode node back into service."""

import json

import grpc

from sluice.v1 import admin_pb2, admin_pb2_grpc
from sluice_client import rpc

_TIMEOUT_S = 10.0


def run(args) -> int:
    """The command `resume`."""
    with rpc.open_channel(args.decode) as channel:
        try:
            answer = admin_pb2_grpc.AdminStub(channel).Resume(admin_pb2.ResumeRequest(),
                                                              timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            raise rpc.CallError(error, args.decode) from error
    if args.json:
        print(json.dumps({"was_draining": answer.was_draining}))
    else:
        print(f"{args.decode} takes work" + (" again" if answer.was_draining else
                                             ": it was not draining"))
    return 0

"""The command `failpoint`: makes a decode node fail on purpose."""

import json

import grpc
from google.protobuf import json_format

from sluice.v1 import admin_pb2, admin_pb2_grpc
from sluice_client import rpc

_TIMEOUT_S = 10.0


def as_text(listing: dict) -> str:
    """Returns a paragraph for each failpoint: its name and effect, what survives it, and how often it has fired."""
    lines = []
    for point in listing["failpoints"]:
        lines.append(f"{point['name']:22} {point['effect']}")
        lines.append(f"{'':22} survives: {point['survives']}")
        if point["term"]:
            state = "armed" if point["armed"] else "not armed any more"
            lines.append(f"{'':22} {point['term']}: {state}, {point['hits']} hits, {point['fired']} faults")
    if not listing["allowed"]:
        lines.append("This node was started without --allow-failpoints: set and clear are refused.")
    return "\n".join(lines)


def run(args) -> int:
    """The command `failpoint`."""
    with rpc.open_channel(args.decode) as channel:
        admin = admin_pb2_grpc.AdminStub(channel)
        try:
            if args.action == "list":
                answer = admin.ListFailpoints(admin_pb2.ListFailpointsRequest(), timeout=_TIMEOUT_S)
                listing = json_format.MessageToDict(answer, preserving_proto_field_name=True,
                                                    always_print_fields_with_no_presence=True)
                print(json.dumps(listing) if args.json else as_text(listing))
                return 0
            request = admin_pb2.SetFailpointsRequest(clear=True) if args.action == "clear" else \
                admin_pb2.SetFailpointsRequest(terms=";".join(args.terms), seed=args.seed)
            admin.SetFailpoints(request, timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            raise rpc.CallError(error, args.decode) from error
    return 0

"""The command `status`: what a decode node runs and how full it is."""

import json
import sys
import time

import grpc
from google.protobuf import json_format

from sluice.v1 import admin_pb2, admin_pb2_grpc
from sluice_client import rpc
from sluice_client.errors import ToolError

_TIMEOUT_S = 10.0
_BAR_CELLS = 30


def read(channel: grpc.Channel, address: str, limit: int) -> dict:
    """Model, capacity and sequences as plain values, with the names of the .proto."""
    admin = admin_pb2_grpc.AdminStub(channel)
    try:
        answers = (admin.GetModel(admin_pb2.GetModelRequest(), timeout=_TIMEOUT_S),
                   admin.GetCapacity(admin_pb2.GetCapacityRequest(), timeout=_TIMEOUT_S),
                   admin.ListSequences(admin_pb2.ListSequencesRequest(limit=limit),
                                       timeout=_TIMEOUT_S))
    except grpc.RpcError as error:
        raise ToolError(rpc.explain(error, address)) from error
    names = ("model", "capacity", "sequences")
    return {name: json_format.MessageToDict(answer, preserving_proto_field_name=True,
                                            always_print_fields_with_no_presence=True)
            for name, answer in zip(names, answers)}


def bytes_text(count: int) -> str:
    """1536 -> 1.5 KiB."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.4g} {units[0]}"


def bar(used: int, reserved: int, capacity: int) -> str:
    """# in use, - promised, . free; anything above zero shows."""
    def cells(count):
        return min(_BAR_CELLS, -(-count * _BAR_CELLS // capacity)) if capacity else 0
    full = cells(used)
    promised = max(full, cells(reserved)) - full
    return "#" * full + "-" * promised + "." * (_BAR_CELLS - full - promised)


def as_text(status: dict, address: str) -> str:
    node, capacity, listing = status["model"], status["capacity"], status["sequences"]
    model = node["model"]
    # Latent caches have no KV heads: their kinds say what they are.
    heads = (f"{model['heads']}/{model['kv_heads']} heads of {model['head_dim']}"
             if model["kv_heads"] else
             f"{model['heads']} heads, caches "
             + " and ".join(f"{k['name']} of {k['bytes_per_token']} B" for k in model["cache_kinds"]))
    lines = [
        f"{model['name']} ({model['architecture']}) at {address}"
        + ("  DRAINING" if capacity["draining"] else ""),
        f"  {model['layers']} layers, {heads}, context {model['max_context']}, weights "
        f"{bytes_text(int(model['weight_bytes']))}",
        f"  device {node['device']}, kernels {node['kernels']}, policy {node['policy']}, "
        f"version {node['version']}",
    ]
    for tier in capacity["tiers"]:
        used, reserved, total = (int(tier[k + "_bytes"]) for k in ("used", "reserved", "capacity"))
        lines.append(f"  {tier['tier']:4} {tier['kind']:9} [{bar(used, reserved, total)}] "
                     f"{bytes_text(used)} used, {bytes_text(reserved)} reserved of {bytes_text(total)}")
    lines.append(f"  sequences: {capacity['running']} running (at most {capacity['max_sequences']}), "
                 f"{capacity['waiting']} waiting; {capacity['transfers']} transfers")
    for s in listing["sequences"]:
        state = s["state"].removeprefix("STATE_").lower().replace("_", " ")
        lines.append(f"    {s['request_id']}  {state}  prompt {s['prompt_tokens']}, output "
                     f"{s['output_tokens']}/{s['max_tokens']}, {s.get('age', '0s')}")
    hidden = listing["total"] - len(listing["sequences"])
    if hidden > 0:
        lines.append(f"    and {hidden} more")
    return "\n".join(lines)


def run(args) -> int:
    """The command `status`."""
    with rpc.open_channel(args.decode) as channel:
        while True:
            status = read(channel, args.decode, args.limit)
            text = json.dumps(status) if args.json else as_text(status, args.decode)
            if args.watch and not args.json and sys.stdout.isatty():
                text = "\x1b[H\x1b[2J" + text
            print(text, flush=True)
            if not args.watch:
                return 0
            time.sleep(args.interval)

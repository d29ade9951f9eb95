"""The command `status`: which model a node runs and how full the node is."""

import json
import sys
import time

import grpc
from google.protobuf import json_format

from sluice.v1 import admin_pb2, admin_pb2_grpc, common_pb2, prefill_pb2, prefill_pb2_grpc
from sluice_client import rpc

_TIMEOUT_S = 10.0
_BAR_CELLS = 30


def _or_none(call, request):
    """Returns the answer of a method, or None where the node has nothing to answer: a prefill node has no sequences."""
    try:
        return call(request, timeout=_TIMEOUT_S)
    except grpc.RpcError as error:
        if error.code() == grpc.StatusCode.UNIMPLEMENTED or rpc.reason_of(error) == "PREFILL_NODE":
            return None
        raise


def _ask(channel: grpc.Channel, limit: int) -> list:
    """Returns the answers of GetModel, GetCapacity and ListSequences, None for what the node does not serve."""
    admin = admin_pb2_grpc.AdminStub(channel)
    model = (_or_none(admin.GetModel, admin_pb2.GetModelRequest())
             or prefill_pb2_grpc.PrefillStub(channel).GetModel(prefill_pb2.GetPrefillModelRequest(),
                                                               timeout=_TIMEOUT_S))
    return [model, _or_none(admin.GetCapacity, admin_pb2.GetCapacityRequest()),
            _or_none(admin.ListSequences, admin_pb2.ListSequencesRequest(limit=limit))]


def model_of(channel: grpc.Channel, address: str) -> common_pb2.ModelInfo:
    """Returns the model that a decode or prefill node runs. Raises rpc.CallError."""
    try:
        return _ask(channel, 1)[0].model
    except grpc.RpcError as error:
        raise rpc.CallError(error, address) from error


def read(channel: grpc.Channel, address: str, limit: int) -> dict:
    """Returns model, capacity and sequences as plain values, with the names of the .proto; null: not served."""
    try:
        answers = _ask(channel, limit)
    except grpc.RpcError as error:
        raise rpc.CallError(error, address) from error
    return {name: None if answer is None else json_format.MessageToDict(
                answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
            for name, answer in zip(("model", "capacity", "sequences"), answers)}


def bytes_text(count: int) -> str:
    """1536 -> 1.5 KiB."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.4g} {units[0]}"


def bar(used: int, reserved: int, capacity: int) -> str:
    """Returns a bar: # in use, - promised, . free. Every amount above zero shows."""
    def cells(count):
        return min(_BAR_CELLS, -(-count * _BAR_CELLS // capacity)) if capacity else 0
    full = cells(used)
    promised = max(full, cells(reserved)) - full
    return "#" * full + "-" * promised + "." * (_BAR_CELLS - full - promised)


def _capacity_lines(capacity: dict) -> list[str]:
    lines = []
    for tier in capacity["tiers"]:
        used, reserved, total = (int(tier[k + "_bytes"]) for k in ("used", "reserved", "capacity"))
        lines.append(f"  {tier['tier']:4} {tier['kind']:9} [{bar(used, reserved, total)}] "
                     f"{bytes_text(used)} used, {bytes_text(reserved)} reserved of {bytes_text(total)}")
    if held := capacity.get("held"):
        used, total = int(held["used_bytes"]), int(held["capacity_bytes"])
        return [*lines, f"  held prompts   [{bar(used, used, total)}] {bytes_text(used)} used of {bytes_text(total)}, "
                        f"{held['prompts']} prompts, {held['expired']} expired",
                f"  prompts: {capacity['running']} computed or pushed, {capacity['waiting']} waiting"]
    return [*lines, f"  sequences: {capacity['running']} running (at most {capacity['max_sequences']}), "
                    f"{capacity['waiting']} waiting; {capacity['transfers']} transfers"]


def _state(capacity: dict | None) -> str:
    """Returns why a node takes no work, as the end of the first line."""
    if capacity and capacity["draining"]:
        return "  DRAINING"
    return "  NOT READY" if capacity and not capacity.get("ready", True) else ""


def _sequence_lines(listing: dict) -> list[str]:
    lines = []
    for s in listing["sequences"]:
        state = s["state"].removeprefix("STATE_").lower().replace("_", " ")
        lines.append(f"    {s['request_id']}  {state}  prompt {s['prompt_tokens']}, output "
                     f"{s['output_tokens']}/{s['max_tokens']}, {s.get('age', '0s')}")
    hidden = listing["total"] - len(listing["sequences"])
    return [*lines, f"    and {hidden} more"] if hidden > 0 else lines


def as_text(status: dict, address: str) -> str:
    node, capacity, listing = status["model"], status["capacity"], status["sequences"]
    model = node["model"]
    # Latent caches have no KV heads; the names of their kinds describe them.
    heads = (f"{model['heads']}/{model['kv_heads']} heads of {model['head_dim']}"
             if model["kv_heads"] else
             f"{model['heads']} heads, caches "
             + " and ".join(f"{k['name']} of {k['bytes_per_token']} B" for k in model["cache_kinds"]))
    about = ", ".join(f"{key} {node[key]}" for key in ("role", "device", "kernels", "policy", "version")
                      if node.get(key))
    exact = node.get("exact_tokens", 0)
    if 0 < exact < model["max_context"]:
        about += f"; exact up to {exact} tokens"
    lines = [
        f"{model['name']} ({model['architecture']}) at {address}{_state(capacity)}",
        f"  {model['layers']} layers, {heads}, context {model['max_context']}, weights "
        f"{bytes_text(int(model['weight_bytes']))}",
        f"  {about}",
    ]
    if capacity is None:
        lines.append("  this node does not say how full it is (no sluice.v1.Admin)")
    else:
        lines += _capacity_lines(capacity)
    return "\n".join(lines + (_sequence_lines(listing) if listing else []))


def run(args) -> int:
    """The command `status`."""
    addresses = list(filter(None, (args.decode, args.prefill)))
    channels = [rpc.open_channel(address) for address in addresses]
    try:
        while True:
            found = [read(channel, address, args.limit) for channel, address in zip(channels, addresses)]
            text = "\n".join(json.dumps(one) if args.json else as_text(one, address)
                             for one, address in zip(found, addresses))
            if args.watch and not args.json and sys.stdout.isatty():
                text = "\x1b[H\x1b[2J" + text
            print(text, flush=True)
            if not args.watch:
                return 0
            time.sleep(args.interval)
    finally:
        for channel in channels:
            channel.close()

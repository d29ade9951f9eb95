"""Bytes that are no call: the transport and the parsers refuse them before any service sees them."""

import grpc
from sluice.v1 import admin_pb2, admin_pb2_grpc
from support.bad_calls import BadCall, Site, raw
from support.nodes import TIMEOUT_S

Code = grpc.StatusCode
WRITE = "KvIngest/Write"
# WriteRequests made by hand: tag and length of header (field 1) and payload (field 2).
RAW_WRITES = {
    "nothing": (b"", "header"), "noise": (b"\xff" * 40, "message"), "half a header": (b"\x0a\x05sho", "header"),
    "a header that is none": (b"\x0a\x02\xff\xff", "header"), "a header of 4 GiB": (b"\x0a\xff\xff\xff\xff\x0f", "header"),
    "a header of 4097 bytes": (b"\x0a\x81\x20" + bytes(4097), "header"),
    "a payload alone": (b"\x12\x04late", "header"), "a payload of 4 GiB": (b"\x0a\x00\x12\xff\xff\xff\xff\x0f", "payload"),
    "a header alone": (b"\x0a\x00", "payload"), "a group without end": (b"\x0b" * 200, "message"),
    "an end without group": (b"\x0c", "message"), "field 0": (b"\x00\x00", "message"),
    "an endless varint": (b"\x78" + b"\xff" * 11, "message"),
}


GARBAGE = {"noise": b"\xff\xff\xff\xff\x07garbage", "not UTF-8": b"\x0a\x02\xff\xfe", "cut": b"\x0a\x7f"}
# The first field of these requests is a string.
STRING_FIRST = ("Decode/Cancel", "KvIngest/Commit", "KvIngest/Abort", "KvIngest/GetTransfer")


def wire_cases() -> list[BadCall]:
    def with_metadata(site: Site):
        # The call has a connection of its own, because the transport may close it afterwards.
        with grpc.insecure_channel(site.node.address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            return admin_pb2_grpc.AdminStub(channel).GetCapacity(
                admin_pb2.GetCapacityRequest(), timeout=TIMEOUT_S, metadata=[("x-large", "y" * 100_000)])

    def compressed(algorithm):
        return lambda site: site.node.admin.ListSequences(
            admin_pb2.ListSequencesRequest(limit=5), timeout=TIMEOUT_S, compression=algorithm)

    cases = [BadCall(f"Write {name}", raw("stream_unary", WRITE, body), field=field)
             for name, (body, field) in RAW_WRITES.items()]
    cases += [BadCall(f"{method} {name}", raw("unary_unary", method, body), field="message")
              for method in STRING_FIRST for name, body in GARBAGE.items()]
    cases += [BadCall(f"{method} noise", raw("unary_unary", method, GARBAGE["noise"]), field="message")
              for method in ("KvIngest/Reserve", "Admin/ListSequences", "Admin/GetModel", "Admin/GetCapacity")]
    cases += [BadCall(f"Generate {name}", raw("unary_stream", "Decode/Generate", body), field="message")
              for name, body in GARBAGE.items()]
    cases += [BadCall(f"Reserve {name}", raw("unary_unary", "KvIngest/Reserve", body), field="message")
              for name, body in {
                  "a tenant that is not UTF-8": b"\x0a\x05\x32\x03a\xc3\x28",
                  "a key of half a surrogate": b"\x12\x03\xed\xa0\x80",
                  # Groups of an unknown field, nested deeper than protobuf parses.
                  "300 nested groups": b"\xfb\x01" * 300 + b"\xfc\x01" * 300}.items()]
    cases += [
        BadCall("Reserve 9 MiB", raw("unary_unary", "KvIngest/Reserve", bytes(9 << 20)), Code.RESOURCE_EXHAUSTED,
                words="larger than max"),
        BadCall("Generate 9 MiB", raw("unary_stream", "Decode/Generate", bytes(9 << 20)), Code.RESOURCE_EXHAUSTED,
                words="larger than max"),
        BadCall("100 kB of metadata", with_metadata, Code.RESOURCE_EXHAUSTED, words="metadata"),
        BadCall("gzip", compressed(grpc.Compression.Gzip), Code.UNIMPLEMENTED, words="gzip"),
        BadCall("deflate", compressed(grpc.Compression.Deflate), Code.UNIMPLEMENTED, words="deflate"),
        *[BadCall(f"method {m}", raw("unary_unary", m, b""), Code.UNIMPLEMENTED)
          for m in ("Decode/Nonsense", "Nonsense/Generate", "KvIngest/WriteRaw")],
    ]
    return cases


WIRE_CALLS = wire_cases()

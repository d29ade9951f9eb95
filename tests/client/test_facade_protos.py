"""proto/facade against the protos of the gateway's own package: names, numbers and types agree.

In answers the gateway's messages have more fields than ours, which the gateway can do without. In requests they have
no other fields, so that a node sees everything that it is asked for.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from smg_grpc_proto.generated import common_pb2, sglang_scheduler_pb2, vllm_engine_pb2

PROTO = Path(__file__).resolve().parents[2] / "proto"
# Messages of ours that stand for the gateway's where the content is refused or ignored, unread.
STAND_INS = ("Unsupported", "Ignored")
SERVICES = {"vllm.grpc.engine.VllmEngine", "sglang.grpc.scheduler.SglangScheduler"}


def messages_of(files) -> dict[str, descriptor_pb2.DescriptorProto]:
    """Full name -> message, nested ones included."""
    found = {}

    def add(scope, message):
        name = f"{scope}.{message.name}"
        found[name] = message
        for nested in message.nested_type:
            add(name, nested)

    for file in files:
        for message in file.message_type:
            add(file.package, message)
    return found


def methods_of(files) -> dict[str, tuple]:
    """Full name of each method -> the types it takes and gives, and whether they stream."""
    return {f"{file.package}.{service.name}.{m.name}":
            (m.input_type.lstrip("."), m.output_type.lstrip("."), m.client_streaming, m.server_streaming)
            for file in files for service in file.service for m in service.method}


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    out = tmp_path_factory.mktemp("descriptors") / "facade.pb"
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", "-I", ".", f"--descriptor_set_out={out}",
                    *(f"facade/{p.name}" for p in sorted((PROTO / "facade").glob("*.proto")))],
                   cwd=PROTO, check=True, timeout=60)
    return descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file


@pytest.fixture(scope="module")
def theirs():
    files = []
    for module in (common_pb2, vllm_engine_pb2, sglang_scheduler_pb2):
        files.append(descriptor_pb2.FileDescriptorProto())
        module.DESCRIPTOR.CopyToProto(files[-1])
    return files


def is_stand_in(type_name: str) -> bool:
    return type_name.rpartition(".")[2] in STAND_INS


def test_every_field_has_the_gateways_number_and_type(ours, theirs):
    gateways = messages_of(theirs)
    compared = 0
    for name, message in messages_of(ours).items():
        if is_stand_in(name):
            continue
        assert name in gateways, f"the gateway has no message {name}"
        fields = {f.name: f for f in gateways[name].field}
        for field in message.field:
            where = f"{name}.{field.name}"
            assert field.name in fields, f"the gateway has no {where}"
            other = fields[field.name]
            for part in ("number", "type", "label", "proto3_optional"):
                assert getattr(field, part) == getattr(other, part), f"{where}: {part}"
            if not is_stand_in(field.type_name):
                assert field.type_name == other.type_name, where
            compared += 1
    assert compared > 150


def test_every_method_takes_and_gives_what_the_gateways_does(ours, theirs):
    gateways, here = methods_of(theirs), methods_of(ours)
    assert {name.rpartition(".")[0] for name in here} == SERVICES
    for name, method in here.items():
        assert gateways.get(name) == method, name


def test_no_field_of_a_request_is_left_out(ours, theirs):
    gateways, here = messages_of(theirs), messages_of(ours)
    open_names = {taken for taken, *_ in methods_of(ours).values()}
    seen = set()
    while open_names:
        name = open_names.pop()
        seen.add(name)
        missing = {f.name for f in gateways[name].field} - {f.name for f in here[name].field}
        assert not missing, f"{name} lacks {missing}"
        open_names |= {f.type_name.lstrip(".") for f in here[name].field
                       if f.type_name.lstrip(".") in here and not is_stand_in(f.type_name)} - seen
    assert len(seen) > 15

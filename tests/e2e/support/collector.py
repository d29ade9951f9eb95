"""An OpenTelemetry collector: a gRPC server that keeps the spans that it is sent."""

import importlib
import subprocess
import sys
import threading
import time
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path

import grpc
from support.nodes import ROOT, SCALE

PROTOS = ("common/v1/common.proto", "resource/v1/resource.proto", "trace/v1/trace.proto",
          "collector/trace/v1/trace_service.proto")


def stubs(folder: Path):
    """Makes Python stubs of OTLP in `folder`, and returns the modules of its service."""
    done = subprocess.run([sys.executable, "-m", "grpc_tools.protoc", "-I", ROOT / "proto", f"--python_out={folder}",
                           f"--grpc_python_out={folder}", *(f"opentelemetry/proto/{proto}" for proto in PROTOS)],
                          cwd=ROOT / "proto", capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    sys.path.insert(0, str(folder))
    package = "opentelemetry.proto.collector.trace.v1"
    return (importlib.import_module(f"{package}.trace_service_pb2"),
            importlib.import_module(f"{package}.trace_service_pb2_grpc"))


@dataclass
class Span:
    service: str
    name: str
    trace: str
    id: str
    parent: str
    kind: int
    begin: int
    end: int
    failed: bool
    error: str
    tracestate: str
    attributes: dict


def _value(any_value):
    return getattr(any_value, any_value.WhichOneof("value"))


class Collector:
    def __init__(self, modules, credentials: grpc.ServerCredentials | None = None, address: str = "127.0.0.1:0"):
        messages, services = modules
        self._spans: list[Span] = []
        self._lock = threading.Lock()
        outer = self

        class Service(services.TraceServiceServicer):
            def Export(self, request, context):  # noqa: N802 - gRPC's name
                outer._take(request)
                return messages.ExportTraceServiceResponse()

        self.server = grpc.server(futures.ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
        services.add_TraceServiceServicer_to_server(Service(), self.server)
        port = (self.server.add_secure_port(address, credentials) if credentials
                else self.server.add_insecure_port(address))
        self.address = f"127.0.0.1:{port}"
        self.server.start()

    def _take(self, request) -> None:
        with self._lock:
            for resource in request.resource_spans:
                named = {a.key: _value(a.value) for a in resource.resource.attributes}
                for span in (s for scope in resource.scope_spans for s in scope.spans):
                    self._spans.append(Span(
                        named["service.name"], span.name, span.trace_id.hex(), span.span_id.hex(),
                        span.parent_span_id.hex(), span.kind, span.start_time_unix_nano, span.end_time_unix_nano,
                        span.status.code == 2, span.status.message, span.trace_state,
                        {a.key: _value(a.value) for a in span.attributes}))

    def spans(self, **members) -> list[Span]:
        with self._lock:
            return [s for s in self._spans if all(getattr(s, name) == value for name, value in members.items())]

    def wait_for(self, **members) -> Span:
        deadline = time.monotonic() + 20 * SCALE
        while time.monotonic() < deadline:
            if found := self.spans(**members):
                return found[0]
            time.sleep(0.02)
        raise AssertionError(f"no span with {members} among {self.spans()}")

    def stop(self) -> None:
        self.server.stop(0).wait()

"""The router finds the nodes: the real smg with the manifest's flags, at an API server that lists the manifests' pods."""

import json
import re
import socket
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from manifests import ROOT, documents, nodes_of, workloads
from nodes import ENVIRONMENT, SCALE

SMG = ROOT / ".venv/bin/smg"
COMPONENT = "app.kubernetes.io/component"


def pod_of(name: str, address: str, labels: dict, annotations: dict) -> dict:
    return {"metadata": {"name": name, "namespace": "sluice", "uid": f"uid-{name}", "resourceVersion": "1", "labels": labels,
                         "annotations": annotations},
            "spec": {"containers": [{"name": "sluice", "image": "sluice"}]},
            "status": {"phase": "Running", "podIP": address, "conditions": [{"type": "Ready", "status": "True"}]}}


class ApiServer:
    """Answers a list of pods, whatever the selector, and lets a watch wait; nothing else."""

    def __init__(self, pods: list[dict]):
        self.paths = []
        self.ended = threading.Event()
        body = json.dumps({"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": pods}).encode()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                path, _, query = self.path.partition("?")
                outer.paths.append(path)
                watch = "watch=true" in query
                self.send_response(200 if path == "/api/v1/namespaces/sluice/pods" else 403)
                self.send_header("Content-Type", "application/json")
                self.send_header(*(("Transfer-Encoding", "chunked") if watch else ("Content-Length", str(len(body)))))
                self.end_headers()
                if watch:
                    outer.ended.wait(60 * SCALE)
                    self.close_connection = True
                else:
                    self.wfile.write(body)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def config(self) -> str:
        return json.dumps({
            "apiVersion": "v1", "kind": "Config", "current-context": "x",
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{self.server.server_port}"}}],
            "users": [{"name": "u", "user": {}}], "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}]})

    def stop(self):
        self.ended.set()
        self.server.shutdown()
        self.server.server_close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def api():
    """Two nodes' pods, and one that is none of ours."""
    pods = []
    for node in nodes_of(documents("cpu-demo")):
        address = {"prefill": "127.0.0.2", "decode": "127.0.0.3"}[node.labels[COMPONENT]]
        pods.append(pod_of(node.labels[COMPONENT], address, node.labels, node.template["metadata"]["annotations"]))
    pods.append(pod_of("stranger", "127.0.0.4", {"app.kubernetes.io/name": "other", COMPONENT: "decode"}, {}))
    server = ApiServer(pods)
    yield server
    server.stop()


def test_the_router_finds_each_node_in_its_role_and_nobody_else(api, tmp_path, smollm2_tokenizer):
    (router,) = [w for w in workloads(documents("cpu-demo")) if w.program == "smg"]
    node_port = free_port()
    here = {"--host": "127.0.0.1", "--port": str(free_port()), "--prometheus-host": "127.0.0.1",
            "--prometheus-port": str(free_port()), "--model-path": str(smollm2_tokenizer),
            "--service-discovery-port": str(node_port)}
    args = []
    for arg in router.container["args"]:
        flag = arg.split("=")[0]
        args.append(f"{flag}={here.pop(flag)}" if flag in here else arg)
    assert not here
    kubeconfig, log = tmp_path / "kubeconfig", tmp_path / "smg.log"
    kubeconfig.write_text(api.config())
    with log.open("w") as out:
        process = subprocess.Popen([SMG, "launch", *args], stdout=out, stderr=subprocess.STDOUT,
                                   env={**ENVIRONMENT, "KUBECONFIG": str(kubeconfig)})
    try:
        deadline = time.monotonic() + 60 * SCALE
        wanted = {(f"127.0.0.2:{node_port}", "Prefill"), (f"127.0.0.3:{node_port}", "Decode")}
        while True:
            found = set(re.findall(r"Registering worker (\S+) \((\w+)\)", log.read_text()))
            if found >= wanted:
                break
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.1)
        assert found == wanted
        # What its role lets it ask.
        assert set(api.paths) == {"/api/v1/namespaces/sluice/pods"}
    finally:
        process.terminate()
        process.wait(30)

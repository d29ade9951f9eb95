"""The router finds the nodes: the real smg runs with the manifest's flags, at an API server that lists the manifests'
pods.
"""

import json
import re
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import requests
from manifests import ROOT, documents, nodes_of, workloads
from support.nodes import ENVIRONMENT, SCALE, Node, free_port
from support.router_lab import add_token_texts, ids_of

SMG = ROOT / ".venv/bin/smg"
PREFILL, DECODE = "127.0.0.2", "127.0.0.3"
COMPONENT = "app.kubernetes.io/component"


def pod_of(name: str, address: str, labels: dict, annotations: dict) -> dict:
    return {"metadata": {"name": name, "namespace": "sluice", "uid": f"uid-{name}", "resourceVersion": "1", "labels": labels,
                         "annotations": annotations},
            "spec": {"containers": [{"name": "sluice", "image": "sluice"}]},
            "status": {"phase": "Running", "podIP": address, "conditions": [{"type": "Ready", "status": "True"}]}}


class ApiServer:
    """Answers a list of pods whatever the selector, and lets a watch wait; it serves nothing else."""

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


def pods_of_nodes(annotations: dict) -> list[dict]:
    """The manifests' pods, a prefill and a decode node, and a pod that is neither."""
    pods = []
    for node in nodes_of(documents("cpu-demo")):
        address = {"prefill": PREFILL, "decode": DECODE}[node.labels[COMPONENT]]
        pods.append(pod_of(node.labels[COMPONENT], address, node.labels,
                           {**node.template["metadata"]["annotations"], **annotations}))
    return [*pods, pod_of("stranger", "127.0.0.4", {"app.kubernetes.io/name": "other", COMPONENT: "decode"}, {})]


class Discovering:
    """smg with the manifest's flags, at an API server of its own; a context manager."""

    def __init__(self, folder, model, node_port: int, annotations: dict):
        self.port, self.log = free_port(), folder / "smg.log"
        (router,) = [w for w in workloads(documents("cpu-demo")) if w.program == "smg"]
        here = {"--host": "127.0.0.1", "--port": str(self.port), "--prometheus-host": "127.0.0.1",
                "--prometheus-port": str(free_port()), "--model-path": str(model), "--service-discovery-port": str(node_port)}
        args = []
        for arg in router.container["args"]:
            flag = arg.split("=")[0]
            args.append(f"{flag}={here.pop(flag)}" if flag in here else arg)
        assert not here
        self.api = ApiServer(pods_of_nodes(annotations))
        kubeconfig = folder / "kubeconfig"
        kubeconfig.write_text(self.api.config())
        with self.log.open("w") as out:
            self.process = subprocess.Popen([SMG, "launch", *args, "--worker-startup-check-interval", "1"], stdout=out,
                                            stderr=subprocess.STDOUT, env={**ENVIRONMENT, "KUBECONFIG": str(kubeconfig)})

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.api.stop()

    def wait(self, found):
        """Waits until found() returns something, and returns it."""
        deadline = time.monotonic() + 60 * SCALE
        while not (what := found()):
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()[-3000:]
            time.sleep(0.1)
        return what

    def healthy(self) -> bool:
        try:
            workers = requests.get(f"http://127.0.0.1:{self.port}/workers", timeout=5).json()["workers"]
        except (requests.RequestException, KeyError, ValueError):
            return False
        return sum(worker["is_healthy"] for worker in workers) == 2

    def chat(self) -> str | None:
        """Returns the answer, or None while the router has not loaded the tokenizer."""
        answer = requests.post(f"http://127.0.0.1:{self.port}/v1/chat/completions", timeout=30, json={
            "model": "tiny", "messages": [{"role": "user", "content": "<5><6><7>"}], "temperature": 0, "max_tokens": 8})
        if "tokenizer_not_ready" in answer.text:
            return None
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["message"]["content"]


def test_the_router_finds_each_node_in_its_role_and_nobody_else(tmp_path, smollm2_tokenizer):
    port = free_port()
    wanted = {(f"{PREFILL}:{port}", "Prefill"), (f"{DECODE}:{port}", "Decode")}
    with Discovering(tmp_path, smollm2_tokenizer, port, {}) as router:
        def found():
            return set(re.findall(r"Registering worker (\S+) \((\w+)\)", router.log.read_text()))
        router.wait(lambda: found() >= wanted)
        assert found() == wanted
        # The requests that its role allows.
        assert set(router.api.paths) == {"/api/v1/namespaces/sluice/pods"}


@pytest.mark.parametrize("gateway", ["vllm", "sglang"])
def test_nodes_that_were_found_answer_chats(gateway, tmp_path, tiny_model):
    """The pods state their port once more for SGLang's protocol, as deploy/README.md says."""
    model = add_token_texts(tiny_model, tmp_path / "text")
    port = free_port()
    annotations = {"sglang.ai/bootstrap-port": str(port)} if gateway == "sglang" else {}
    nodes = []
    try:
        for program, address in (("sluice-prefill", PREFILL), ("sluice-server", DECODE)):
            (tmp_path / program).mkdir()
            nodes.append(Node(program, model, tmp_path / program, "--gateway", gateway, "--served-model-name", "tiny",
                              "--hbm-bytes", "4MiB", listen=f"{address}:{port}"))
        with Discovering(tmp_path, model, port, annotations) as router:
            router.wait(router.healthy)
            assert len(ids_of(router.wait(router.chat))) == 8
    finally:
        for node in nodes:
            node.stop()

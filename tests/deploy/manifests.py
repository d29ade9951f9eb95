"""Builds deploy/kubernetes with kustomize and takes the result apart."""

import copy
import functools
import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import jsonschema
import kubernetes_validate
import yaml

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = ROOT / "deploy/kubernetes"
KUBECTL = ROOT / ".venv/bin/kubectl"
OVERLAYS = sorted(path.name for path in (KUBERNETES / "overlays").iterdir())
# Version of the API server for which the manifests are checked.
VERSION = "1.34"
POD_ADDRESS = "10.0.0.7"
SCHEMAS = {path.stem: json.loads(path.read_text()) for path in (ROOT / "tests/deploy/schemas").glob("*.json")}
UNITS = {"": 1, "m": 1e-3, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40,
         "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


@functools.cache
def built(overlay: str) -> list[dict]:
    done = subprocess.run([KUBECTL, "kustomize", KUBERNETES / "overlays" / overlay], capture_output=True, text=True,
                          check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def documents(overlay: str) -> list[dict]:
    """Returns the documents of an overlay, fresh each time, because a caller may change them."""
    return copy.deepcopy(built(overlay))


def of_kind(docs: list[dict], *kinds: str) -> list[dict]:
    return [doc for doc in docs if doc["kind"] in kinds]


def quantity(text: str) -> float:
    number, unit = re.fullmatch(r"([0-9.]+) ?([A-Za-z]*)", str(text)).groups()
    return float(number) * UNITS[unit]


@dataclass
class Workload:
    """A pod template, and the objects around it."""

    owner: dict
    template: dict

    @property
    def name(self) -> str:
        return f"{self.owner['kind']}/{self.owner['metadata']['name']}/{self.labels.get('app.kubernetes.io/component', '')}"

    @property
    def labels(self) -> dict:
        return self.template["metadata"]["labels"]

    @property
    def pod(self) -> dict:
        return self.template["spec"]

    @property
    def container(self) -> dict:
        (only,) = self.pod["containers"]
        return only

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container["ports"]}

    @property
    def program(self) -> str:
        """Returns the container's first process, which a shell may become once it has started others."""
        command = self.container["command"]
        return command[0] if command != ["sh", "-c"] else re.search(r"exec (\S+)$", self.script, re.MULTILINE)[1]

    @property
    def script(self) -> str:
        """Returns what a shell runs first, or nothing."""
        return self.container["args"][0] if self.container["command"] == ["sh", "-c"] else ""

    @property
    def arguments(self) -> list[str]:
        return [] if self.script else self.container.get("args", [])

    @property
    def ranks(self) -> int:
        """Returns how many ranks run in the container."""
        return 1 if self.by_grpc else int(self.env.get("SLUICE_TENSOR_PARALLEL", 1))

    @property
    def by_grpc(self) -> bool:
        """Returns whether it is one rank of a node whose others are in pods of their own."""
        return self.env.get("SLUICE_RANK_TRANSPORT") == "grpc"

    @property
    def env(self) -> dict[str, str]:
        """Returns the environment with $(NAME) filled in from earlier entries, as the kubelet does. A pod has an
        address.
        """
        found = {}
        for entry in self.container.get("env", []):
            if "valueFrom" in entry:
                assert entry["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}
                found[entry["name"]] = POD_ADDRESS
            else:
                found[entry["name"]] = re.sub(r"\$\((\w+)\)", lambda m: found[m[1]], entry["value"])
        return found


def workloads(docs: list[dict]) -> list[Workload]:
    found = [Workload(doc, doc["spec"]["template"]) for doc in of_kind(docs, "Deployment", "StatefulSet")]
    for doc in of_kind(docs, "LeaderWorkerSet"):
        group = doc["spec"]["leaderWorkerTemplate"]
        found += [Workload(doc, group["leaderTemplate"]), Workload(doc, group["workerTemplate"])]
    return found


def nodes_of(docs: list[dict]) -> list[Workload]:
    """Returns the containers that run a program of ours and serve; a rank other than 0 in a pod of its own does not."""
    found = [w for w in workloads(docs) if w.program.startswith("sluice-") and "grpc" in w.ports]
    assert {w.program for w in found} == {"sluice-server", "sluice-prefill"}
    return found


def matches(selector: dict, labels: dict) -> bool:
    assert set(selector) <= {"matchLabels"}, "a selector that this test does not know"
    return selector.get("matchLabels", {}).items() <= labels.items()


def validate(doc: dict) -> None:
    """Checks a document strictly: an unknown key is an error. Kinds of other projects are checked with the schemas in
    this folder.
    """
    if doc["kind"] in SCHEMAS:
        jsonschema.validate(doc, SCHEMAS[doc["kind"]], cls=jsonschema.Draft202012Validator)
        for workload in workloads([doc]):  # the pods of a LeaderWorkerSet are Kubernetes' own
            kubernetes_validate.validate({"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"},
                                          "template": workload.template}, VERSION, strict=True)
    else:
        kubernetes_validate.validate(doc, VERSION, strict=True)

"""The manifests: every overlay builds, keeps to its schemas, and hangs together."""

import importlib.util

import jsonschema
import kubernetes_validate
import pytest
from manifests import OVERLAYS, POD_ADDRESS, ROOT, documents, matches, nodes_of, of_kind, validate, workloads

pytestmark = pytest.mark.parametrize("overlay", OVERLAYS)
REFUSED = (jsonschema.ValidationError, kubernetes_validate.ValidationError)


def test_it_builds_and_every_object_keeps_to_its_schema(overlay):
    docs = documents(overlay)
    names = [(doc["kind"], doc["metadata"]["name"]) for doc in docs]
    assert len(names) > 10 and len(set(names)) == len(names)
    for doc in docs:
        validate(doc)
        assert doc["kind"] == "Namespace" or doc["metadata"]["namespace"] == "sluice", doc["metadata"]


def test_a_key_that_no_schema_knows_is_refused_wherever_it_stands(overlay):
    for index, doc in enumerate(documents(overlay)):
        for spoil in (lambda d: d.update(sepc={}), lambda d: d["metadata"].update(nam="x")):
            broken = documents(overlay)[index]
            spoil(broken)
            with pytest.raises(REFUSED):
                validate(broken)
        for which in range(len(workloads([doc]))):
            broken = documents(overlay)[index]
            workloads([broken])[which].container["livenessprobe"] = {}
            with pytest.raises(REFUSED):
                validate(broken)


def breaches(pod: dict) -> list[str]:
    """Returns where a pod breaks the restricted Pod Security Standard, or has more rights than it needs."""
    found = [f"{key}: not allowed" for key in ("hostNetwork", "hostPID", "hostIPC") if pod.get(key)]
    found += [f"volume {v['name']}: of no allowed kind" for v in pod.get("volumes", [])
              if not set(v) - {"name"} <= {"configMap", "emptyDir", "persistentVolumeClaim", "projected", "secret"}]
    security = pod.get("securityContext", {})
    if not security.get("runAsNonRoot") or security.get("runAsUser", 0) == 0:
        found.append("runAsNonRoot, runAsUser")
    if security.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        found.append("seccompProfile")
    for container in pod["containers"] + pod.get("initContainers", []):
        own = container.get("securityContext", {})
        if own.get("allowPrivilegeEscalation") is not False:
            found.append("allowPrivilegeEscalation")
        if own.get("capabilities") != {"drop": ["ALL"]}:
            found.append("capabilities")
        if not own.get("readOnlyRootFilesystem"):
            found.append("readOnlyRootFilesystem")
        found += [f"hostPort {p['hostPort']}" for p in container.get("ports", []) if "hostPort" in p]
        if set(own) - {"allowPrivilegeEscalation", "capabilities", "readOnlyRootFilesystem"}:
            found.append("container's securityContext says more")
    return found


def test_pods_keep_to_the_restricted_standard_and_the_namespace_enforces_it(overlay):
    docs = documents(overlay)
    (namespace,) = of_kind(docs, "Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    for workload in workloads(docs):
        assert not breaches(workload.pod), workload.name
        for spoil in (lambda w: w.pod.update(hostNetwork=True), lambda w: w.pod["securityContext"].pop("runAsNonRoot"),
                      lambda w: w.container["securityContext"].pop("capabilities"),
                      lambda w: w.pod.update(volumes=[{"name": "x", "hostPath": {"path": "/"}}])):
            (broken,) = [w for w in workloads(documents(overlay)) if w.name == workload.name]
            spoil(broken)
            assert breaches(broken.pod)


def test_the_nodes_are_granted_nothing(overlay):
    docs = documents(overlay)
    accounts = {doc["metadata"]["name"]: doc for doc in of_kind(docs, "ServiceAccount")}
    for node in nodes_of(docs):
        account = accounts[node.pod["serviceAccountName"]]
        assert account["automountServiceAccountToken"] is False and node.pod["automountServiceAccountToken"] is False
    assert not of_kind(docs, "ClusterRole", "ClusterRoleBinding")
    for binding in of_kind(docs, "RoleBinding"):
        for subject in binding["subjects"]:
            assert subject["namespace"] == "sluice" and subject["name"] in accounts and subject["name"] != "sluice"
    for role in of_kind(docs, "Role"):
        assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]


def test_every_name_that_an_object_refers_to_is_there(overlay):
    docs = documents(overlay)
    names = {(doc["kind"], doc["metadata"]["name"]) for doc in docs}
    pods = workloads(docs)
    for pod in pods:
        assert ("ServiceAccount", pod.pod["serviceAccountName"]) in names
        volumes = {v["name"]: v for v in pod.pod.get("volumes", [])}
        assert {m["name"] for m in pod.container.get("volumeMounts", [])} == set(volumes)
        for volume in volumes.values():
            assert "configMap" not in volume or ("ConfigMap", volume["configMap"]["name"]) in names
        if pod.owner["kind"] != "LeaderWorkerSet":
            assert matches(pod.owner["spec"]["selector"], pod.labels)
        for key in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert key not in pod.container or pod.container[key]["httpGet"]["port"] in pod.ports
        assert ":" in pod.container["image"] and not pod.container["image"].endswith(":latest")
        if pod.owner["kind"] == "StatefulSet":
            assert ("Service", pod.owner["spec"]["serviceName"]) in names
    for service in of_kind(docs, "Service"):
        chosen = [p for p in pods if service["spec"]["selector"].items() <= p.labels.items()]
        assert chosen, service["metadata"]
        for port in service["spec"]["ports"]:
            assert all(port["targetPort"] in p.ports for p in chosen)
    for budget in of_kind(docs, "PodDisruptionBudget"):
        assert len([p for p in pods if matches(budget["spec"]["selector"], p.labels)]) == 1
    for scaler in of_kind(docs, "HorizontalPodAutoscaler"):
        target = scaler["spec"]["scaleTargetRef"]
        assert (target["kind"], target["name"]) in names
    scaled = [doc["spec"]["scaleTargetRef"] for doc in of_kind(docs, "ScaledObject")]
    assert {(target["kind"], target["name"]) for target in scaled} <= names
    # KEDA makes an autoscaler of its own for its target, and two of them would pull it to and fro.
    targets = [*scaled, *(doc["spec"]["scaleTargetRef"] for doc in of_kind(docs, "HorizontalPodAutoscaler"))]
    assert len({(target["kind"], target["name"]) for target in targets}) == len(targets)
    for binding in of_kind(docs, "RoleBinding"):
        assert ("Role", binding["roleRef"]["name"]) in names
    for monitor in of_kind(docs, "PodMonitor"):
        chosen = [p for p in pods if matches(monitor["spec"]["selector"], p.labels)]
        assert len(chosen) == (2 if monitor["metadata"]["name"] == "sluice" else 1)
        assert all(e["port"] in p.ports for e in monitor["spec"]["podMetricsEndpoints"] for p in chosen)


def allowed(policies: list[dict], direction: str, pod: dict, peer: dict, port: int) -> bool:
    """Returns whether the policies let `pod` take (ingress) or make (egress) a call of `peer` on a TCP port."""
    side = "from" if direction == "ingress" else "to"
    for policy in policies:
        spec = policy["spec"]
        if not matches(spec["podSelector"], pod):
            continue
        for rule in spec.get(direction, []):
            open_ports = {p["port"] for p in rule["ports"] if p["protocol"] == "TCP"}
            peers = rule.get(side)
            named = peers is None or any("podSelector" in p and matches(p["podSelector"], peer) for p in peers)
            if named and port in open_ports:
                return True
    return False


def test_the_network_lets_through_what_the_nodes_need_and_nothing_else(overlay):
    docs = documents(overlay)
    policies = of_kind(docs, "NetworkPolicy")
    assert any(p["spec"]["podSelector"] == {} and set(p["spec"]["policyTypes"]) == {"Ingress", "Egress"} and
               "ingress" not in p["spec"] and "egress" not in p["spec"] for p in policies)
    nodes = nodes_of(docs)
    router, stranger = {"app.kubernetes.io/name": "smg"}, {"app.kubernetes.io/name": "other"}
    for node in nodes:
        grpc, admin = node.ports["grpc"], node.ports["admin"]
        for other in nodes:
            assert allowed(policies, "ingress", node.labels, other.labels, grpc)
            assert allowed(policies, "egress", node.labels, other.labels, grpc)
            assert not allowed(policies, "ingress", node.labels, other.labels, admin)
        assert allowed(policies, "ingress", node.labels, router, grpc)
        for port in (grpc, admin):
            assert not allowed(policies, "ingress", node.labels, stranger, port)
            assert not allowed(policies, "egress", node.labels, stranger, port)
        watched = [r for p in policies if matches(p["spec"]["podSelector"], node.labels)
                   for r in p["spec"].get("ingress", [])
                   if {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}} in r.get("from", [])]
        open_ports = [q["port"] for r in watched for q in r["ports"]]
        ranks = max(other.ranks for other in nodes)
        assert open_ports == [admin + rank for rank in range(ranks)]
    for pod in workloads(docs):
        if pod.labels == router:
            assert allowed(policies, "egress", router, nodes[0].labels, nodes[0].ports["grpc"])
            assert allowed(policies, "ingress", router, stranger, pod.ports["http"])


def test_ranks_in_pods_of_their_own_reach_one_another_and_nobody_else_does(overlay):
    docs = documents(overlay)
    policies = of_kind(docs, "NetworkPolicy")
    ranks = [w for w in workloads(docs) if w.by_grpc]
    others = [w.labels for w in workloads(docs) if not w.by_grpc] + [{"app.kubernetes.io/name": "other"}]
    for one in ranks:
        port = ranks[0].ports["ranks"]
        for other in ranks:
            assert allowed(policies, "ingress", one.labels, other.labels, port)
            assert allowed(policies, "egress", one.labels, other.labels, port)
        for stranger in others:
            assert not allowed(policies, "ingress", one.labels, stranger, port)
    assert ranks or overlay != "ranks-hosts"


def test_prefill_nodes_reach_the_ranks_that_take_their_own_caches(overlay):
    docs = documents(overlay)
    policies = of_kind(docs, "NetworkPolicy")
    takes = [w for w in workloads(docs) if w.env.get("SLUICE_RANK_INGEST_LISTEN")]
    senders = [node for node in nodes_of(docs) if node.program == "sluice-prefill"]
    stranger = {"app.kubernetes.io/name": "other"}
    for rank in takes:
        port = rank.ports["ranks-ingest"]
        assert rank.env["SLUICE_RANK_INGEST_LISTEN"] == f"0.0.0.0:{port}"
        assert rank.env["SLUICE_RANK_INGEST_ADVERTISE"] == f"{POD_ADDRESS}:{port}"
        for sender in senders:
            assert allowed(policies, "ingress", rank.labels, sender.labels, port)
            assert allowed(policies, "egress", sender.labels, rank.labels, port)
        assert not allowed(policies, "ingress", rank.labels, stranger, port)
    assert takes or overlay != "ranks-hosts"


def test_a_pool_has_the_decode_nodes_and_its_picker_and_gateway_reach_their_ports(overlay):
    docs = documents(overlay)
    policies = of_kind(docs, "NetworkPolicy")
    for pool in of_kind(docs, "InferencePool"):
        spec = pool["spec"]
        chosen = [node for node in nodes_of(docs) if matches(spec["selector"], node.labels)]
        assert {node.program for node in chosen} == {"sluice-server"}
        picker = {"app.kubernetes.io/name": spec["endpointPickerRef"]["name"]}
        gateway = {"gateway.networking.k8s.io/gateway-name": "inference-gateway"}
        assert allowed(policies, "ingress", picker, gateway, spec["endpointPickerRef"]["port"]["number"])
        for node in chosen:
            (port,) = spec["targetPorts"]
            assert port["number"] == node.ports["grpc"] and spec["appProtocol"] == "kubernetes.io/h2c"
            assert allowed(policies, "ingress", node.labels, gateway, node.ports["grpc"])
            assert not allowed(policies, "ingress", node.labels, gateway, node.ports["admin"])
            for direction, pod, peer in (("ingress", node.labels, picker), ("egress", picker, node.labels)):
                assert allowed(policies, direction, pod, peer, node.ports["admin"])
                assert not allowed(policies, direction, pod, peer, node.ports["grpc"])
            said = (ROOT / "deploy/README.md").read_text()
            assert f"--model-server-metrics-port={node.ports['admin']}" in said and f"--pool-name={pool['metadata']['name']}" in said
    assert overlay != "h100-pool" or of_kind(docs, "InferencePool")


def test_the_rules_are_those_that_promtool_tests(overlay):
    spec = importlib.util.spec_from_file_location("make", ROOT / "deploy/prometheus/make_prometheus_rule.py")
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    assert make.TARGET.read_text() == make.manifest(), "run deploy/prometheus/make_prometheus_rule.py"
    assert of_kind(documents(overlay), "PrometheusRule")

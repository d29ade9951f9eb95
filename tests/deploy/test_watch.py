"""Compares the dashboard, rules and autoscalers with the metrics that nodes export, and runs all of them in a real
Prometheus.
"""

import json
import re
import signal
import subprocess
import time
import urllib.parse
import urllib.request

import pytest
import yaml
from manifests import OVERLAYS, ROOT, documents, of_kind
from sluice.v1 import decode_pb2, prefill_pb2
from support.nodes import SCALE, TIMEOUT_S, free_port, greedy, tokens_of

PROMETHEUS = ROOT / ".venv/bin/prometheus"
DASHBOARD = json.loads((ROOT / "deploy/grafana/sluice.json").read_text())
RULES = yaml.safe_load((ROOT / "deploy/prometheus/sluice.rules.yml").read_text())
ADAPTER = yaml.safe_load((ROOT / "deploy/prometheus/adapter.yml").read_text())
RECORDED = {rule["record"] for group in RULES["groups"] for rule in group["rules"] if "record" in rule}
NAME = re.compile(r"\b(?:instance:)?(?:sluice|process|vllm)[_:][\w:]+|\bup\b|\bALERTS\b")


def queries() -> dict[str, str]:
    """Returns panel and letter -> query, with the dashboard's variable filled in."""
    return {f"{panel['title']} {target['refId']}": target["expr"].replace("$instance", ".*")
            for panel in DASHBOARD["panels"] for target in panel.get("targets", [])}


def known() -> set[str]:
    header = (ROOT / "src/metrics/metric_names.h").read_text()
    names = dict(re.findall(r'inline constexpr Metric k\w+\{\s*"([^"]+)",\s*Type::k(\w+)', header))
    assert len(names) > 30
    return {"up", "ALERTS"} | RECORDED | set(names) | {
        name + suffix for name, kind in names.items() if kind == "Histogram" for suffix in ("_bucket", "_count", "_sum")}


def test_every_query_of_the_dashboard_names_what_exists():
    assert len(queries()) > 30
    for panel, query in queries().items():
        used = set(NAME.findall(query))
        assert used, (panel, query)
        assert used <= known(), (panel, used - known())
    (variable,) = [v for v in DASHBOARD["templating"]["list"] if v["type"] == "query"]
    assert NAME.findall(variable["query"]["query"])[0] in known()


def test_the_panels_lie_side_by_side_and_say_what_they_show():
    taken = set()
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & taken and place["x"] + place["w"] <= 24
        taken |= cells
        assert panel["type"] == "row" or (panel["description"] and panel["fieldConfig"]["defaults"]["unit"])
    assert [p["title"] for p in DASHBOARD["panels"] if p["type"] == "row"] == [
        "Is it serving?", "How fast?", "What limits it?", "Which tier is full?"]


def test_autoscalers_ask_for_what_the_adapter_makes_of_gauges_that_exist():
    served = {}
    for rule in ADAPTER["rules"]:
        (gauge,) = NAME.findall(rule["seriesQuery"])
        assert gauge in known()
        served[rule["name"]["as"]] = gauge
    asked = {metric["pods"]["metric"]["name"] for overlay in OVERLAYS
             for scaler in of_kind(documents(overlay), "HorizontalPodAutoscaler") for metric in scaler["spec"]["metrics"]}
    assert asked == set(served)


def keda_queries() -> set[str]:
    return {trigger["metadata"]["query"] for overlay in OVERLAYS for scaler in of_kind(documents(overlay), "ScaledObject")
            for trigger in scaler["spec"]["triggers"]}


def test_keda_asks_for_the_gauges_of_the_autoscalers():
    asked = {name for query in keda_queries() for name in NAME.findall(query)}
    assert asked == {NAME.findall(rule["seriesQuery"])[0] for rule in ADAPTER["rules"]}


def test_the_jobs_of_the_monitors_are_those_of_rules_and_dashboard():
    jobs = set()
    for overlay in OVERLAYS:
        for monitor in of_kind(documents(overlay), "PodMonitor"):
            (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
            jobs |= {r["replacement"] for r in endpoint["relabelings"] if r["targetLabel"] == "job"}
    assert jobs == {"sluice", "sluice-prefill", "sluice-ranks"}
    said = [*queries().values(), *keda_queries(), *(rule["expr"] for group in RULES["groups"] for rule in group["rules"])]
    for text in said:
        for pattern in re.findall(r'job=~?"([^"]*)"', text):
            assert any(re.fullmatch(pattern, job) for job in jobs), text


class Prometheus:
    """A real Prometheus on a free port, which scrapes a pair of nodes every second."""

    def __init__(self, folder, targets: dict[str, str]):
        self.address = f"127.0.0.1:{free_port()}"
        rules = folder / "sluice.rules.yml"
        rules.write_text((ROOT / "deploy/prometheus/sluice.rules.yml").read_text())
        config = folder / "prometheus.yml"
        config.write_text(yaml.safe_dump({
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(rules)],
            "scrape_configs": [{"job_name": job, "static_configs": [{"targets": [target]}]}
                               for job, target in targets.items()]}))
        self.log = folder / "prometheus.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [PROMETHEUS, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
                 f"--web.listen-address={self.address}", "--storage.tsdb.retention.time=1h"], stdout=log,
                stderr=subprocess.STDOUT)

    def get(self, path: str, **parameters: str):
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"http://{self.address}/api/v1/{path}?{query}", timeout=30) as answer:
            body = json.load(answer)
        assert body["status"] == "success", body
        return body["data"]

    def values(self, query: str) -> list[tuple[dict, float]]:
        return [(found["metric"], float(found["value"][1])) for found in self.get("query", query=query)["result"]]

    def wait(self, holds, what: str, seconds: float = 40 * SCALE) -> None:
        deadline = time.monotonic() + seconds
        while True:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            try:
                if holds():
                    return
            except OSError:
                pass  # Prometheus is starting
            assert time.monotonic() < deadline, f"{what}\n{self.log.read_text()[-3000:]}"
            time.sleep(0.2)


@pytest.fixture(scope="module")
def prometheus(pair, tmp_path_factory):
    decode, prefill = pair
    made = Prometheus(tmp_path_factory.mktemp("prometheus"), {"sluice": decode.addresses["admin_listen"],
                                                              "sluice-prefill": prefill.addresses["admin_listen"]})
    yield made
    made.process.terminate()
    made.process.wait(30)


def one_answer(pair, key: str) -> int:
    """Sends a prompt through both nodes and returns the tokens."""
    decode, prefill = pair
    answer = prefill.prefill.Run(prefill_pb2.RunRequest(
        prompt_token_ids=[1, 2, 3, 4, 5, 6, 7, 8], decode_address=decode.address, rendezvous_key=key,
        sampling=greedy(max_tokens=16, ignore_eos=True)), timeout=TIMEOUT_S)
    tokens, _ = tokens_of(decode.decode.Generate(decode_pb2.GenerateRequest(
        transfer_id=answer.transfer_id, sampling=greedy(max_tokens=16, ignore_eos=True)), timeout=TIMEOUT_S))
    return len(tokens)


def test_a_real_prometheus_scrapes_both_nodes_and_evaluates_rules_and_dashboard(prometheus, pair):
    prometheus.wait(lambda: sorted(v for _, v in prometheus.values("up")) == [1, 1], "both nodes are up")
    sent = 0
    def rates():
        nonlocal sent
        one_answer(pair, f"room{sent}")
        sent += 1
        return prometheus.values("instance:sluice_output_tokens:rate5m > 0")
    prometheus.wait(rates, "tokens have a rate")
    exact = prometheus.values('sluice_requests_total{job="sluice",outcome="finished_length",reason="MAX_TOKENS"}')
    assert 0 < exact[0][1] <= sent
    prometheus.wait(lambda: prometheus.values('sluice_requests_total{job="sluice-prefill",outcome="handed_over"}')[0][1] == sent,
                    "prompts are counted")
    rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert len(rules) == sum(len(group["rules"]) for group in RULES["groups"])
    for rule in rules:
        assert rule["health"] == "ok", (rule["name"], rule.get("lastError"))

    def alerts() -> list[str]:
        groups = prometheus.get("rules")["groups"]
        return [rule["name"] for group in groups for rule in group["rules"] if rule.get("state", "inactive") != "inactive"]
    # A scrape in the midst of an answer may see a sequence and no step yet, which is over with the next one.
    prometheus.wait(lambda: not alerts(), "no alert is pending")
    for name in RECORDED:
        assert prometheus.values(name), name
    # An answer is empty or not a number where nothing was refused, selected or preempted; every other panel shows
    # something.
    quiet = {"Errors and refusals by reason A", "Refused for lack of room A", "Refused for lack of room B",
             "Selected tokens that were in HBM A"}
    for panel, query in queries().items():
        assert bool(prometheus.values(query)) or panel in quiet, (panel, query)
    for query in keda_queries():  # the operator's Prometheus adds the namespace
        ((_, value),) = prometheus.values(query.replace(',namespace="sluice"', ""))
        assert value >= 0


def test_a_node_that_dies_is_soon_an_alert(prometheus, pair):
    prometheus.wait(lambda: sorted(v for _, v in prometheus.values("up")) == [1, 1], "both nodes are up")
    _, prefill = pair
    prefill.process.send_signal(signal.SIGKILL)
    prefill.process.wait(30)
    def pending():
        return [alert for alert in prometheus.get("alerts")["alerts"] if alert["labels"]["alertname"] == "SluiceDown"]
    prometheus.wait(pending, "SluiceDown is pending")
    (alert,) = pending()
    assert alert["labels"]["job"] == "sluice-prefill" and alert["state"] == "pending"
    assert alert["annotations"]["summary"].startswith(prefill.addresses["admin_listen"])

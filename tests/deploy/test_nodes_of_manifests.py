"""The settings, ports, probes, times to end and memory that the manifests give to the programs."""

import contextlib
import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml
from manifests import OVERLAYS, POD_ADDRESS, ROOT, Workload, documents, nodes_of, of_kind, quantity, workloads
from support.nodes import BIN, ENVIRONMENT, SCALE, free_port, run

# HBM of the GPUs that the overlays' nodeSelector names, as their driver reports it.
GPU_BYTES = {"NVIDIA-H100-80GB-HBM3": 81559 << 20, "NVIDIA-H200": 143771 << 20}
# ExitWithin of src/server/node.cc: kFlushTime + kEndTime.
END_SECONDS = 6
# kGrace from src/server/prefill_node.cc.
PREFILL_GRACE_SECONDS = 30
SMG = ROOT / ".venv/bin/smg"
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


def config_of(docs: list[dict], node: Workload, folder) -> dict:
    """Returns the configuration in force in a container, as the program itself prints it."""
    environment = dict(node.env)
    (data,) = [doc["data"] for doc in of_kind(docs, "ConfigMap") if doc["metadata"]["name"] == "sluice-config"]
    mounts = {m["mountPath"] for m in node.container["volumeMounts"]}
    if "SLUICE_CONFIG" in environment:
        mount, name = environment["SLUICE_CONFIG"].rsplit("/", 1)
        assert mount in mounts
        file = folder / name
        file.write_text(data[name])
        assert (ROOT / "configs" / name).read_text() == data[name]
        environment["SLUICE_CONFIG"] = str(file)
    done = run(BIN / node.program, *node.arguments, "--check-config", env=environment)
    assert done.returncode == 0, done.stderr
    return yaml.safe_load(done.stdout)


def seconds(text) -> float:
    return float(str(text).removesuffix("s"))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_program_takes_its_settings_and_listens_where_the_manifest_says(overlay, tmp_path):
    docs = documents(overlay)
    for node in nodes_of(docs):
        config = config_of(docs, node, tmp_path)
        assert config["listen"] == f"0.0.0.0:{node.ports['grpc']}"
        assert config["admin_listen"] == f"0.0.0.0:{node.ports['admin']}"
        if node.program == "sluice-prefill":  # a decode node could not read from 0.0.0.0
            assert config["advertise"] == f"{POD_ADDRESS}:{node.ports['grpc']}"
        assert config["log_format"] == "json" and not config["failpoints"]
        broken = Workload(node.owner, node.template)
        broken.container["env"].append({"name": "SLUICE_HBM_BYTE", "value": "1GiB"})
        with pytest.raises(AssertionError, match="SLUICE_HBM_BYTE"):
            config_of(docs, broken, tmp_path)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_pod_is_given_the_time_that_its_node_takes_to_drain(overlay, tmp_path):
    docs = documents(overlay)
    for node in nodes_of(docs):
        before = node.container["lifecycle"]["preStop"]["sleep"]["seconds"]
        if node.program == "sluice-server":
            drain = seconds(config_of(docs, node, tmp_path)["drain_timeout_seconds"]) + END_SECONDS
        else:
            drain = PREFILL_GRACE_SECONDS
        spare = node.pod["terminationGracePeriodSeconds"] - (before + drain)
        assert 2 <= spare <= 15, (node.name, spare)


def test_the_times_to_end_are_those_of_the_sources():
    node = (ROOT / "src/server/node.h").read_text()
    flush, end = (re.search(rf"{name} = absl::Seconds\((\d+)\)", node)[1] for name in ("kFlushTime", "kEndTime"))
    assert int(flush) + int(end) == END_SECONDS
    prefill = (ROOT / "src/server/prefill_node.cc").read_text()
    assert int(re.search(r"kGrace = absl::Seconds\((\d+)\)", prefill)[1]) == PREFILL_GRACE_SECONDS


def plan_bytes(config: dict) -> dict[str, float]:
    """Returns the memory that --print-plan states for a server: the model's, and all of it. It needs the geometry
    alone.
    """
    name = config["model"].rsplit("/", 1)[1]
    model = ROOT / "configs/models" / name
    if not model.is_dir():
        model = ROOT / "tests/fixtures" / name
    flags = [f"--{key.replace('_', '-')}={config[key]}" for key in
             ("max_context", "max_sequences", "chunk_tokens", "policy", "budget_tokens", "hbm_bytes", "dram_bytes",
              "tensor_parallel") if config[key]]
    flags.append(f"--leader={config['leader'] or 'rank-0:7900'}")  # LeaderWorkerSet gives one where there is none
    done = run(BIN / "sluice-server", "--model", model, "--load-format", "dummy", "--device", "cpu", "--threads", "2",
               "--policy-workers", "2", "--print-plan", *flags, timeout=300)
    assert done.returncode == 0, done.stderr
    return {key: quantity(re.search(rf"^{key} +([0-9.]+ [KMGT]iB)", done.stdout, re.MULTILINE)[1])
            for key in ("weights", "workspace", "memory")}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_memory_that_is_configured_fits_into_what_the_pod_gets(overlay, tmp_path):
    docs = documents(overlay)
    configs = {node.program: config_of(docs, node, tmp_path) for node in nodes_of(docs)}
    server, prefill = configs["sluice-server"], configs["sluice-prefill"]
    for key in ("model", "max_context", "block_tokens", "kv_dtype", "device"):
        assert server[key] == prefill[key], key
    plan = plan_bytes(server)
    dram = quantity(server["dram_bytes"])
    spare = 1 << 30
    for node in nodes_of(docs):
        config = configs[node.program]
        resources = node.container["resources"]
        limit = quantity(resources["limits"]["memory"])
        # Pages that are pinned, or touched at the start, cannot be overcommitted.
        assert resources["requests"]["memory"] == resources["limits"]["memory"]
        device = plan["memory"] - dram if node.program == "sluice-server" else (
            plan["weights"] + plan["workspace"] + quantity(config["hbm_bytes"]))
        host = dram * node.ranks if node.program == "sluice-server" else quantity(config["hold_bytes"])
        if config["device"] == "cpu":
            assert device + host + spare <= limit, node.name
            assert "nvidia.com/gpu" not in resources["limits"]
        else:
            # Uploaded weights go through the page cache; a tenth is for it and for the process.
            assert host * 1.05 + 8 * spare <= limit, node.name
            assert resources["limits"]["nvidia.com/gpu"] == str(node.ranks)
            gpu = GPU_BYTES[node.pod["nodeSelector"]["nvidia.com/gpu.product"]]
            assert device + 4 * spare <= gpu, (node.name, device / spare, gpu / spare)
        assert node.container["image"] == ("sluice:cuda" if config["device"] == "cuda" else "sluice:demo")


def nodes_of_ranks() -> list[tuple[str, Workload]]:
    return [(overlay, node) for overlay in OVERLAYS for node in nodes_of(documents(overlay)) if node.ranks > 1]


def test_ranks_share_a_container_a_pod_and_its_memory(tmp_path):
    assert nodes_of_ranks()
    for overlay, node in nodes_of_ranks():
        config = config_of(documents(overlay), node, tmp_path)
        assert config["tensor_parallel"] == node.ranks and config["leader"] and config["rank"] == 0
        (mount,) = [m for m in node.container["volumeMounts"] if m["mountPath"] == "/dev/shm"]
        (volume,) = [v for v in node.pod["volumes"] if v["name"] == mount["name"]]
        assert volume["emptyDir"]["medium"] == "Memory"
        room = quantity(volume["emptyDir"]["sizeLimit"]) - node.ranks * quantity(config["dram_bytes"])
        assert 1 << 30 <= room <= 8 << 30
        # Whatever lies there counts as the memory of the container.
        assert quantity(volume["emptyDir"]["sizeLimit"]) < quantity(node.container["resources"]["limits"]["memory"])
        for rank in range(1, node.ranks):
            assert node.ports[f"admin-rank-{rank}"] == node.ports["admin"] + rank
        assert {node.container[probe]["httpGet"]["port"] for probe in PROBES} == {"admin"}
        watched = [endpoint["port"] for monitor in of_kind(documents(overlay), "PodMonitor")
                   for endpoint in monitor["spec"]["podMetricsEndpoints"]]
        assert sorted(watched) == sorted(port for port in node.ports if port.startswith("admin"))


def test_ranks_in_pods_of_their_own_have_what_their_leader_has(tmp_path):
    """The worker of a group differs from its leader in what it serves, and takes all else from it or from the group."""
    for overlay in OVERLAYS:
        docs = documents(overlay)
        ranks = [w for w in workloads(docs) if w.by_grpc]
        if not ranks:
            assert overlay != "ranks-hosts"
            continue
        leader, worker = ranks
        group = leader.owner["spec"]["leaderWorkerTemplate"]
        assert group["size"] == int(leader.env["SLUICE_TENSOR_PARALLEL"]) == int(worker.env["SLUICE_TENSOR_PARALLEL"])
        assert group["restartPolicy"] == "RecreateGroupOnPodRestart"
        assert worker.container["resources"] == leader.container["resources"]
        assert set(leader.ports) - set(worker.ports) == {"grpc", "ranks"}
        # The leader's own port takes the caches of its heads.
        assert set(worker.ports) - set(leader.ports) == {"ranks-ingest"}
        assert worker.ports["admin"] == leader.ports["admin"] and not leader.env.get("SLUICE_RANK_INGEST_LISTEN")
        # The environment of a LeaderWorkerSet gives leader and rank, and the configuration must not.
        for node in ranks:
            config = config_of(docs, node, tmp_path)
            assert (config["leader"] or "", config["rank"], config["rank_transport"]) == ("", 0, "grpc")
        source = (ROOT / "src/server/ranks.cc").read_text()
        assert f'kWorkerSetPort[] = ":{leader.ports["ranks"]}"' in source


class Container:
    """The container of a node of ranks, without the container: its shell, with a tiny model on the CPU."""

    def __init__(self, node: Workload, model, folder):
        self.address_file = folder / "address.json"
        self.log = folder / "log"
        admin = free_port()
        environment = {key: value for key, value in node.env.items() if key.startswith(("NCCL_", "SLUICE_TENSOR"))}
        environment |= {"SLUICE_MODEL": str(model), "SLUICE_DEVICE": "cpu", "SLUICE_HBM_BYTES": "4MiB",
                        "SLUICE_DRAM_BYTES": "4MiB", "SLUICE_LISTEN": "127.0.0.1:0", "SLUICE_LOG_FORMAT": "json",
                        "SLUICE_ADMIN_LISTEN": f"127.0.0.1:{admin}", "SLUICE_LEADER": f"127.0.0.1:{free_port()}",
                        "SLUICE_ADDRESS_FILE": str(self.address_file)}
        self.admin = [f"http://127.0.0.1:{admin + rank}" for rank in range(node.ranks)]
        command = [*node.container["command"], *node.container["args"]]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT,
                                            env=ENVIRONMENT | environment | {"PATH": f"{BIN}:{os.environ['PATH']}"})
        deadline = time.monotonic() + 60 * SCALE
        while not self.address_file.exists() or not self.address_file.read_text():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)

    def others(self) -> list[int]:
        """Returns the ids of the other ranks' processes that run."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in children if " Z " not in Path(f"/proc/{pid}/stat").read_text()]


@pytest.fixture(name="container")
def _container(tiny_model, tmp_path):
    ((_, node),) = nodes_of_ranks()
    made = Container(node, tiny_model, tmp_path)
    yield made
    for pid in [*(made.others() if made.process.poll() is None else []), made.process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    made.process.wait(30)


def test_a_container_of_ranks_ends_well_on_a_signal(container):
    assert len(container.others()) == len(container.admin) - 1
    for rank, url in enumerate(container.admin):
        assert status(f"{url}/readyz") == 200
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        assert f"\nsluice_rank {rank}\n" in text and f"\nsluice_ranks_alive {len(container.admin)}\n" in text
    container.process.terminate()  # as Kubernetes does
    assert container.process.wait(30 * SCALE) == 0
    assert container.log.read_text().count('"stopped"') == len(container.admin)


def test_a_container_of_ranks_ends_with_a_lost_rank(container):
    os.kill(container.others()[0], signal.SIGKILL)
    assert container.process.wait(30 * SCALE) == 1
    assert "rank 1 " in container.log.read_text()


def status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def test_probes_and_scrapes_ask_for_what_the_nodes_answer(pair):
    asked = {(node.program, node.container[probe]["httpGet"]["path"])
             for overlay in OVERLAYS for node in nodes_of(documents(overlay)) for probe in PROBES}
    scraped = {endpoint["path"] for overlay in OVERLAYS for monitor in of_kind(documents(overlay), "PodMonitor")
               for endpoint in monitor["spec"]["podMetricsEndpoints"]}
    assert len(asked) == 4 and scraped == {"/metrics"}
    for node in pair:
        admin = node.addresses["admin_listen"]
        assert status(f"http://{admin}/no-such-path") == 404
        for path in {path for program, path in asked if program == node.program} | scraped:
            assert status(f"http://{admin}{path}") == 200, (node.program, path)


def router() -> Workload:
    (found,) = [w for w in workloads(documents("cpu-demo")) if w.program == "smg"]
    return found


def test_the_router_takes_its_flags_and_finds_the_nodes_by_their_labels():
    args = router().container["args"]
    text = run(SMG, "launch", "--help").stdout
    known = set(re.findall(r"--[a-z0-9-]+", text))
    assert len(known) > 100
    assert {arg.split("=")[0] for arg in args if arg.startswith("--")} <= known
    assert set(re.findall(r"default: (smg\.ai/[a-z-]+)", text)) >= {"smg.ai/kv-connector"}
    (connector,) = re.findall(r'kSourceConnector\[\] = "(\w+)"', (ROOT / "src/request/source_ref.h").read_text())
    values = dict(arg.split("=", 1) for arg in args if arg.startswith("--") and "=" in arg)
    assert values["--service-discovery-namespace"] == "sluice"
    for flag, program in (("--prefill-selector", "sluice-prefill"), ("--decode-selector", "sluice-server")):
        start = args.index(flag) + 1
        selector = {}
        for arg in args[start:]:
            if arg.startswith("--"):
                break
            selector.update([arg.split("=", 1)])
        for overlay in OVERLAYS:
            for node in nodes_of(documents(overlay)):
                assert (selector.items() <= node.labels.items()) == (node.program == program)
                assert str(node.ports["grpc"]) == values["--service-discovery-port"]
                assert node.template["metadata"]["annotations"]["smg.ai/kv-connector"] == connector
    assert {"http": int(values["--port"]), "metrics": int(values["--prometheus-port"])} == router().ports


def test_the_router_answers_its_probes(smollm2_tokenizer):
    port, metrics = free_port(), free_port()
    process = subprocess.Popen(
        [SMG, "launch", "--host", "127.0.0.1", "--port", str(port), "--pd-disaggregation", "--prefill",
         "grpc://127.0.0.1:1", "--decode", "grpc://127.0.0.1:2", "--model-path", smollm2_tokenizer,
         "--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ENVIRONMENT)
    try:
        deadline = time.monotonic() + 60 * SCALE
        while True:
            try:
                status(f"http://127.0.0.1:{port}/no-such-path")
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
        container = router().container
        assert status(f"http://127.0.0.1:{port}{container['livenessProbe']['httpGet']['path']}") == 200
        # Workers do not answer it.
        assert status(f"http://127.0.0.1:{port}{container['readinessProbe']['httpGet']['path']}") == 503
    finally:
        process.terminate()
        process.wait(30)

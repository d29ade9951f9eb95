"""tools/sluice doctor against made-up machines, real certificates and fake nodes."""

import socket
import subprocess

import pytest
from fake_node import FakeNode
from sluice_client import doctor
from sluice_client.doctor import Machine

H100 = "NVIDIA H100 80GB HBM3, 9.0, 81559, 580.95.05, 00000000:41:00.0"
A100 = "NVIDIA A100, 8.0, 40960, 580.95.05, 00000000:42:00.0"
MEMLOCK = "Limit                     Soft Limit           Hard Limit           Units\n" \
          "Max locked memory         {}              {}              bytes\n"
FILES = {
    "proc/driver/nvidia/version": "NVRM version: 580.95.05",
    "proc/self/limits": MEMLOCK.format("unlimited", "unlimited"),
    "proc/self/status": "Mems_allowed_list:\t0\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
    "sys/devices/system/node/online": "0",
}


@pytest.fixture
def machine(tmp_path):
    """machine(*gpus, **files) -> a machine with those GPUs and files. machine(None) has no nvidia-smi."""
    def make(*gpus, **files):
        for path, text in (FILES | {path.replace("__", "/"): text for path, text in files.items()}).items():
            if text is not None:
                (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / path).write_text(text)
        said = None if gpus == (None,) else "\n".join(gpus) + "\n"
        return Machine(tmp_path, lambda program, *_: said if program == "nvidia-smi" else None)
    return make


def levels(findings):
    return [f.level for f in findings]


def test_a_good_machine_is_ok_in_every_line(machine):
    good = machine(H100)
    found = [f for check in (doctor.check_driver, doctor.check_gpus, doctor.check_memlock, doctor.check_huge_pages,
                             doctor.check_numa) for f in check(good)]
    assert set(levels(found)) == {"ok"} and len(found) == 5
    assert "compute capability 9.0, 81559 MiB" in str(found[1])


def test_a_machine_without_a_gpu_is_a_warning_and_no_problem(machine):
    bare = machine(None, proc__driver__nvidia__version=None)
    (found,) = doctor.check_driver(bare)
    assert found.level == "warning" and "--device cpu" in str(found)
    assert doctor.check_gpus(bare) == []
    limited = machine(None, proc__self__limits=MEMLOCK.format(65536, 65536))
    assert levels(doctor.check_memlock(limited)) == ["ok"]


@pytest.mark.parametrize("gpus, words", [
    ((None,), "nvidia-smi does not run"), ((), "finds no GPU"),
    ((H100.replace("580.95.05", "550.54.14"),), "version 550.54.14 does not run CUDA 13"),
])
def test_a_driver_that_does_not_do_is_a_problem(machine, gpus, words):
    (found,) = doctor.check_driver(machine(*gpus))
    assert found.level == "problem" and words in str(found) and found.remedy


def test_a_gpu_of_another_capability_is_a_problem_only_where_no_other_does(machine):
    assert levels(doctor.check_gpus(machine(A100))) == ["problem"]
    assert levels(doctor.check_gpus(machine(A100, H100))) == ["warning", "ok"]


def test_a_limit_of_locked_memory_is_a_warning_beside_a_gpu(machine):
    (found,) = doctor.check_memlock(machine(H100, proc__self__limits=MEMLOCK.format(8388608, 8388608)))
    assert found.level == "warning" and "8 MiB" in str(found) and "ulimit -l unlimited" in str(found)


@pytest.mark.parametrize("enabled, level", [("[always] madvise never", "ok"), ("always madvise [never]", "warning"),
                                            (None, "warning")])
def test_huge_pages_should_be_had_by_asking(machine, enabled, level):
    bare = machine(H100, sys__kernel__mm__transparent_hugepage__enabled=enabled)
    assert levels(doctor.check_huge_pages(bare)) == [level]


@pytest.mark.parametrize("allowed, gpu_node, level, words", [
    ("0-1", "1", "warning", "numactl --cpunodebind=1 --membind=1"),
    ("1", "1", "ok", "bound to the GPU's (1)"),
    ("0-1", "-1", "warning", "nvidia-smi topo"),
])
def test_a_process_should_have_its_memory_near_the_gpu(machine, allowed, gpu_node, level, words):
    two = machine(H100, **{"sys__devices__system__node__online": "0-1",
                           "proc__self__status": f"Mems_allowed_list:\t{allowed}\n",
                           "sys/bus/pci/devices/0000:41:00.0/numa_node": gpu_node})
    (found,) = doctor.check_numa(two)
    assert found.level == level and words in str(found)


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        (found,) = doctor.check_ports([address], "problem")
    assert found.level == "problem" and address in str(found) and "ss -ltnp" in found.remedy
    assert levels(doctor.check_ports([address], "problem")) == ["ok"]
    assert levels(doctor.check_ports(["127.0.0.1:99999", "nowhere"], "problem")) == ["problem"] * 2


@pytest.fixture(scope="module")
def issue(tmp_path_factory):
    """issue(name, days) -> (certificate, key) that are valid for so many days."""
    folder = tmp_path_factory.mktemp("pki")

    def make(name, days):
        cert, key = folder / f"{name}.pem", folder / f"{name}.key"
        subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
                        "-subj", f"/CN={name}", "-keyout", key, "-out", cert, "-days", str(days)],
                       capture_output=True, check=True)
        key.chmod(0o600)
        return str(cert), str(key)
    return make


def test_tls_files_that_belong_together_are_ok(issue):
    cert, key = issue("good", 100)
    found = doctor.check_tls(Machine(), {"ca": cert, "cert": cert, "key": key})
    assert levels(found) == ["ok"] * 3 and "CN" in str(found[0]) and "valid until" in str(found[0])


def test_a_certificate_that_expires_soon_is_a_warning(issue):
    cert, _ = issue("soon", 3)
    (found,) = doctor.check_tls(Machine(), {"cert": cert})
    assert found.level == "warning" and "expires on" in str(found)


@pytest.mark.parametrize("begin, end, words", [(2020, 2021, "has expired on 2021-01-01"),
                                               (2990, 2991, "is not valid before")])
def test_a_certificate_of_another_time_is_a_problem(begin, end, words):
    said = f"subject=CN = x\nnotBefore=Jan  1 00:00:00 {begin} GMT\nnotAfter=Jan  1 00:00:00 {end} GMT\n"
    found = doctor.check_certificate(Machine(run=lambda *_: said), "cert", "x.pem")
    assert found.level == "problem" and words in str(found) and found.remedy


def test_tls_files_that_are_wrong_are_named(issue, tmp_path):
    cert, key = issue("one", 100)
    _, other = issue("other", 100)
    (tmp_path / "noise").write_text("noise")
    (tmp_path / "token").write_text("secret")
    (tmp_path / "token").chmod(0o644)
    for files, level, words in [
            ({"ca": str(tmp_path / "gone")}, "problem", "cannot be read (No such file"),
            ({"ca": str(tmp_path / "noise")}, "problem", "no certificate in PEM"),
            ({"cert": cert, "key": other}, "problem", "does not belong to the certificate"),
            ({"token": str(tmp_path / "token")}, "warning", "can be read by everybody")]:
        found = [f for f in doctor.check_tls(Machine(), files) if f.level != "ok"]
        assert levels(found) == [level] and words in str(found[0]) and found[0].remedy


def test_nodes_of_one_model_are_ok(node):
    found = doctor.check_nodes(node.address, node.address)
    assert levels(found) == ["ok", "ok"]  # one node twice is not compared
    other = FakeNode(has_admin=False)
    try:
        found = doctor.check_nodes(node.address, other.address)
        assert levels(found) == ["ok"] * 3 and "fingerprint f1" in str(found[0])
    finally:
        other.server.stop(None)


@pytest.mark.parametrize("different, words", [({"fingerprint": "f2"}, "different models"),
                                              ({"element_type": 2}, "caches in different forms")])
def test_nodes_that_do_not_fit_are_a_problem(node, different, words):
    assert node.kind.element_type != 2
    other = FakeNode(has_admin=False, **different)
    try:
        found = doctor.check_nodes(node.address, other.address)
        assert levels(found) == ["ok", "ok", "problem"] and words in str(found[2]) and "--" in found[2].remedy
    finally:
        other.server.stop(None)


def test_it_runs_here_without_a_node_and_its_status_follows_the_problems(sluice, node, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    out = sluice("doctor", "--listen", f"127.0.0.1:{port}", "--decode", node.address)
    assert out.returncode == (1 if "problem" in out.stdout else 0)
    assert all(line.split()[0] in ("ok", "warning", "problem") for line in out.stdout.splitlines())
    assert f"127.0.0.1:{port} is free" in out.stdout and f"{node.address} answers" in out.stdout
    out = sluice("doctor", "--decode", "127.0.0.1:1")
    assert out.returncode == 1 and "no server answers at 127.0.0.1:1" in out.stdout
    (tmp_path / "node.yaml").write_text(f"listen: {node.address}\nadmin_listen: ''\ntls_ca: /no/such.pem\n")
    out = sluice("doctor", "--config", tmp_path / "node.yaml")
    assert out.returncode == 1 and f"{node.address} cannot be listened on" in out.stdout
    assert "ca /no/such.pem cannot be read" in out.stdout
    out = sluice("doctor", "--config", tmp_path / "gone.yaml")
    assert out.returncode == 1 and "gone.yaml: No such file" in out.stderr

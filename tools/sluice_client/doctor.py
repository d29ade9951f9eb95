"""The command `doctor`: whether this machine, and the nodes that it is to talk to, are as Sluice needs them.

Every finding is one line: how it stands (ok, warning or problem), what was looked at, what was found, and what to
do about it.
"""

import os
import re
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import yaml

from sluice.v1 import common_pb2
from sluice_client import rpc, status
from sluice_client.errors import ToolError

OK, WARNING, PROBLEM = "ok", "warning", "problem"
# The kernels are built for compute capability 9.0 (sm_90a) with CUDA 13, which needs this driver.
_CAPABILITY = "9.0"
_LEAST_DRIVER = 580
_SOON_DAYS = 14
_DEFAULT_LISTEN = ("127.0.0.1:7000", "127.0.0.1:7001")


@dataclass(frozen=True)
class Finding:
    level: str
    subject: str
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.level:8} {self.subject:11} {self.text}" + (f"; remedy: {self.remedy}" if self.remedy else "")


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: str
    memory_mib: str
    driver: str
    bus: str  # as /sys/bus/pci/devices names it, in lower case


def _run(*command: str) -> str | None:
    """Returns a command's output, or None where it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


@dataclass(frozen=True)
class Machine:
    """The files below `root` that describe a machine, and the programs that it has."""

    root: Path = Path("/")
    run: Callable[..., str | None] = _run

    def read(self, path: str) -> str | None:
        try:
            return (self.root / path).read_text().strip()
        except OSError:
            return None

    def gpus(self) -> list[Gpu] | None:
        """Returns the GPUs that nvidia-smi lists, or None where it cannot say."""
        said = self.run("nvidia-smi", "--query-gpu=name,compute_cap,memory.total,driver_version,pci.bus_id",
                        "--format=csv,noheader,nounits")
        if said is None:
            return None
        rows = [[part.strip() for part in line.split(",")] for line in said.splitlines() if line.strip()]
        # nvidia-smi writes eight digits of the domain, /sys four.
        return [Gpu(*row[:4], row[4].lower()[-12:]) for row in rows if len(row) == 5]


def check_driver(machine: Machine) -> list[Finding]:
    gpus = machine.gpus()
    if machine.read("proc/driver/nvidia/version") is None and not gpus:
        return [Finding(WARNING, "driver", "no NVIDIA driver, so nodes run with --device cpu alone",
                        f"for --device cuda install driver {_LEAST_DRIVER} or newer, and in a container ask for a GPU")]
    if gpus is None:
        return [Finding(PROBLEM, "driver", "the driver is loaded, but nvidia-smi does not run",
                        "install the user-space part of the same driver, or give the container the GPU (--gpus all)")]
    if not gpus:
        return [Finding(PROBLEM, "driver", "the driver is loaded and finds no GPU",
                        "look at dmesg for NVRM, and at what the container was given")]
    driver = gpus[0].driver
    if int(driver.split(".")[0]) < _LEAST_DRIVER:
        return [Finding(PROBLEM, "driver", f"version {driver} does not run CUDA 13",
                        f"install driver {_LEAST_DRIVER} or newer, or use --device cpu")]
    return [Finding(OK, "driver", f"version {driver}")]


def check_gpus(machine: Machine) -> list[Finding]:
    gpus = machine.gpus() or []
    usable = any(gpu.capability == _CAPABILITY for gpu in gpus)
    found = []
    for gpu in gpus:
        text = f"{gpu.name}, compute capability {gpu.capability}, {gpu.memory_mib} MiB"
        if gpu.capability == _CAPABILITY:
            found.append(Finding(OK, "GPU", text))
        elif usable:
            found.append(Finding(WARNING, "GPU", f"{text}, is not used",
                                 f"the kernels are for {_CAPABILITY}; choose the other with CUDA_VISIBLE_DEVICES"))
        else:
            found.append(Finding(PROBLEM, "GPU", text, f"the kernels are for {_CAPABILITY} (H100, H200); "
                                 "use such a GPU, or --device cpu"))
    return found


def check_memlock(machine: Machine) -> list[Finding]:
    limits = machine.read("proc/self/limits") or ""
    limit = re.search(r"^Max locked memory\s+(\S+)", limits, re.MULTILINE)
    if limit is None:
        return [Finding(WARNING, "memlock", "the limit of locked memory is unknown", "look at `ulimit -l`")]
    if limit.group(1) == "unlimited":
        return [Finding(OK, "memlock", "locked memory is not limited")]
    text = f"locked memory is limited to {status.bytes_text(int(limit.group(1)))}"
    if not machine.gpus():
        return [Finding(OK, "memlock", f"{text}; without a GPU nothing is locked")]
    return [Finding(WARNING, "memlock", f"{text}, and a driver that counts pinned memory refuses the host KV cache",
                    "`ulimit -l unlimited` in the shell, or LimitMEMLOCK=infinity for the service or the container "
                    "runtime")]


def check_huge_pages(machine: Machine) -> list[Finding]:
    path = "sys/kernel/mm/transparent_hugepage/enabled"
    chosen = re.search(r"\[(\w+)\]", machine.read(path) or "")
    mode = chosen.group(1) if chosen else "not there"
    if mode in ("always", "madvise"):
        return [Finding(OK, "huge pages", f"transparent huge pages: {mode}")]
    return [Finding(WARNING, "huge pages", f"transparent huge pages: {mode}; the host KV cache gets small pages",
                    f"`echo madvise > /{path}` as root")]


def _ids(text: str | None) -> list[int]:
    """0-3,8 -> [0, 1, 2, 3, 8]."""
    found = []
    for part in filter(None, (text or "").split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def check_numa(machine: Machine) -> list[Finding]:
    nodes = _ids(machine.read("sys/devices/system/node/online")) or [0]
    if len(nodes) == 1:
        return [Finding(OK, "NUMA", "one memory node")]
    allowed = re.search(r"^Mems_allowed_list:\s*(\S+)", machine.read("proc/self/status") or "", re.MULTILINE)
    mine = [n for n in _ids(allowed.group(1)) if n in nodes] if allowed else nodes
    gpus = machine.gpus() or []
    near = {int(text) for gpu in gpus if (text := machine.read(f"sys/bus/pci/devices/{gpu.bus}/numa_node"))
            and int(text) >= 0}
    text = f"{len(nodes)} memory nodes"
    if not gpus:
        return [Finding(OK, "NUMA", f"{text}, no GPU to be near to")]
    if not near:
        return [Finding(WARNING, "NUMA", f"{text}, and the system does not say which one the GPU is at",
                        "look at `nvidia-smi topo -m`")]
    if set(mine) <= near:
        return [Finding(OK, "NUMA", f"{text}, bound to the GPU's ({', '.join(map(str, sorted(near)))})")]
    at = ",".join(map(str, sorted(near)))
    return [Finding(WARNING, "NUMA", f"{text}, GPU at {at}, and memory may come from {','.join(map(str, mine))}",
                    f"start the node under `numactl --cpunodebind={at} --membind={at}`")]


def check_ports(addresses: Iterable[str], level: str) -> list[Finding]:
    """Tries to listen on each address. `level` is what a port that is taken counts as."""
    found = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        try:
            if not 0 <= int(port) < 1 << 16:
                raise ValueError(f"{port} is no port")
            family, kind, _, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
                probe.bind(target)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            found.append(Finding(level, "port", f"{address} cannot be listened on ({reason})",
                                 "stop what listens there (`ss -ltnp`), or choose another with --listen and "
                                 "--admin-listen"))
        else:
            found.append(Finding(OK, "port", f"{address} is free"))
    return found


def _openssl_date(text: str) -> datetime:
    return datetime.fromtimestamp(ssl.cert_time_to_seconds(text), timezone.utc)


def check_certificate(machine: Machine, label: str, path: str) -> Finding:
    said = machine.run("openssl", "x509", "-in", path, "-noout", "-subject", "-startdate", "-enddate")
    fields = dict(line.split("=", 1) for line in (said or "").splitlines() if "=" in line)
    if "notAfter" not in fields:
        return Finding(PROBLEM, "TLS", f"{label} {path} is no certificate in PEM", "give the right file")
    begin, end = _openssl_date(fields["notBefore"]), _openssl_date(fields["notAfter"])
    now = datetime.now(timezone.utc)
    text = f"{label} {path} ({fields.get('subject', '').strip()})"
    if now < begin:
        return Finding(PROBLEM, "TLS", f"{text} is not valid before {begin:%Y-%m-%d %H:%M} UTC",
                       "set the clock, or issue it again")
    if now > end:
        return Finding(PROBLEM, "TLS", f"{text} has expired on {end:%Y-%m-%d}", "issue it again")
    if (end - now).days < _SOON_DAYS:
        return Finding(WARNING, "TLS", f"{text} expires on {end:%Y-%m-%d}", "issue it again soon")
    return Finding(OK, "TLS", f"{text} is valid until {end:%Y-%m-%d}")


def check_tls(machine: Machine, files: dict[str, str]) -> list[Finding]:
    """Checks files by what they are: `files` maps ca, cert, key, token and access_file to paths."""
    found, readable = [], {}
    for label, path in files.items():
        try:
            Path(path).read_bytes()
            readable[label] = path
        except OSError as error:
            found.append(Finding(PROBLEM, "TLS", f"{label} {path} cannot be read ({error.strerror})",
                                 f"give a file that user {os.geteuid()} may read"))
    found += [check_certificate(machine, label, path) for label, path in readable.items()
              if label in ("ca", "cert")]
    if "key" in readable and "cert" in readable:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(readable["cert"], readable["key"])
        except ssl.SSLError as error:
            found.append(Finding(PROBLEM, "TLS", f"key {readable['key']} does not belong to the certificate "
                                 f"{readable['cert']} ({error.reason or error})",
                                 "give the pair that was issued together"))
        else:
            found.append(Finding(OK, "TLS", f"key {readable['key']} belongs to the certificate"))
    for label in ("key", "token"):
        if label in readable and Path(readable[label]).stat().st_mode & 0o004:
            found.append(Finding(WARNING, "TLS", f"{label} {readable[label]} can be read by everybody on this machine",
                                 f"`chmod o-r {readable[label]}`"))
    return found


def check_node(role: str, address: str) -> tuple[Finding, common_pb2.ModelInfo | None]:
    began = time.monotonic()
    try:
        with rpc.open_channel(address) as channel:
            model = status.model_of(channel, address)
    except ToolError as error:
        return Finding(PROBLEM, role, str(error),
                       "start it, or look at the firewall, the address and the TLS flags"), None
    return Finding(OK, role, f"{address} answers in {1e3 * (time.monotonic() - began):.0f} ms with {model.name} "
                             f"({model.architecture}), fingerprint {model.fingerprint[:16]}"), model


def check_nodes(decode: str | None, prefill: str | None) -> list[Finding]:
    found, models = [], {}
    for role, address in (("decode", decode), ("prefill", prefill)):
        if address:
            finding, model = check_node(role, address)
            found.append(finding)
            if model is not None:
                models[address] = model
    if len(models) == 2:
        (one, a), (other, b) = models.items()
        if a.fingerprint != b.fingerprint:
            found.append(Finding(PROBLEM, "models", f"{one} and {other} run different models (fingerprints "
                                 f"{a.fingerprint[:16]} and {b.fingerprint[:16]})", "start both with the same --model"))
        elif list(a.cache_kinds) != list(b.cache_kinds):
            found.append(Finding(PROBLEM, "models", f"{one} and {other} keep their caches in different forms",
                                 "start both with the same --kv-dtype and --block-tokens"))
        else:
            found.append(Finding(OK, "models", f"{one} and {other} run the same model with caches of the same form"))
    return found


def settings_of(path: str) -> dict[str, str]:
    """Returns the settings in a node's configuration file that say where it listens and which TLS files it reads."""
    try:
        read = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ToolError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ToolError(f"{path} is neither YAML nor JSON: {str(error).splitlines()[0]}") from error
    if not isinstance(read, dict):
        raise ToolError(f"{path} has no lines of the form name: value")
    return {key: str(value) for key, value in read.items() if value not in (None, "")}


def examine(args, machine: Machine) -> list[Finding]:
    """Returns all findings, in the order in which they are printed."""
    settings = settings_of(args.config) if args.config else {}
    ports = args.listen or [settings[name] for name in ("listen", "admin_listen") if name in settings]
    files = {name: settings[f"tls_{name}"] for name in ("ca", "cert", "key") if f"tls_{name}" in settings}
    if "access_file" in settings:
        files["access_file"] = settings["access_file"]
    files |= {name: path for name in ("ca", "cert", "key") if (path := getattr(args, name))}
    if args.token and args.token.startswith("@"):
        files["token"] = args.token[1:]
    found = check_driver(machine) + check_gpus(machine) + check_memlock(machine) + check_huge_pages(machine)
    found += check_numa(machine)
    # A node that runs already has the default ports: no reason to fail.
    found += check_ports(ports or _DEFAULT_LISTEN, PROBLEM if ports else WARNING)
    found += check_tls(machine, files)
    if not any(f.level == PROBLEM and f.subject == "TLS" for f in found):
        rpc.use(rpc.credentials_from(args.ca, args.cert, args.key, args.token))
        found += check_nodes(args.decode, args.prefill)
    return found


def run(args) -> int:
    """The command `doctor`."""
    found = examine(args, Machine())
    for finding in found:
        print(finding)
    return 1 if any(finding.level == PROBLEM for finding in found) else 0

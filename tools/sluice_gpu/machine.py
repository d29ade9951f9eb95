"""Describes the machine for a report: GPU, driver, clocks, processor, date, revision of the sources."""

import os
import shutil
import subprocess
import time
from pathlib import Path

from sluice_gpu.place import Place

_QUERY = {"gpu": "name", "driver": "driver_version", "memory_mib": "memory.total",
          "sm_mhz": "clocks.sm", "sm_max_mhz": "clocks.max.sm", "memory_mhz": "clocks.mem",
          "power_limit_w": "power.limit", "pcie_generation": "pcie.link.gen.max"}


def gpu() -> dict[str, str]:
    """Returns the first GPU's values by the names of _QUERY; empty where there is no GPU."""
    if shutil.which("nvidia-smi") is None:
        return {}
    done = subprocess.run(["nvidia-smi", f"--query-gpu={','.join(_QUERY.values())}",
                           "--format=csv,noheader,nounits", "--id=0"],
                          capture_output=True, text=True, timeout=60, check=False)
    values = [v.strip() for v in done.stdout.strip().split(",")]
    return dict(zip(_QUERY, values, strict=True)) if len(values) == len(_QUERY) else {}


def gpus() -> int:
    """Returns the number of GPUs that nvidia-smi lists."""
    if shutil.which("nvidia-smi") is None:
        return 0
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())


def _dram_gib() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


def revision(place: Place) -> str:
    """Returns the revision of the sources, which was written down when they were staged, or which git says."""
    written = place.root / "revision"
    if written.is_file():
        return written.read_text().strip()
    done = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
                          cwd=place.root, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def describe(place: Place) -> dict[str, str]:
    return gpu() | {
        "gpus": str(gpus()),
        "dram_gib": str(_dram_gib()),
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "revision": revision(place),
    }

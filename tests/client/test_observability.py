"""Compares alerts and reasons with the names that the server exports; needs no node."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy/prometheus"
PROMTOOL = ROOT / ".venv/bin/promtool"
# Reasons of the calls that sluice_requests_total and sluice_reserves_total do not count: Write, Commit, Admin.
OF_OTHER_CALLS = {"BLOCK_BUSY", "CHECKSUM_MISMATCH", "COMMITTED", "FAILPOINTS_NOT_ALLOWED",
                  "MISSING_BLOCKS", "NO_FAILPOINTS", "PREFILL_NODE", "STOPPING", "TOO_MANY_TRACES",
                  "TRACE_OFF"}


def exported() -> dict[str, str]:
    """Returns name -> type from the header."""
    return dict(re.findall(r'inline constexpr Metric k\w+\{\s*"([^"]+)",\s*Type::k(\w+)',
                           (ROOT / "src/metrics/metric_names.h").read_text()))


@pytest.mark.parametrize("command", [["check", "rules", "sluice.rules.yml"],
                                     ["test", "rules", "sluice.rules.test.yml"]])
def test_promtool_accepts_the_alerts_and_they_fire_as_they_say(command):
    if not PROMTOOL.exists():
        pytest.skip("no .venv/bin/promtool: tools/setup puts it there")
    done = subprocess.run([PROMTOOL, *command], cwd=RULES, capture_output=True, text=True, check=False,
                          timeout=60)
    assert done.returncode == 0 and "SUCCESS" in done.stdout, done.stdout + done.stderr


def test_alerts_use_only_names_that_are_exported():
    text = (RULES / "sluice.rules.yml").read_text()
    recorded = re.findall(r"- record: (\S+)", text)
    for name in recorded:
        text = text.replace(name, "")
    used = set(re.findall(r"\b(?:sluice|process|vllm)[_:]\w+", text))
    names = exported()
    assert len(names) > 30 and len(used) > 10
    known = set(names) | {name + suffix for name, kind in names.items() if kind == "Histogram"
                          for suffix in ("_bucket", "_count", "_sum")}
    assert used <= known, used - known


REASON = re.compile(r'char (k\w+)\[\] = "([A-Z_]+)";')
HEADER = (ROOT / "src/base/reasons.h").read_text()


def test_reasons_are_given_by_their_constants():
    for path in (ROOT / "src").rglob("*.cc"):
        text = path.read_text()
        for call in re.finditer(r"\b(?:WithReason|ResourceExhausted)\(", text):
            depth, end = 1, call.end()
            while depth:
                depth += {"(": 1, ")": -1}.get(text[end], 0)
                end += 1
            literals = set(re.findall(r'"([A-Z][A-Z_]+)"', text[call.end():end])) - {"SLUICE"}
            assert not literals, f"{path}: take {literals} from src/base/reasons.h"


def test_every_reason_has_its_label():
    header = (ROOT / "src/metrics/reasons.h").read_text()
    used = set(re.findall(r"reasons::(k\w+)", header[header.index("kRequestReasons"):]))
    reasons = dict(REASON.findall(HEADER))
    assert {"DRAM_FULL", "SLOW_READER", "TRANSFER_WAIT"} <= set(reasons.values())
    missing = {word for name, word in reasons.items() if name not in used} - OF_OTHER_CALLS
    assert not missing, f"add {missing} to a table of src/metrics/reasons.h, or to OF_OTHER_CALLS here"

#!/usr/bin/env python3
"""Writes deploy/kubernetes/common/prometheus-rule.yaml from sluice.rules.yml, the file that promtool tests."""

from pathlib import Path

HERE = Path(__file__).resolve().parent
RULES = HERE / "sluice.rules.yml"
TARGET = HERE.parent / "kubernetes/common/prometheus-rule.yaml"
HEAD = """\
# Made from deploy/prometheus/sluice.rules.yml by make_prometheus_rule.py there. Change it there.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: sluice
spec:
"""


def manifest() -> str:
    lines = RULES.read_text().splitlines()
    return HEAD + "".join(f"  {line}".rstrip() + "\n" for line in lines[lines.index("groups:"):])


if __name__ == "__main__":
    TARGET.write_text(manifest())

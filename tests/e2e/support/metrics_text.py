"""Reads a scrape of /metrics back."""

import re
import time
from collections.abc import Callable

from support.nodes import ROOT, Node

HEADER = ROOT / "src/metrics/metric_names.h"
SAMPLE = re.compile(r'^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$')
LABEL = re.compile(r'(\w+)="([^"]*)"')


def exported_names() -> set[str]:
    """Returns every name of the header."""
    names = set(re.findall(r'inline constexpr Metric k\w+\{\s*"([^"]+)"', HEADER.read_text()))
    assert len(names) > 30
    return names


class Scrape:
    """The samples of a scrape, by name and labels."""

    def __init__(self, node: Node):
        status, self.text = node.http("/metrics")
        assert status == 200
        self.types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", self.text, re.MULTILINE))
        self.samples: dict[tuple[str, frozenset], float] = {}
        for line in self.text.splitlines():
            if line and not line.startswith("#"):
                name, labels, value = SAMPLE.match(line).groups()
                self.samples[name, frozenset(LABEL.findall(labels or ""))] = float(value)

    def get(self, name: str, **labels: str) -> float:
        """Returns the sum over the series that carry these labels, of which there must be at least one."""
        found = [value for (n, have), value in self.samples.items()
                 if n == name and set(labels.items()) <= have]
        assert found, (name, labels)
        return sum(found)

    def family(self, sample: str) -> str:
        """Returns the metric that a sample belongs to; samples of a histogram have suffixes."""
        for name in (sample, re.sub(r"_(bucket|sum|count)$", "", sample)):
            if name in self.types:
                return name
        raise AssertionError(f"{sample} has no TYPE")

    def moved_since(self, before: "Scrape") -> set[str]:
        """Returns the families of which a sample has another value."""
        return {self.family(key[0]) for key, value in self.samples.items()
                if before.samples.get(key, 0) != value}


def wait_for(node: Node, holds: Callable[[Scrape], bool], seconds: float) -> Scrape:
    """Scrapes until `holds`, because a request counts as ended a moment after its caller has heard of it."""
    deadline = time.monotonic() + seconds
    while True:
        scrape = Scrape(node)
        if holds(scrape) or time.monotonic() > deadline:
            return scrape
        time.sleep(0.01)

"""Draws the report of `sluice-bench simulate`, as one PNG file: the parts of each step, and tokens/s by batch.

Everything in it is a forecast, and the picture says so. Only this needs matplotlib.
"""

import json
from pathlib import Path

from sluice_client.errors import ToolError
from sluice_client.plot_policies import import_pyplot


def load(path: str) -> list[dict]:
    """Returns the forecast steps of a report."""
    try:
        report = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ToolError(f"{path}: {error}; sluice-bench simulate --json {path} writes it") from error
    steps = report.get("details", {}).get("steps") if report.get("subcommand") == "simulate" else None
    if not steps:
        raise ToolError(f"{path} has no forecasts: sluice-bench simulate --json {path} writes them")
    return steps


def parts_of(steps: list[dict]) -> dict[str, list[float]]:
    """Returns for each part, the largest first, its milliseconds in each step."""
    names = {name for step in steps for name in step["parts_us"]}
    parts = {name: [step["parts_us"].get(name, 0) / 1e3 for step in steps] for name in names}
    return dict(sorted(parts.items(), key=lambda part: (-sum(part[1]), part[0])))


def series(steps: list[dict]) -> dict[str, list[tuple[int, float]]]:
    """Returns points (batch, tokens/s) for each policy and context, by batch."""
    found: dict[str, list[tuple[int, float]]] = {}
    for step in steps:
        found.setdefault(f"{step['policy']}, {step['context']}", []).append((step["batch"], step["tokens_per_second"]))
    return {name: sorted(points) for name, points in found.items()}


def draw(steps: list[dict], out: Path) -> None:
    pyplot = import_pyplot()
    figure, (bars, lines) = pyplot.subplots(1, 2, figsize=(12, 5))
    names = [f"{step['policy']}\n{step['batch']} x {step['context'] // 1024}K" for step in steps]
    below = [0.0] * len(steps)
    for part, values in parts_of(steps).items():
        bars.bar(range(len(steps)), values, bottom=below, label=part)
        below = [low + value for low, value in zip(below, values)]
    bars.set_xticks(range(len(steps)), names, fontsize=8)
    bars.set_ylabel("ms a step (forecast)")
    bars.legend(fontsize=8)
    for name, points in series(steps).items():
        lines.plot(*zip(*points), marker="o", label=name)
    lines.set_xlabel("sequences")
    lines.set_ylabel("tokens/s (forecast)")
    lines.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out, dpi=130)
    pyplot.close(figure)


def run(args) -> int:
    out = Path(args.out or f"{args.report}.png")
    draw(load(args.report), out)
    print(out)
    return 0

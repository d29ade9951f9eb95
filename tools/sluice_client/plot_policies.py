"""Draws the results of `sluice-bench policies --out DIR`, as PNG files beside the report.

The plots show throughput over context and over batch, the share of the budget that the CPU attended to by layer,
the time of a step by operator, and three layers of a step as a timeline. A --quality run has a plot of its pass keys
over length and depth. Models with latent caches have the plots of plot_latent too. Only these plots need matplotlib;
an error names it where it is missing.
"""

import json
from pathlib import Path

from sluice_client import plot_latent
from sluice_client.errors import ToolError

# Policies in the order of the table. A policy has the same colour in every plot.
_ORDER = ["full", "scout", "recall", "recall-paper", "recall-fetch-all", "clo", "hgca", "hgca-mean", "oracle", "ends",
          "random"]
_KERNELS = 12  # operators of a trace that are drawn, the longest first; the others are one piece


def load(folder: str) -> dict:
    path = Path(folder) / "policies.json"
    try:
        report = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ToolError(f"{path}: {error}; sluice-bench policies --out {folder} writes it") from error
    if report.get("subcommand") != "policies":
        raise ToolError(f"{path} is no report of sluice-bench policies")
    return report


def series(runs: list[dict], over: str, fixed: str) -> dict[tuple[str, int], list[tuple[int, float]]]:
    """Returns points (x, tokens/s) for each (policy, value of `fixed`), by x; the larger of two at one x."""
    found: dict[tuple[str, int], dict[int, float]] = {}
    for run in runs:
        points = found.setdefault((run["policy"], run[fixed]), {})
        points[run[over]] = max(points.get(run[over], 0), run["tokens_per_second"])
    return {key: sorted(points.items()) for key, points in found.items()}


def largest(runs: list[dict]) -> dict[str, list[tuple[int, float]]]:
    """Returns points (context, tokens/s) for each policy at the largest batch that it admits."""
    found: dict[str, list[tuple[int, float]]] = {}
    for run in runs:
        if run["largest"]:
            found.setdefault(run["policy"], []).append((run["context"], run["tokens_per_second"]))
    return {policy: sorted(points) for policy, points in found.items()}


def split_of(trace: dict) -> list[tuple[str, float]]:
    """Returns the seconds of a step by operator, the longest first, then those of the others and the idle time."""
    kernels = [(k["name"], k["seconds"]) for k in trace["kernels"]]
    parts = kernels[:_KERNELS]
    rest = sum(seconds for _, seconds in kernels[_KERNELS:])
    if rest > 0:
        parts.append(("other operators", rest))
    parts.append(("no kernel", max(trace["step_seconds"] - trace["kernels_seconds"], 0.0)))
    return parts


def keys_by_policy(passkeys: list[dict]) -> dict[tuple[str, float], list[tuple[int, float, str, bool]]]:
    """Returns points (tokens, depth, variant, found) of the keys that full finds, for each (policy, budget share)."""
    found: dict[tuple[str, float], list[tuple[int, float, str, bool]]] = {}
    for case in passkeys:
        for outcome in case["policies"]:
            if outcome["policy"] != "full":
                found.setdefault((outcome["policy"], outcome["budget_share"]), []).append(
                    (case["tokens"], case["depth"], case["variant"], outcome["found"]))
    return found


def lanes(timeline: dict) -> list[tuple[int, list[tuple[str, float, float, bool]]]]:
    """Returns (stream, slices) of a timeline, the busiest stream first.

    A slice is its name, its begin and length in us, and whether it is a kernel.
    """
    found: dict[int, list[tuple[str, float, float, bool]]] = {}
    for piece in timeline["slices"]:
        found.setdefault(piece["stream"], []).append(
            (piece["name"], 1e6 * piece["begin"], 1e6 * (piece["end"] - piece["begin"]),
             piece["kind"] == "kernel"))
    return sorted(found.items(), key=lambda lane: -sum(length for _, _, length, _ in lane[1]))


def _colour(policy: str) -> str:
    return f"C{_ORDER.index(policy)}" if policy in _ORDER else "C9"


def import_pyplot():
    try:
        import matplotlib
    except ImportError as error:
        raise ToolError("plots need matplotlib: .venv/bin/pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot
    return pyplot


def draw(report: dict, folder: Path) -> list[Path]:
    pyplot = import_pyplot()
    runs, traces = report["details"].get("runs", []), report["details"].get("traces", [])
    passkeys = report["details"].get("passkeys", [])
    if not runs and not report["details"].get("overlap") and not any(case["full"] for case in passkeys):
        raise ToolError("the report has no runs and no pass keys that full finds: there is nothing to draw")
    title = ", ".join(report["shape"][key] for key in ("model", "device", "workload") if key in report["shape"])
    written = []

    def save(figure, name: str):
        figure.suptitle(f"{title} ({report['machine']['cpu']}, {report['machine']['cores']} cores)", fontsize=9)
        figure.tight_layout()
        path = folder / name
        figure.savefig(path, dpi=130)
        pyplot.close(figure)
        written.append(path)

    plot_latent.draw(pyplot, report["details"], save)
    if panels := keys_by_policy(passkeys):
        save(_passkeys(pyplot, panels), "pass-keys.png")
    if not runs:
        return written

    figure, axes = pyplot.subplots()
    for policy, points in largest(runs).items():
        axes.plot(*zip(*points), marker="o", color=_colour(policy), label=policy)
    axes.set(xlabel="context, tokens", ylabel="tokens/s at the largest batch that fits", ylim=(0, None))
    axes.legend()
    save(figure, "throughput-over-context.png")

    longest = max(run["context"] for run in runs)
    figure, axes = pyplot.subplots()
    for (policy, context), points in series(runs, "batch", "context").items():
        if context == longest:
            axes.plot(*zip(*points), marker="o", color=_colour(policy), label=policy)
    axes.set(xlabel=f"batch, context {longest}", ylabel="tokens/s", ylim=(0, None))
    axes.legend()
    save(figure, "throughput-over-batch.png")

    figure, axes = pyplot.subplots()
    for run in runs:
        shares = [100 * layer["cpu_share"] for layer in run["layers"]]
        if run["largest"] and run["context"] == longest and any(shares):
            axes.plot(shares, marker=".", color=_colour(run["policy"]), label=f"{run['policy']}, batch {run['batch']}")
    axes.set(xlabel="layer", ylabel="CPU share of the budget, %", ylim=(0, None))
    if axes.lines:
        axes.legend()
    save(figure, "cpu-share-by-layer.png")

    figure, axes = pyplot.subplots(figsize=(10, 1 + 0.5 * len(traces)))
    names = sorted({name for trace in traces for name, _ in split_of(trace)})
    colours = {name: pyplot.get_cmap("tab20")(i % 20) for i, name in enumerate(names)}
    for row, trace in enumerate(traces):
        left = 0.0
        for name, seconds in split_of(trace):
            colour = "lightgrey" if name == "no kernel" else colours[name]
            axes.barh(row, 1e3 * seconds, left=left, color=colour, label=name)
            left += 1e3 * seconds
    axes.set_yticks(range(len(traces)), [trace["name"] for trace in traces], fontsize=7)
    axes.set(xlabel="ms of a step, traced")
    shown = dict(reversed(list(zip(*reversed(axes.get_legend_handles_labels())))))
    axes.legend(shown.values(), shown.keys(), fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, "step-by-operator.png")

    for trace in traces:
        if timeline := trace.get("timeline"):
            save(_timeline(pyplot, trace["name"], timeline),
                 f"timeline-{''.join(c if c.isalnum() or c in '.-' else '-' for c in trace['name'])}.png")
    return written


def _passkeys(pyplot, panels: dict[tuple[str, float], list[tuple[int, float, str, bool]]]):
    """Draws a panel for each policy and budget: keys over length and depth, filled where they were found."""
    columns = min(len(panels), 4)
    rows = -(-len(panels) // columns)
    figure, grid = pyplot.subplots(rows, columns, figsize=(3.2 * columns, 2.8 * rows), squeeze=False, sharex=True,
                                   sharey=True)
    markers = {"single": "o", "multi": "s", "topic": "^"}
    for axes, ((policy, share), points) in zip(grid.flat, panels.items()):
        for tokens, depth, variant, found in points:
            axes.plot(tokens, 100 * depth, marker=markers.get(variant, "o"), color="C0" if found else "C3",
                      markerfacecolor="C0" if found else "none", linestyle="")
        axes.set_title(f"{policy}, {100 * share:g} %: {sum(p[3] for p in points)} of {len(points)}", fontsize=8)
    for axes in list(grid.flat)[len(panels):]:
        axes.axis("off")
    figure.supxlabel("tokens (circle: single, square: multi, triangle: topic; filled: found)", fontsize=8)
    figure.supylabel("depth of the key, %", fontsize=8)
    return figure


def _timeline(pyplot, name: str, timeline: dict):
    """Draws three layers: a row for each stream, a bar for each kernel (coloured by name) and for each copy (grey)."""
    rows = lanes(timeline)
    names = sorted({piece["name"] for piece in timeline["slices"] if piece["kind"] == "kernel"})
    colours = {kernel: pyplot.get_cmap("tab20")(i % 20) for i, kernel in enumerate(names)}
    figure, axes = pyplot.subplots(figsize=(12, 1.6 + 0.6 * len(rows)))
    for row, (_, slices) in enumerate(rows):
        for kernel, begin, length, is_kernel in slices:
            axes.barh(row, length, left=begin, height=0.8, color=colours[kernel] if is_kernel else "lightgrey",
                      edgecolor="black", linewidth=0.2, label=kernel)
    axes.set_yticks(range(len(rows)), [f"stream {stream}" for stream, _ in rows], fontsize=7)
    axes.invert_yaxis()
    layer = 1e6 * timeline["layer_seconds"]["median"]
    axes.set(xlabel=f"us; {name}; from one {timeline['anchor']} to the next {layer:.0f} us (median, traced)")
    shown = dict(zip(*reversed(axes.get_legend_handles_labels())))
    axes.legend(shown.values(), shown.keys(), fontsize=5, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def run(args) -> int:
    for path in draw(load(args.run_folder), Path(args.run_folder)):
        print(path)
    return 0

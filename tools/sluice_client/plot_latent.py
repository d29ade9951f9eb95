"""The plots of `plot-policies` for models with latent caches.

They are the plots that ESS's paper has of its pools (throughput over the ratio, misses by layer, ratio and context,
misses of the first steps), and the share of the transfers that is hidden. Each function takes a report's details
and returns the points of a plot; `draw` draws the plots that have points.
"""

import re


def ratio_of(policy: str) -> float | None:
    """Returns the ratio of KV slots to tokens in a policy's name: 1 for full, None where HBM decides (auto)."""
    if policy.split(":")[0] == "full":
        return 1.0
    found = re.search(r":ratio=([0-9.]+)", policy)
    return float(found.group(1)) if found and float(found.group(1)) > 0 else None


def variant(policy: str) -> str:
    """Returns the name without its ratio; each variant is one line of a plot."""
    return re.sub(r":ratio=[0-9.]+", "", policy)


def over_ratio(runs: list[dict], what) -> dict[tuple[str, int], list[tuple[float, float]]]:
    """Returns points (ratio, what(run)) for each (variant, context), at the largest batch."""
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for run in runs:
        ratio = ratio_of(run["policy"])
        if run["largest"] and ratio is not None:
            found.setdefault((variant(run["policy"]), run["context"]), []).append((ratio, what(run)))
    return {key: sorted(points) for key, points in found.items()}


def mean_misses(run: dict) -> float:
    misses = run["misses_by_layer"]
    return sum(misses) / len(misses)


def by_layer(runs: list[dict]) -> dict[tuple[str, int], list[float]]:
    """Returns the misses of a sequence and step by layer, for each (policy, context) at its largest measured batch."""
    found: dict[tuple[str, int], dict] = {}
    for run in runs:
        key = (run["policy"], run["context"])
        if run.get("misses_by_layer") and (key not in found or run["batch"] > found[key]["batch"]):
            found[key] = run
    return {key: run["misses_by_layer"] for key, run in found.items()}


def first_steps(runs: list[dict]) -> list[tuple[str, float, float]]:
    """Returns (policy with context and batch, misses of the first steps, of the last steps), means over the layers."""
    return [(f"{run['policy']}, {run['context']}, batch {run['batch']}",
             sum(run["misses_first_by_layer"]) / len(run["misses_first_by_layer"]),
             sum(run["misses_steady_by_layer"]) / len(run["misses_steady_by_layer"]))
            for run in runs if run.get("misses_first_by_layer")]


def hidden(overlap: list[dict]) -> dict[str, list[tuple[float, float]]]:
    """Returns points (misses, % hidden) for each policy, batch and context. Levels that move nothing are left out."""
    found: dict[str, list[tuple[float, float]]] = {}
    for run in overlap:
        label = f"{run['policy']}, {run['context']}, batch {run['batch']}"
        found.setdefault(label, []).extend(
            (level["misses"], 100 * level["hidden"]) for level in run["levels"] if level["bytes"] > 0)
    return {label: sorted(points) for label, points in found.items() if points}


def draw(pyplot, details: dict, save):
    """Calls save(figure, name) for each plot that the report has points for."""
    runs = details.get("runs", [])
    latent = [run for run in runs if run.get("misses_by_layer")]

    def lines(found: dict, name: str, xlabel: str, ylabel: str, **axis):
        if not found:
            return
        figure, axes = pyplot.subplots()
        for key, points in found.items():
            label = key if isinstance(key, str) else ", ".join(str(part) for part in key)
            axes.plot(*zip(*points), marker="o", label=label)
        axes.set(xlabel=xlabel, ylabel=ylabel, **axis)
        axes.legend(fontsize=7)
        save(figure, name)

    if latent:
        at = "sparse memory ratio (1: full), the largest batch of each"
        lines(over_ratio(runs, lambda run: run["tokens_per_second"]), "throughput-over-ratio.png", at, "tokens/s",
              ylim=(0, None))
        lines(over_ratio(runs, lambda run: run["batch"]), "batch-over-ratio.png", at, "sequences", ylim=(0, None))
        lines(over_ratio(latent, mean_misses), "misses-over-ratio.png", at, "misses of a sequence, layer and step",
              ylim=(0, None))
        lines({key: list(enumerate(misses)) for key, misses in by_layer(latent).items()}, "misses-by-layer.png",
              "layer", "misses of a sequence and step", ylim=(0, None))
        bars = first_steps(latent)
        figure, axes = pyplot.subplots(figsize=(8, 1.2 + 0.5 * len(bars)))
        for row, (_, first, steady) in enumerate(bars):
            axes.barh(row - 0.2, first, height=0.4, color="C1", label="first steps")
            axes.barh(row + 0.2, steady, height=0.4, color="C0", label="last steps")
        axes.set_yticks(range(len(bars)), [label for label, _, _ in bars], fontsize=7)
        axes.set(xlabel=f"misses of a sequence, layer and step; first steps: {latent[0]['first_steps']}")
        shown = dict(zip(*reversed(axes.get_legend_handles_labels())))
        axes.legend(shown.values(), shown.keys(), fontsize=7)
        save(figure, "misses-of-first-steps.png")
    lines(hidden(details.get("overlap", [])), "transfers-hidden.png", "misses of a sequence, layer and step",
          "% of the transfers' own time")
    lines({f"context {found['context']}": list(enumerate([100 * share for share in found["layers"]]))
           for found in details.get("intra_layer_overlap", [])}, "intra-layer-overlap.png", "layer",
          "% of a row's selection that the row before had", ylim=(None, 100))

"""Draws what `sluice-profile fluxion` measured of a model's heads and of predictors, as one PNG file.

`summary --json` gives the budget over the size of block, with the line of equation 1 and how well it fits, and maps of
layers and query heads that stream. `check --json` gives what each way to budget reads and how often it is further off
than tau. `figures --json` gives what plot_fluxion_figures.py draws. The programs compute the numbers; this only draws them. Only this needs matplotlib.
"""

import json
import math
from pathlib import Path

from sluice_client import plot_fluxion_figures
from sluice_client.errors import ToolError
from sluice_client.plot_policies import import_pyplot

# Heads that are drawn one by one.
SINGLE_HEADS = 6

# The key of each kind of file that must not be empty.
_NEEDED = {"summary": "heads", "check": "sources", "figures": "layers"}

_FIRST_BLOCK = 1  # the list of blocks begins with single tokens, which the figure leaves out


def load(path: str, kind: str) -> dict:
    """Returns what `sluice-profile fluxion KIND --json` wrote, where `kind` is summary, check or figures."""
    remedy = f"sluice-profile fluxion {kind} --json {path} writes it"
    try:
        root = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ToolError(f"{path}: {error}; {remedy}") from error
    if not isinstance(root, dict) or root.get("format") != f"sluice-fluxion-{kind}" or root.get("version") != 1:
        raise ToolError(f"{path} is not a file of {kind} of this version: {remedy}")
    if not root.get(_NEEDED[kind]):
        raise ToolError(f"{path} is empty: {remedy}")
    return root


def single_heads(heads: list[dict], count: int) -> list[dict]:
    """Returns heads from the one with the least budget at the smallest block to the one with the largest, evenly.

    A head counts if at most half of its samples stream, so that its median is one of many samples.
    """
    found = sorted((head for head in heads if head["budgets"] and 2 * head["streaming"] <= head["samples"]),
                   key=lambda head: head["budgets"][_FIRST_BLOCK])
    if len(found) <= count:
        return found
    return [found[round(i * (len(found) - 1) / (count - 1))] for i in range(count)]


def shares(heads: list[dict], key: str) -> list[list[float]]:
    """Returns by layer and query head the percentage of samples that `key` counts; NaN where there are no samples."""
    rows, columns = (1 + max(head[axis] for head in heads) for axis in ("layer", "head"))
    found = [[float("nan")] * columns for _ in range(rows)]
    for head in heads:
        found[head["layer"]][head["head"]] = 100 * head[key] / head["samples"]
    return found


def points(check: dict) -> list[tuple[str, float, float]]:
    """Returns for each way to budget its name, its bytes as a share of the first's, and % of heads further off."""
    base = check["sources"][0]["bytes"]
    if not base:
        raise ToolError(f"{check['sources'][0]['name']} reads nothing: check with a --fixed-share above 0")
    return [(of["name"], of["bytes"] / base, 100 * of["violations"] / of["heads"]) for of in check["sources"]]


def _draw_budgets(axes, summary: dict) -> None:
    blocks = summary["blocks"][_FIRST_BLOCK:]

    def percent(values: list) -> list[float]:
        return [100 * value for value in values[_FIRST_BLOCK:]]

    quartiles = {name: percent(values) for name, values in summary["budgets"].items()}
    axes.fill_between(blocks, quartiles["first"], quartiles["third"], color="0.85", label="half of the samples")
    axes.plot(blocks, quartiles["median"], color="black", marker="o", linewidth=2, label="median of samples")
    for i, head in enumerate(single_heads(summary["heads"], SINGLE_HEADS)):
        line = head["line"]
        axes.plot(blocks, percent(head["budgets"]), color=f"C{i}", marker=".", linestyle="none",
                  label=f"layer {head['layer']}, head {head['head']}" +
                  (f": R² {line['r2']:.2f}" if line["r2"] is not None else ""))
        axes.plot(blocks, [100 * (line["at_one"] + line["slope"] * math.log2(block)) for block in blocks],
                  color=f"C{i}", linestyle="--", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(blocks, [str(block) for block in blocks])
    axes.set_ylim(0, 1.45 * axes.get_ylim()[1])  # which leaves room for the legend
    axes.set_xlabel("tokens of a block")
    axes.set_ylabel("budget, % of the cpu segment")
    axes.set_title("budgets of heads that do not stream\n(dots: medians of a head; dashed: equation 1, fitted from blocks of 1 on)",
                   fontsize=9)
    axes.legend(fontsize=7, loc="upper left", ncols=2)


def head_fits(heads: list[dict], good: float) -> tuple[list[float], float]:
    """Returns R² of the lines of heads' medians in ascending order, and the share of them that is `good` or more."""
    values = sorted(head["line"]["r2"] for head in heads if head["line"] and head["line"]["r2"] is not None)
    return values, sum(value >= good for value in values) / max(len(values), 1)


def _draw_fits(axes, summary: dict) -> None:
    """Draws the distributions of R² over samples and over heads, which are how well equation 1 holds."""
    good = summary["fitted"]["r2_good"]
    lines = [(name, summary[key]["r2_percentiles"], summary[key]["good"]) for key, name in (
        ("fitted", "samples, bgt0 and k by least squares"), ("pinned", "samples, bgt0 is the budget of single tokens"))]
    lines.append(("heads' medians, bgt0 and k by least squares", *head_fits(summary["heads"], good)))
    for name, values, share in lines:
        if values:
            steps = [100 * i / max(len(values) - 1, 1) for i in range(len(values))]
            axes.plot(values, steps, label=f"{name}:\nmedian {values[len(values) // 2]:.2f}, "
                      f"{100 * share:.0f} % have {good} or more")
    axes.set_xlim(-0.05, 1.02)
    axes.set_xlabel("R² of a line")
    axes.set_ylabel("% with no more")
    axes.set_title("how well equation 1 fits the budgets", fontsize=9)
    axes.legend(fontsize=7, loc="upper left")


def _map_drawer(summary: dict, key: str, title: str):
    def draw_map(axes) -> None:
        image = axes.imshow(shares(summary["heads"], key), aspect="auto", cmap="viridis", interpolation="nearest",
                            vmin=0, vmax=100)
        axes.set_title(f"{title}: {100 * summary[key] / summary['samples']:.1f} % of all", fontsize=9)
        axes.set_xlabel("query head")
        axes.set_ylabel("layer")
        axes.figure.colorbar(image, ax=axes, label="% of samples")
    return draw_map


def _draw_check(axes, check: dict) -> None:
    found = points(check)
    for name, read, off in found:
        axes.plot(read, off, marker="o", linestyle="none", clip_on=False)
        axes.annotate(name, (read, off), textcoords="offset points", xytext=(5, 4), fontsize=7)
    _, read, off = found[0]
    axes.axvline(read, color="0.7", linewidth=0.8)
    axes.axhline(off, color="0.7", linewidth=0.8)
    axes.set_xlim(0, 1.25 * max(read for _, read, _ in found))  # which leaves room for names
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"bytes read, as a share of {check['sources'][0]['name']}'s")
    axes.set_ylabel(f"% of heads further off than tau ({check['tau']:g})")
    axes.set_title("what ways to budget read and miss", fontsize=9)


def panels(summary: dict | None, check: dict | None, figures: dict | None = None) -> list:
    """Returns functions that draw a panel each."""
    found = []
    if summary is not None:
        if summary["streaming"] < summary["samples"]:
            found.append(lambda axes: _draw_budgets(axes, summary))
        if summary["fitted"]["samples"]:
            found.append(lambda axes: _draw_fits(axes, summary))
        found.append(_map_drawer(summary, "streaming", "heads that stream"))
        if summary["told"] is not None:
            found.append(_map_drawer(summary, "told", "heads that the predictor says stream"))
    if check is not None:
        found.append(lambda axes: _draw_check(axes, check))
    if figures is not None:
        found += plot_fluxion_figures.panels(figures)
    return found


def draw(summary: dict | None, check: dict | None, figures: dict | None, out: Path) -> None:
    if check is not None:
        points(check)  # which refuses what cannot be drawn
    pyplot = import_pyplot()
    drawers = panels(summary, check, figures)
    columns = min(2 if figures is None else 3, len(drawers))
    rows = -(-len(drawers) // columns)
    figure, grid = pyplot.subplots(rows, columns, figsize=(6.2 * columns, 4.6 * rows), squeeze=False)
    places = [axes for row in grid for axes in row]
    for axes, drawer in zip(places, drawers):
        drawer(axes)
    for axes in places[len(drawers):]:
        axes.remove()
    figure.tight_layout()
    figure.savefig(out, dpi=130)
    pyplot.close(figure)


def run(args) -> int:
    paths = {kind: getattr(args, kind) for kind in _NEEDED}
    roots = {kind: load(path, kind) if path else None for kind, path in paths.items()}
    given = [kind for kind in _NEEDED if roots[kind]]
    for kind in given[1:]:
        if roots[kind]["model_fingerprint"] != roots[given[0]]["model_fingerprint"]:
            raise ToolError(f"{paths[kind]} is of another model than {paths[given[0]]}: draw them by two commands")
    out = Path(args.out or f"{paths[given[0]]}.png")
    draw(roots["summary"], roots["check"], roots["figures"], out)
    print(out)
    return 0

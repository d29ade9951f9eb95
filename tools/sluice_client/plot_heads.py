"""Draws what `sluice-profile --clo` measured of a model's heads, as one PNG file.

Three maps of layers and KV heads: the share of lookups in which a head keeps its selection, the mean similarity of its
queries in neighbouring steps, and its place in the order in which heads become persistent. Only this needs matplotlib.
"""

import json
from pathlib import Path

from sluice_client.errors import ToolError
from sluice_client.plot_policies import import_pyplot


def load(path: str) -> dict:
    """Returns the part of a profile that policy clo reads, with its order of persistence."""
    try:
        clo = json.loads(Path(path).read_text()).get("clo", {})
    except (OSError, ValueError, AttributeError) as error:
        raise ToolError(f"{path}: {error}; sluice-profile --clo --out {path} writes it") from error
    if not all(clo.get(key) for key in ("kv_heads", "misses", "similarities", "persistence_order")):
        raise ToolError(f"{path} has no heads of policy clo: sluice-profile --clo --out {path} writes them")
    return clo


def by_layer(values: list, kv_heads: int) -> list[list]:
    """Returns a row of `kv_heads` values for each layer."""
    return [values[i:i + kv_heads] for i in range(0, len(values), kv_heads)]


def places(order: list[int], heads: int) -> list[float]:
    """Returns for each head the percentage of all heads that become persistent before it; NaN: it never does."""
    found = [float("nan")] * heads
    for place, head in enumerate(order):
        found[head] = 100 * place / heads
    return found


def draw(clo: dict, out: Path) -> None:
    pyplot = import_pyplot()
    heads = len(clo["misses"])
    maps = [("keeps its selection, % of lookups", [100 * (1 - miss) for miss in clo["misses"]], "viridis"),
            ("similarity of neighbouring queries", clo["similarities"], "viridis"),
            ("persistent from this share on, % of heads", places(clo["persistence_order"], heads), "magma")]
    rows = heads // clo["kv_heads"]
    figure, axes = pyplot.subplots(1, len(maps), figsize=(11, 1.5 + 0.16 * rows), sharey=True)
    for panel, (title, values, colours) in zip(axes, maps):
        image = panel.imshow(by_layer(values, clo["kv_heads"]), aspect="auto", cmap=colours, interpolation="nearest")
        panel.set_title(title, fontsize=9)
        panel.set_xlabel("KV head")
        figure.colorbar(image, ax=panel)
    axes[0].set_ylabel("layer")
    figure.tight_layout()
    figure.savefig(out, dpi=130)
    pyplot.close(figure)


def run(args) -> int:
    out = Path(args.out or f"{args.profile}.png")
    draw(load(args.profile), out)
    print(out)
    return 0

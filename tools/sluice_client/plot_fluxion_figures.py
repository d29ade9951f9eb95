"""Draws figures 3, 4, 10b and 11 of Fluxion's paper from what `sluice-profile fluxion figures --json` measured.

The program computes the numbers; this only draws them. Each function draws one panel into the axes that it is given.
"""

import math


def label(layer: int) -> str:
    return f"layer {layer}"


def boxes(layers: list[dict], key: str, scale: float = 1) -> list[dict]:
    """Returns the boxes of one quantity by layer as matplotlib's bxp takes them."""
    names = ("whislo", "q1", "med", "q3", "whishi")
    return [{**{name: scale * value for name, value in zip(names, layer[key])}, "label": str(layer["layer"])}
            for layer in layers]


def bins(z: dict) -> tuple[list[float], float, list[float]]:
    """Returns of a histogram the middles of its bins and their width, in deviations, and the densities there."""
    width = 2 * z["histogram_end"] / len(z["histogram"])
    middles = [(i + 0.5) * width - z["histogram_end"] for i in range(len(z["histogram"]))]
    return middles, width, [share / width for share in z["histogram"]]


def _few_ticks(axes, layers: list[dict]) -> None:
    step = max(1, len(layers) // 10)
    axes.set_xticks(range(1, len(layers) + 1, step), [str(layer["layer"]) for layer in layers[::step]])


def draw_scores(axes, figures: dict) -> None:
    for style, (key, name) in zip(("-", "--"), (("all", "of all tokens"), ("beside", "beside the default set"))):
        for i, kept in enumerate(figures["scores"][key]):
            axes.plot([100 * error for error in kept["percentiles"]], range(101), style, color=f"C{i}",
                      label=f"{100 * kept['share']:g} % {name}: {100 * kept['large']:.1f} % err more")
    large = 100 * figures["large_error"]
    axes.axvline(large, color="0.7", linewidth=0.8)
    axes.set_xlim(0, 4 * large)
    axes.set_xlabel("error, % of the head's own output")
    axes.set_ylabel("% of heads with no more")
    axes.set_title(f"3a: heads that keep a share of their scores ({large:g} % is grey)", fontsize=9)
    axes.legend(fontsize=6, loc="lower right")


def draw_values(axes, figures: dict) -> None:
    layers = [layer["layer"] for layer in figures["layers"]]
    for key, name in (("first", "the first token"), ("sink", "tokens of the sink"), ("others", "other tokens")):
        axes.plot(layers, [layer["value_lengths"][key] for layer in figures["layers"]], marker=".", label=name)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("layer")
    axes.set_ylabel("mean length of values")
    axes.set_title("3b: values of the sink and of other tokens", fontsize=9)
    axes.legend(fontsize=7)


def draw_sink(axes, figures: dict) -> None:
    axes.bxp(boxes(figures["layers"], "sink_scores", 100), showfliers=False)
    _few_ticks(axes, figures["layers"])
    axes.set_ylim(0, 100)
    axes.set_xlabel("layer")
    axes.set_ylabel("% of the scores")
    axes.set_title("3c: the sink's share of heads' scores (whiskers: all heads and rows)", fontsize=9)


def draw_contribution(axes, example: dict, figures: dict) -> None:
    """Draws figure 4 of one row: budgets as bars over heads, and below each head the output's elements as dots."""
    heads = example["heads"]
    numbers = [head["head"] for head in heads]
    for shift, key, name in ((-0.2, "own_budget", f"{100 * figures['own_deviation']:g} % of its own output"),
                             (0.2, "budget", f"{100 * figures['tau']:g} % of the layer's largest")):
        axes.bar([number + shift for number in numbers], [100 * head[key] for head in heads], 0.4, label=name)
    axes.set_ylim(0, 105)
    axes.set_xticks(numbers[::max(1, len(numbers) // 16)])
    axes.set_xlabel("query head (dots: elements of its output, to the right)")
    axes.set_ylabel("budget, % of the cpu segment")
    axes.set_title(f"4: {label(example['layer'])}, budgets for an error of ...", fontsize=9)
    axes.legend(fontsize=7, loc="upper left")
    outputs = axes.twinx()
    for head in heads:
        count = len(head["output"])
        outputs.plot([head["head"] - 0.4 + 0.8 * i / count for i in range(count)], head["output"], ".", color="black",
                     markersize=2)
    largest = max((abs(x) for head in heads for x in head["output"]), default=0) or 1
    outputs.set_ylim(-1.1 * largest, 1.1 * largest)


def draw_histogram(axes, example: dict) -> None:
    z = example["z"]
    middles, width, densities = bins(z)
    axes.bar(middles, densities, width, color="0.8", label=f"head {z['head']}, row {example['position']}")
    points = [i / 20 for i in range(-80, 81)]
    axes.plot(points, [math.exp(-x * x / 2) / math.sqrt(2 * math.pi) for x in points], color="C1",
              label=f"normal: mean {z['mean']:.2g}, deviation {z['deviation']:.2g}")
    axes.set_xlabel("z, in deviations from its mean")
    axes.set_ylabel("density")
    axes.set_title(f"11: {label(example['layer'])}, q k / (|q| √D): skewness {z['skewness']:.2f}, "
                   f"excess kurtosis {z['excess_kurtosis']:.2f}", fontsize=9)
    axes.legend(fontsize=7)


def draw_qq(axes, example: dict) -> None:
    z = example["z"]
    axes.plot(z["normal_quantiles"], z["quantiles"], ".", markersize=4)
    ends = [min(z["normal_quantiles"]), max(z["normal_quantiles"])]
    axes.plot(ends, ends, color="0.7", linewidth=1)
    axes.set_xlabel("percentiles of the normal distribution")
    axes.set_ylabel("percentiles of z, in deviations")
    axes.set_title(f"11: {label(example['layer'])}, Q-Q: the largest gap is {z['largest_gap']:.2f}", fontsize=9)


def draw_normality(axes, figures: dict) -> None:
    axes.bxp(boxes(figures["layers"], "largest_gap"), showfliers=False)
    _few_ticks(axes, figures["layers"])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("layer")
    axes.set_ylabel("largest Q-Q gap, in deviations")
    axes.set_title("11: distance from normal, by layer (whiskers: all heads and rows)", fontsize=9)


def draw_taus(axes, figures: dict) -> None:
    taus = [of["tau"] for of in figures["taus"]]
    fixed = figures["fixed"]
    axes.plot(taus, [100 * of["read"] for of in figures["taus"]], color="C0", marker="o", label="read")
    axes.axhline(100 * fixed["read"], color="C0", linestyle=":", linewidth=1, label="read by the fixed budget")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tau")
    axes.set_ylabel("read, % of the cpu segment's K and V")
    axes.set_title("10b: what the oracle reads, and how far a layer's output is off", fontsize=9)
    errors = axes.twinx()
    errors.plot(taus, [100 * of["row_error"] for of in figures["taus"]], color="C1", marker="s", label="error")
    errors.axhline(100 * fixed["row_error"], color="C1", linestyle=":", linewidth=1, label="error of the fixed budget")
    errors.set_ylim(bottom=0)
    errors.set_ylabel("error, % of the layer's output")
    lines = axes.get_lines() + errors.get_lines()
    axes.legend(lines, [line.get_label() for line in lines], fontsize=7, loc="upper center")


def draw_quality(axes, figures: dict) -> None:
    """Draws how far the next token's probabilities are from full attention's, over what is read for them."""
    for of in figures["taus"]:
        axes.annotate(f"{of['tau']:g}", (100 * of["quality"]["budget"]["read"], of["quality"]["kl"]), fontsize=7,
                      textcoords="offset points", xytext=(4, 4))
    axes.plot([100 * of["quality"]["budget"]["read"] for of in figures["taus"]],
              [of["quality"]["kl"] for of in figures["taus"]], marker="o", label="oracle at each tau")
    fixed = figures["fixed"]["quality"]
    axes.plot(100 * fixed["budget"]["read"], fixed["kl"], "s", label="the fixed budget")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("read, % of the cpu segment's K and V")
    axes.set_ylabel("KL from full attention, nats")
    axes.set_title(f"10b: the next token of {fixed['rows']} rows", fontsize=9)
    axes.legend(fontsize=7)


def panels(figures: dict) -> list:
    """Returns functions that draw a panel each."""
    examples = [example for example in figures["examples"] if example]
    found = [lambda axes, draw=draw: draw(axes, figures) for draw in (draw_scores, draw_values, draw_sink)]
    found += [lambda axes, of=of: draw_contribution(axes, of, figures) for of in examples]
    found.append(lambda axes: draw_taus(axes, figures))
    if figures["fixed"]["quality"]:
        found.append(lambda axes: draw_quality(axes, figures))
    for of in examples:
        found += [lambda axes, draw=draw, of=of: draw(axes, of) for draw in (draw_histogram, draw_qq)]
    found.append(lambda axes: draw_normality(axes, figures))
    return found

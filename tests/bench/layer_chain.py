#!/usr/bin/env python3
"""Says where the time of policy scout's layers goes, from a trace of `sluice-bench policies --out DIR` on a GPU.

For each kernel of a layer, on the step's own stream and on the branch that looks ahead, it prints the time from the end
of the kernel before it to its own end: what the kernel adds to its chain, whatever it waited for. A kernel's own
duration says less, since kernels begin early and wait (programmatic dependent launch), and share the GPU.
"""

import argparse
import collections
import json
import statistics
import sys
from pathlib import Path

# Kernels of a layer in order, from one merge to the next.
TRUNK = ["DecodeProduct", "RmsNorm", "DecodeProduct", "SiluMul", "DecodeProduct", "RmsNorm", "DecodeProduct", "RopeAppend",
         "List", "Merge"]
NAMES = ["product o", "norm", "gate+up", "SiLU", "down", "norm", "q, k, v", "RoPE", "attention", "merge"]
Chain = list[tuple[str, float]]  # kernels and their ends in us, in the order of the ends


def streams(trace: Path) -> dict[str, Chain]:
    """Returns each stream's kernels. A stream's overlapping kernels are on threads of their own in the file."""
    events = json.loads(trace.read_text())["traceEvents"]
    name_of = {e["tid"]: e["args"]["name"].split(",")[0] for e in events
               if e.get("ph") == "M" and e["name"] == "thread_name"}
    found = collections.defaultdict(list)
    for e in events:
        stream = name_of.get(e.get("tid"), "")
        if e.get("ph") == "X" and stream.startswith("stream") and not e["name"].startswith("gap"):
            found[stream].append((e["name"].split("<")[0].removesuffix("Kernel"), e["ts"] + e["dur"]))
    return {stream: sorted(chain, key=lambda kernel: kernel[1]) for stream, chain in found.items()}


def trunk_times(chains: dict[str, Chain]) -> dict[str, list[float]]:
    """Returns the times of whole layers, from a merge to the next one on the same stream."""
    times = collections.defaultdict(list)
    for chain in chains.values():
        merges = [i for i, (name, _) in enumerate(chain) if name == "Merge"]
        for first, last in zip(merges, merges[1:]):
            if [name for name, _ in chain[first + 1:last + 1]] != TRUNK:
                continue  # the end of a step, or a layer that changed streams
            for i, name in enumerate(NAMES):
                times[f"{i + 1:2} {name}"].append(chain[first + 1 + i][1] - chain[first + i][1])
    return times


def branch_times(chains: dict[str, Chain]) -> dict[str, list[float]]:
    """Returns the times of the kernels that select, on the stream with the splits of lists."""
    chain = max(chains.values(), key=lambda kernels: sum(name == "Split" for name, _ in kernels))
    times = collections.defaultdict(list)
    before = collections.Counter()
    for (_, last), (name, end) in zip(chain, chain[1:]):
        before[name] += 1
        if name in ("DigestScores", "RefineScores", "Split", "RecallDue", "CopyRows"):
            times[name].append(end - last)
        elif name == "TopK":
            times["TopK" if before["DigestScores"] == before["RefineScores"] else "TopK of the shortlist"].append(end - last)
    return times


def show(title: str, times: dict[str, list[float]]) -> None:
    print(f"\n{title}\n{'us':26} {'layers':>7} {'mean':>8} {'p10':>8} {'p50':>8} {'p90':>8}")
    for name, all_times in times.items():
        ordered = sorted(all_times)
        at = [ordered[min(len(ordered) * p // 100, len(ordered) - 1)] for p in (10, 50, 90)]
        print(f"{name:26} {len(ordered):7} {statistics.mean(ordered):8.1f} " + " ".join(f"{t:8.1f}" for t in at))
    print(f"{'sum of the means':26} {'':7} {sum(map(statistics.mean, times.values())):8.1f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="DIR/trace-scout-*.json")
    chains = streams(parser.parse_args().trace)
    trunk = trunk_times(chains) if chains else {}
    if not trunk:
        print("layer_chain.py: the file has no layers of policy scout on a GPU: trace `sluice-bench policies --device cuda "
              "--policies scout --out DIR`", file=sys.stderr)
        return 1
    show("the step's own stream", trunk)
    show("the branch that looks ahead", branch_times(chains))
    return 0


if __name__ == "__main__":
    sys.exit(main())

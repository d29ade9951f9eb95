#!/usr/bin/env python3
"""Many streams on one node for a long time: no request may fail, and its memory may not grow.

    .venv/bin/python tests/bench/soak.py                         # 64 streams for 10 minutes, SmolLM2
    .venv/bin/python tests/bench/soak.py --seconds 60 --settle 20

Starts a sluice-server, keeps --streams requests decoding with random caches (as one ends the next comes),
and notes the node's resident memory four times a second. Outputs are equally long, so that the arenas have
been touched as far as they will be once the first have ended: from then on growth is a leak. Prints the
figures of the load and each bound beside what was found; the exit status is 1 if a bound is broken.
"""

import statistics
import sys

from loaded_node import LoadedNode, Verdict, parser


def main() -> int:
    flags = parser(__doc__, streams=64)
    flags.add_argument("--seconds", type=float, default=600, help="time of load (default: %(default)s)")
    flags.add_argument("--settle", type=float, default=60,
                       help="seconds until memory has reached its size (default: %(default)s)")
    flags.add_argument("--growth-mb", type=float, default=10,
                       help="MB that memory may grow after that (default: %(default)s)")
    args = flags.parse_args()
    if not 0 < 2 * args.settle <= args.seconds:
        flags.error("--seconds must be at least twice --settle")
    with LoadedNode(args) as loaded:
        idle = loaded.node.held()
        report = loaded.serve("--phase", f"name=soak,concurrency={args.streams},seconds={args.seconds}s")
        back = loaded.gives_back(idle)
    phase = report["details"]["phases"][0]
    # The maximum until then: the memory of a burst of pushes comes and goes.
    before, after = ([max(sizes[i] for at, *sizes in loaded.memory if (at > args.settle) == late)
                      for i in range(2)] for late in (False, True))
    verdict = Verdict()
    verdict.hold("every request is done", f"{phase['done']} of {phase['came']}",
                 phase["done"] == phase["came"] > 0)
    for i, what in enumerate(("resident memory", "what of it lies outside arenas and weights")):
        growth = (after[i] - before[i]) / 1e6
        verdict.hold(f"{what} grows by at most {args.growth_mb:g} MB after {args.settle:g} s",
                     f"at most {before[i] / 1e6:.1f} MB by then, {after[i] / 1e6:.1f} MB later: "
                     f"{growth:+.1f} MB", growth <= args.growth_mb)
    second, last = (statistics.median(outside for at, _, outside in loaded.memory
                                      if begin < at <= begin + args.settle)
                    for begin in (args.settle, args.seconds - args.settle))
    drift = (last - second) / 1e6
    verdict.hold(f"its median drifts by at most {args.growth_mb:g} MB from the second to the last "
                 f"{args.settle:g} s", f"{drift:+.1f} MB", drift <= args.growth_mb)
    verdict.hold("all that requests held is back", "it is" if back else "it is not", back)
    return verdict.status()


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Several times the load that a node can bear: the surplus is refused, the rest does not suffer.

    .venv/bin/python tests/bench/overload.py                     # 4 x for 3 minutes, SmolLM2
    .venv/bin/python tests/bench/overload.py --seconds 20 --full-seconds 15

Starts a sluice-server and drives it through four phases without a pause: warm-up and full load (--streams
requests at a time), overload (--factor times the requests per second that full load finished, at random
times; refused ones do not come back), and full load again. Prints the figures of each and every bound beside
what was found; the exit status is 1 if a bound is broken.
"""

import sys

from loaded_node import LoadedNode, Verdict, parser

RETURN_SECONDS = 2  # Full speed must be back after this time.


def mean(report: dict, what: str, begin: float, end: float) -> float:
    """Returns the mean of a series of the report over seconds [begin, end)."""
    bucket = report["details"]["bucket_seconds"]
    values = report["details"][what][round(begin / bucket):round(end / bucket)]
    return sum(values) / len(values)


def main() -> int:
    flags = parser(__doc__, streams=32)
    flags.add_argument("--max-waiting", type=int, default=64, help="max_waiting of the node (default: %(default)s)")
    flags.add_argument("--factor", type=float, default=4, help="factor of overload (default: %(default)s)")
    flags.add_argument("--warm-seconds", type=float, default=10, help="time of the warm-up (default: %(default)s)")
    flags.add_argument("--full-seconds", type=float, default=60, help="time of full load (default: %(default)s)")
    flags.add_argument("--seconds", type=float, default=180, help="time of overload (default: %(default)s)")
    flags.add_argument("--after-seconds", type=float, default=12,
                       help="time of full load afterwards (default: %(default)s)")
    flags.add_argument("--gap-ratio", type=float, default=1.5,
                       help="bound on the 99th percentile of gaps, over full load's (default: %(default)s)")
    flags.add_argument("--speed-share", type=float, default=0.9,
                       help="share of full speed that counts as full (default: %(default)s)")
    flags.add_argument("--batch-share", type=float, default=0.9,
                       help="the same for the sequences that decode at once (default: %(default)s)")
    args = flags.parse_args()
    if args.after_seconds <= RETURN_SECONDS:
        flags.error(f"--after-seconds must be more than {RETURN_SECONDS}")
    with LoadedNode(args, "--max-waiting", str(args.max_waiting)) as loaded:
        idle = loaded.node.held()
        phases = [f"name=warm,concurrency={args.streams},seconds={args.warm_seconds}s",
                  f"name=full,concurrency={args.streams},seconds={args.full_seconds}s",
                  f"name=overload,rate={args.factor}x,seconds={args.seconds}s,on-refusal=count",
                  f"name=after,concurrency={args.streams},seconds={args.after_seconds}s"]
        report = loaded.serve(*(part for phase in phases for part in ("--phase", phase)))
        returned = loaded.gives_back(idle)
    phase = {p["name"]: p for p in report["details"]["phases"]}
    full, overload, after = phase["full"], phase["overload"], phase["after"]
    verdict = Verdict()
    failed = sum(p["failed"] for p in phase.values())
    verdict.hold("no request fails", f"{failed} failed", failed == 0)
    verdict.hold("the surplus is refused", f"{overload['refused']} of {overload['came']}",
                 overload["refused"] > 0.3 * overload["came"])
    without = sum(p["refusals_without_retry_info"] for p in phase.values())
    verdict.hold("every refusal carries RetryInfo", f"{without} do not", without == 0)
    gaps = overload["itl_seconds"]["p99"] / full["itl_seconds"]["p99"]
    verdict.hold(f"the 99th percentile of gaps stays within {args.gap_ratio:g} x",
                 f"{full['itl_seconds']['p99'] * 1e3:.1f} ms at full load, "
                 f"{overload['itl_seconds']['p99'] * 1e3:.1f} ms under overload: {gaps:.2f} x",
                 gaps <= args.gap_ratio)
    times = (full["begin_seconds"], full["end_seconds"])
    back_times = (after["begin_seconds"] + RETURN_SECONDS, after["end_seconds"])
    for what, unit, share in (("tokens", "tokens/s", args.speed_share),
                              ("decoding", "sequences decode", args.batch_share)):
        scale = 1 / report["details"]["bucket_seconds"] if what == "tokens" else 1
        before, back = (scale * mean(report, what, *t) for t in (times, back_times))
        verdict.hold(f"from {RETURN_SECONDS} s after it on, {share:.0%} of full load's {what} are back",
                     f"{before:.1f} {unit} before, {back:.1f} after: {back / before:.0%}",
                     back >= share * before)
    verdict.hold("all that requests held is back", "it is" if returned else "it is not", returned)
    return verdict.status()


if __name__ == "__main__":
    sys.exit(main())

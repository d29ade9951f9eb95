"""tests/bench/layer_chain.py: what a kernel adds to its chain, from a trace."""

import json
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[1] / "bench" / "layer_chain.py"
LAYER = ["DecodeProduct<8>", "RmsNormKernel<2>", "DecodeProduct<8>", "SiluMulKernel", "DecodeProduct<8>",
         "RmsNormKernel<2>", "DecodeProduct<8>", "RopeAppendKernel", "ListKernel<128, 1, true>", "MergeKernel<float>"]
AHEAD = ["DigestScoresKernel<8>", "TopKKernel<512>", "RefineScoresKernel<4>", "TopKKernel<512>", "SplitKernel",
         "RecallDueKernel", "CopyRowsKernel"]


def chain_of(events, folder) -> subprocess.CompletedProcess:
    trace = folder / "trace.json"
    trace.write_text(json.dumps({"traceEvents": events}))
    return subprocess.run([sys.executable, TOOL, trace], capture_output=True, text=True)


def test_a_kernel_adds_the_time_between_two_ends(tmp_path):
    events = [{"ph": "M", "name": "thread_name", "tid": tid, "args": {"name": name}}
              for tid, name in ((2, "stream 7"), (3, "stream 7, overlapping"), (4, "stream 8"))]
    end = 100.0
    events.append({"ph": "X", "name": LAYER[-1], "tid": 2, "ts": 90, "dur": 10})
    for i, name in enumerate(LAYER):
        end += 3 * (i + 1)
        # A kernel begins early, on the thread of overlapping ones, and waits.
        events.append({"ph": "X", "name": name, "tid": 2 + i % 2, "ts": end - 50, "dur": 50})
    for i, name in enumerate(["RopeAppendKernel", *AHEAD]):
        events.append({"ph": "X", "name": name, "tid": 4, "ts": 100 + 7 * i, "dur": 2})
    done = chain_of(events, tmp_path)
    assert done.returncode == 0, done.stderr
    means = {line[:26].strip(): float(line[34:43]) for line in done.stdout.splitlines() if line[34:43].strip()[:1].isdigit()}
    assert means["1 product o"] == 3 and means["9 attention"] == 27 and means["10 merge"] == 30
    assert all(means[name] == 7 for name in ("DigestScores", "TopK of the shortlist", "RefineScores", "TopK", "Split"))
    assert f"{sum(3 * i for i in range(1, 11)):8.1f}" in done.stdout


def test_a_trace_without_layers_is_refused_in_a_sentence(tmp_path):
    done = chain_of([], tmp_path)
    assert done.returncode == 1 and "--policies scout" in done.stderr and done.stderr.count("\n") == 1

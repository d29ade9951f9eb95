"""Breaks the engine and the KV store, one line at a time; sluice-sim must report each.

    python3 tests/sim/mutants.py [BUILD_DIR] [--seeds N]

For each mutant one file is compiled with the line changed and linked in front of the libraries of
BUILD_DIR (default build/release, where sluice-sim is built); the tree stays as it is. Prints which
seed reports it, and exits with 1 if any mutant survives all seeds.
"""

import argparse
import json
import pathlib
import shlex
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]

# (what goes wrong, file, line as it is, line as it becomes)
MUTANTS = [
    ("pages go back while a launched step still has them", "src/engine/placement.cc",
     "return sequence.last_step <= completed_steps_ && ", "return "),
    ("a checksum is not checked", "src/kv/chunk_landing.cc",
     "if (crc_ != h.crc32c) {", "if (crc_ != h.crc32c && left_ > 0) {"),
    ("other bytes for a landed block go unnoticed", "src/kv/chunk_landing.cc",
     "differs_ = differs_ ||", "differs_ = differs_ &&"),
    ("a transfer is committed with a block missing", "src/kv/transfer_table.cc",
     "if (transfer->landed < transfer->blocks.size())",
     "if (transfer->landed + 1 < transfer->blocks.size())"),
    ("the last block of a table stays with the device's old one",
     "src/attention/block_tables.cc",
     "visit(at, static_cast<int32_t>(count));", "visit(at, static_cast<int32_t>(count - 1));"),
    ("the last kind of caches stays behind", "src/attention/policies/full/full_policy.cc",
     "for (size_t kind = 0; kind < layout.kinds.size(); ++kind) {",
     "for (size_t kind = 0; kind < 1; ++kind) {"),
    ("attention does not wait for its queries", "src/attention/latent/resident_latent_attention.cc",
     "stream.After(queries);", ""),
    ("queries do not wait for their inputs", "src/attention/latent/resident_latent_attention.cc",
     "queries.After(stream);", ""),
    ("attention does not wait for the entries that arrive first", "src/attention/policies/ess/ess_policy.cc",
     "stream.After(early);", ""),
    ("the second attention does not wait for the first", "src/attention/policies/ess/ess_policy.cc",
     "stream.After(work);", ""),
    ("a layer's queries do not wait for the layer before", "src/attention/policies/ess/ess_policy.cc",
     "if (first + count == rows) work.After(stream);", ""),
    ("fetching does not wait for its list", "src/attention/policies/ess/ess_policy.cc",
     "early.After(stream);", ""),
    ("new entries are written to the host cache before they are made",
     "src/attention/policies/ess/ess_policy.cc",
     "settling.After(stream);\n  tier_->WriteThrough", "tier_->WriteThrough"),
    ("KV slots go to the next step's entries before attention has read them",
     "src/attention/policies/ess/ess_policy.cc",
     "settling.After(stream);\n    kernels().UpdateResidency", "kernels().UpdateResidency"),
    ("KV slots of the next step's entries stay empty", "src/attention/policies/ess/ess_policy.cc",
     "Fetch(settling, operators_.FetchRunnersUp(layer, rows));", ""),
    ("entries that refuted drafts drove out do not come back", "src/attention/policies/ess/draft_rows.cc",
     "kernels.Transfer(stream, move);", ""),
    ("entries of drafts are made before they have a KV slot", "src/attention/policies/ess/ess_policy.cc",
     "      append_later_ = params;", "      kernels().LatentAppend(stream, params);"),
    ("a sequence joins before its pools are warm", "src/attention/policies/ess/ess_tier.cc",
     " || !warmer_->Done(slot)) return false;", ") return false;"),
    ("a warm-up overtakes the clearing of its tables", "src/attention/policies/ess/pool_warmer.cc",
     "stream_->WaitFor(*warm_up.before);", ""),
    ("the last layers' new entries are not written to the host cache",
     "src/attention/policies/ess/ess_policy.cc",
     "&& layer + 1 != layers())) return;", "|| layer + 1 != layers())) return;"),
    ("a block that leaves the ring of policy scout is lost",
     "src/attention/policies/scout/scout_policy.cc",
     "if (options().scout.attend_whole) selection_.Retain(stream, layer, rows);", ""),
    ("a token that leaves the ring of policy recall is lost",
     "src/attention/policies/recall/recall_policy.cc", "    kernels().Retain(stream, retain);\n", ""),
    ("a block that leaves the ring of policy fluxion is lost",
     "src/attention/policies/fluxion/fluxion_policy.cc", "    Retain(stream, layer, rows);\n", ""),
    ("policy fluxion's device and workers read the same blocks",
     "src/attention/policies/fluxion/fluxion_policy.cc",
     "queries, WorkerUnits(), tier().HostHome(layer)", "queries, DeviceUnits(), tier().HostHome(layer)"),
    ("policy fluxion's parts are merged before the one over the link is done",
     "src/attention/policies/fluxion/fluxion_policy.cc", "    if (reads_link_) stream.After(link);\n", ""),
    ("policy fluxion's workers select a block that the device attends to in the ring",
     "src/attention/policies/fluxion/host_scores.cc", "- shape_.ring_units + 1;", "- shape_.ring_units + 9;"),
    ("the anchor's blocks put out what has places for all of a sequence",
     "src/attention/policies/fluxion/fluxion_policy.cc",
     "UnitsBeforeRing(tokens) > shape_.recall_units()", "UnitsBeforeRing(tokens) > shape_.sink_units"),
    ("the anchor of a slot's last sequence stays", "src/attention/policies/fluxion/head_budgets.cc",
     "const auto forget = [&](float* to, int64_t count) {",
     "const auto forget = [&](float* to, int64_t count) { return;"),
    ("padded rows have the first slot", "src/engine/batch_inputs.cc",
     "host.slots[row] = -1;", "host.slots[row] = 0;"),
    ("tokens that were not handed over count as cached", "src/engine/sequence_life.cc",
     "std::min(sequence.context_length, sequence.length - 1)", "sequence.length - 1"),
    ("a surplus token is emitted after the end", "src/engine/turn.cc",
     "if (sequence.state == Sequence::State::kFinished) return;", ""),
    ("a draft is accepted whatever was chosen", "src/engine/turn.cc",
     "sequence.drafts[static_cast<size_t>(i)] == token.id", "true"),
    ("rows of refuted drafts count as cached", "src/engine/turn.cc",
     "row.rehearsal ? 0 : row.count - row.drafts", "row.rehearsal ? 0 : row.count"),
    ("a token behind refuted drafts stays off the device", "src/engine/speculation.cc",
     "row_tokens_.push_back(sequence.tokens[at]);", "row_tokens_.push_back(-1);"),
    ("a step is launched before its drafts are read", "src/engine/speculation.cc",
     ".drafts) return true;", ".drafts) return false;"),
    ("the device drafts from a sequence's last row", "kernels/cpu/drafts.cc",
     "if (accepted) last = row + 1;", "last = row + 1;"),
    ("a preempted sequence leaves its newest key behind", "src/engine/placement.cc",
     "Evict(sequence->slot, sequence->cached);",
     "Evict(sequence->slot, std::max<int64_t>(0, sequence->cached - 4));"),
    ("the engine is not woken for a transfer", "src/engine/engine.cc",
     "    inbox_.Wake();\n", ""),
    ("slow readers are not checked", "src/engine/turn.cc",
     "} else if (slow <= now) {", "} else if (slow < absl::InfinitePast()) {"),
    ("deadlines are not checked", "src/engine/turn.cc",
     "if (deadline <= now) {", "if (deadline < absl::InfinitePast()) {"),
    ("a sequence keeps its transfer when it ends", "src/engine/sequence_life.cc",
     "/*abort_transfer=*/true);\n  }\n  std::erase", "/*abort_transfer=*/false);\n  }\n  std::erase"),
]


def compile_mutant(build, file, text, out):
    """Compiles `text` in the place of `file` to `out`; returns the compiler's complaint."""
    commands = json.loads((build / "compile_commands.json").read_text(encoding="utf-8"))
    entry = next(e for e in commands if pathlib.Path(e["file"]).resolve() == ROOT / file)
    arguments = shlex.split(entry["command"])
    source = out.with_suffix(".cc")
    source.write_text(text, encoding="utf-8")
    arguments[arguments.index("-c") + 1] = str(source)
    arguments[arguments.index("-o") + 1] = str(out)
    run = subprocess.run(arguments + ["-Wno-error"], cwd=entry["directory"], capture_output=True,
                         text=True, check=False)
    return run.stderr if run.returncode else ""


def link(build, mutant, program):
    """Links sluice-sim with `mutant` in front: the library's own object is then left out."""
    commands = subprocess.run(["ninja", "-C", str(build), "-t", "commands", "sluice-sim"],
                              capture_output=True, text=True, check=True).stdout
    command = next(line for line in reversed(commands.splitlines()) if "-o bin/sluice-sim" in line)
    command = command.replace("-o bin/sluice-sim", f"-o {program} {mutant}")
    subprocess.run(command, shell=True, cwd=build, check=True, capture_output=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", nargs="?", default=str(ROOT / "build/release"))
    parser.add_argument("--seeds", type=int, default=2000)
    args = parser.parse_args()
    build = pathlib.Path(args.build).resolve()
    survived = 0
    for what, file, before, after in MUTANTS:
        text = (ROOT / file).read_text(encoding="utf-8")
        if text.count(before) != 1:
            print(f"{what}: {file} has not exactly one {before!r}: the list is out of date")
            survived += 1
            continue
        with tempfile.TemporaryDirectory() as folder:
            mutant = pathlib.Path(folder) / "mutant.o"
            complaint = compile_mutant(build, file, text.replace(before, after), mutant)
            if complaint:
                print(f"{what}: does not compile\n{complaint}")
                survived += 1
                continue
            program = pathlib.Path(folder) / "sluice-sim"
            link(build, mutant, program)
            run = subprocess.run([program, "--seeds", str(args.seeds)], capture_output=True,
                                 text=True, check=False)
        lines = [line for line in run.stdout.splitlines() if line.startswith("seed ")]
        if run.returncode == 0 or not lines:
            survived += 1
            print(f"SURVIVES  {what}", flush=True)
        else:
            print(f"reported  {what}: {lines[0]}", flush=True)
    print(f"{len(MUTANTS) - survived} of {len(MUTANTS)} mutants were reported")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())

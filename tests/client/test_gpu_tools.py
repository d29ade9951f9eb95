"""tools/gpu-stage and tools/gpu-test: what they run, count and pack. None of it needs a GPU."""

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sluice_gpu import (bench, cases, e2e, fluxion, gpu_test, latent, machine, policies, policy_runs, ranks, stage,
                        transport, weights)
from sluice_gpu.jobs import Job, run_command, run_jobs
from sluice_gpu.place import Place

ROOT = Path(__file__).resolve().parents[2]


def script(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)
    return path


@pytest.fixture
def place(tmp_path):
    """A place whose test programs answer like Catch2's."""
    catch = """
import sys
names = {names!r}
tagged = {tagged!r}
if "--list-test-names-only" in sys.argv:
    shown = tagged if "[cuda]" in sys.argv else names
    print("\\n".join(shown))
    sys.exit(len(shown))
print("ran", sys.argv[1])
if "lacks" in sys.argv[1]:
    print("skipped: this machine has no GPU")
    sys.exit(77)
sys.exit(1 if "wrong" in sys.argv[1] else 0)
"""
    bin_dir = tmp_path / "build/release/bin"
    script(bin_dir, "sluice_kernels_test", catch.format(
        names=["norm, [8] rows (portable)", "norm, [8] rows (cuda)", "wrong (cuda)", "lacks one (cuda)"],
        tagged=[]))
    script(bin_dir, "device_test", catch.format(names=["a stream", "an error ends the node"],
                                                tagged=["an error ends the node"]))
    script(bin_dir, "cuda_device_test", catch.format(names=["copies"], tagged=[]))
    return Place(tmp_path)


def test_cuda_cases_are_found_by_name_tag_and_program(place):
    assert [(p.name, name) for p, name in cases.cuda_cases(place)] == [
        ("cuda_device_test", "copies"),
        ("device_test", "an error ends the node"),
        ("sluice_kernels_test", "norm, [8] rows (cuda)"),
        ("sluice_kernels_test", "wrong (cuda)"),
        ("sluice_kernels_test", "lacks one (cuda)")]


def test_each_case_has_its_outcome_and_its_name_is_escaped(place, capsys):
    results = run_jobs(cases.case_jobs(place, cases.cuda_cases(place), 60), side_by_side=3)
    assert [r.outcome for r in results] == ["passed", "passed", "passed", "failed", "skipped"]
    assert r"ran norm\, \[8\] rows (cuda)" in results[2].said
    shown = capsys.readouterr().out
    assert "FAILED  sluice_kernels_test: wrong (cuda)" in shown
    assert "skipped sluice_kernels_test: lacks one (cuda) (this machine has no GPU)" in shown


def test_without_a_sanitizer_its_cases_are_skipped_and_with_one_only_kernels_run(place):
    found = cases.cuda_cases(place)
    jobs = cases.sanitizer_jobs(place, found, "memcheck", None, 60)
    assert [r.outcome for r in run_jobs(jobs)] == ["skipped"] * 3
    jobs = cases.sanitizer_jobs(place, found, "racecheck", "/usr/bin/compute-sanitizer", 60)
    assert all(job.command[:3] == ("/usr/bin/compute-sanitizer", "--tool", "racecheck") for job in jobs)


# A shell command that leaves its process id in the file {} and lives for a minute.
LINGER = "echo $$ >{0}.new; mv {0}.new {0}; exec sleep 60"


def ends_soon(pid_file: Path) -> bool:
    pid, give_up = int(pid_file.read_text()), time.monotonic() + 10
    while time.monotonic() < give_up:
        stat = Path(f"/proc/{pid}/stat")
        # A killed process whose parent has not looked at it yet is a zombie.
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.02)
    return False


def test_a_job_out_of_its_time_fails_and_one_out_of_its_phases_is_skipped_each_with_its_children(tmp_path, capsys):
    def command(pid_file):
        return ("/bin/sh", "-c", f"/bin/sh -c '{LINGER.format(pid_file)}' & echo begun; wait")

    [own] = run_jobs([Job("slow", command(tmp_path / "own"), dict(os.environ), 1)])
    cut, late = run_jobs([Job("cut", command(tmp_path / "cut"), dict(os.environ), 50),
                          Job("late", ("/bin/true",), {}, 10)], seconds=1)
    assert [r.outcome for r in (own, cut, late)] == ["failed", "skipped", "skipped"]
    assert re.match(r"FAILED  slow \(\S+ s\)\n    begun\n\s*    out of time after 1 s\n", capsys.readouterr().out)
    assert own.seconds < 30 and cut.seconds < 30  # a child that lives on would keep the output open for a minute
    assert ends_soon(tmp_path / "own") and ends_soon(tmp_path / "cut")


def test_a_sanitizer_is_judged_by_what_it_says_of_our_kernels(tmp_path):
    ours = "========= Error: Race reported between Read access at DecodeProduct+0x10\n"
    library = "========= Error: Race reported between Read access at nvjet_sm90_tss+0xac0\n"
    passed = "All tests passed (3 assertions in 1 test case)\n"
    nothing = "========= Error: Target application terminated before first instrumented API call\n"

    def outcome(said: str) -> str:
        program = script(tmp_path, "sanitizer", f"print({said!r}); raise SystemExit(99)")
        [result] = run_jobs([Job("racecheck: one", (str(program),), judge=cases.judge_sanitizer)])
        return result.outcome

    assert outcome(library + passed) == "passed"
    assert outcome(library + ours + passed) == "failed"
    assert outcome(library + "test cases: 1 | 1 failed") == "failed"
    assert outcome(nothing + passed) == "skipped"
    assert outcome(nothing) == "failed"


def test_gpu_test_takes_what_it_runs_with_it(tmp_path):
    begun = tmp_path / "begun"
    program = f"""
from sluice_gpu.jobs import Job, end_with_signals, run_jobs
end_with_signals()
run_jobs([Job("a", ("/bin/sh", "-c", {LINGER.format(begun)!r}), {{}}, 60)])
"""
    process = subprocess.Popen([sys.executable, "-c", program],
                               env=os.environ | {"PYTHONPATH": str(ROOT / "tools")})
    while not begun.exists():
        time.sleep(0.02)
    process.terminate()
    assert process.wait(10) == 128 + 15
    assert ends_soon(begun)


def test_a_program_that_is_not_there_is_a_failure():
    assert run_jobs([Job("none", ("/no/such/program",), {}, 1)])[0].outcome == "failed"


def test_parts_of_the_weights_come_together_and_strangers_do_not(tmp_path, monkeypatch):
    gguf = tmp_path / "w.gguf"
    gguf.write_bytes(os.urandom(1000))
    folder = tmp_path / "model"
    weights.write_part(gguf, folder, 1, 0, 400)
    assert "1 of 2 parts" in weights.make_model(folder, tmp_path)
    weights.write_part(gguf, folder, 2, 400, 1000)
    made = []
    fake = type(sys)("sluice_client.fetch_model")
    fake.ToolError = RuntimeError
    fake.make_from_gguf = lambda name, into, file: made.append(
        (name, into, hashlib.sha256(file.read_bytes()).hexdigest()))
    monkeypatch.setitem(sys.modules, "sluice_client.fetch_model", fake)
    monkeypatch.setattr("sluice_client.fetch_model", fake, raising=False)
    assert weights.make_model(folder, ROOT / "tools") == ""
    assert made == [("smollm2-135m-instruct", folder, hashlib.sha256(gguf.read_bytes()).hexdigest())]
    assert weights.parts_here(folder) == []

    weights.write_part(gguf, folder, 1, 0, 400)
    gguf.write_bytes(os.urandom(1000))
    weights.write_part(gguf, folder, 2, 400, 1000)
    assert "not of one file" in weights.make_model(folder, ROOT / "tools")


def test_a_stage_unpacks_beside_itself_and_a_part_alone_says_what_is_lacking(tmp_path):
    whole = stage.Item(script(tmp_path, "sluice-server", ""), "tools/sluice-server", "programs")
    folder = tmp_path / "stage"
    folder.mkdir()
    stage.write_payload([whole], Place(tmp_path), folder / stage.PAYLOAD)
    with pytest.raises(SystemExit, match="part 2 alone"):
        gpu_test.unpack(folder)  # has no programs
    (tmp_path / "stage-unpacked/build/release/bin").mkdir(parents=True)
    assert gpu_test.unpack(folder).root == tmp_path / "stage-unpacked"
    assert (tmp_path / "stage-unpacked/tools/sluice-server").is_file()
    assert os.access(tmp_path / "stage-unpacked/tools/sluice-server", os.X_OK)


def test_end_to_end_results_are_pytests_one_by_one(tmp_path):
    junit = tmp_path / "junit.xml"
    junit.write_text("""<testsuites><testsuite>
      <testcase name="test_a" time="0.5"/>
      <testcase name="test_b"><failure message="no">assert 1 == 2</failure></testcase>
      <testcase name="test_c"><error message="no">setup</error></testcase>
      <testcase name="test_d"><skipped message="no model"/></testcase>
    </testsuite></testsuites>""")
    results = e2e.read_results(junit, "e2e")
    assert [(r.name, r.outcome) for r in results] == [
        ("e2e: test_a", "passed"), ("e2e: test_b", "failed"), ("e2e: test_c", "failed"),
        ("e2e: test_d", "skipped")]
    assert results[1].said == "assert 1 == 2"


def test_a_file_of_end_to_end_tests_that_hangs_names_the_test_that_did(tmp_path, capsys):
    folder = tmp_path / "tests/e2e"
    folder.mkdir(parents=True)
    (folder / "test_hangs.py").write_text(
        "import time, pytest\n\n"
        "@pytest.mark.parametrize('how', ['in a moment', 'never'])\n"
        "def test_ends(how):\n    time.sleep(0 if how == 'in a moment' else 60)\n\n"
        "def test_is_not_reached():\n    pass\n")
    (folder / "test_works.py").write_text("def test_works():\n    pass\n")
    (folder / "test_is_broken.py").write_text("import os\nos._exit(3)\n")
    begin = time.monotonic()
    results = e2e.run_e2e(Place(tmp_path), "cpu", None, 6,
                          files=("test_hangs.py", "test_works.py", "test_is_broken.py"))
    assert time.monotonic() - begin < 40
    assert [(r.name, r.outcome) for r in results] == [
        ("e2e: test_ends[in a moment]", "passed"), ("e2e: test_ends[never]", "failed"), ("e2e: test_works", "passed"),
        ("e2e: test_is_broken.py", "failed")]
    said = capsys.readouterr().out
    assert "FAILED  e2e: test_ends[never]" in said and "out of time after 6 s" in said and "exit status 3" in said
    assert "e2e: test_works.py: 1 passed, 0 failed, 0 skipped (" in said


def test_end_to_end_tests_are_there_and_need_no_other_program():
    for file in e2e.FILES:
        text = (ROOT / "tests/e2e" / file).read_text()
        assert "SLUICE" not in text and "sluice_json" not in text, file


def test_libraries_are_those_that_a_bare_system_lacks():
    names = stage.libraries([Path("/bin/bash")])
    assert names and not any(stage.SYSTEM_LIBRARIES.match(name) for name in names)
    assert all(file.is_file() for file in names.values())


def test_a_folder_that_is_no_stage_is_left_alone(tmp_path):
    (tmp_path / "precious").write_text("x")
    with pytest.raises(SystemExit, match="choose another --out"):
        stage.stage(Place(ROOT), tmp_path, None)
    assert (tmp_path / "precious").is_file()


def test_a_bench_writes_what_was_measured_and_on_what_and_a_failed_one_counts(place, tmp_path, capsys):
    script(place.bin, "sluice-copy-bench", "print('copy 55.1 GB/s')")
    script(place.bin, "sluice-other-bench", "import sys; print('no memory'); sys.exit(3)")
    script(place.bin, "sluice-third-bench", "import sys; sys.exit(77)")
    script(place.bin, "sluice-metrics-bench", "import sys; sys.exit(1)")  # a bench of the CPU
    assert bench.run_benches(place, tmp_path / "out", None) == (1, 1, 1)
    report = json.loads((tmp_path / "out/bench.json").read_text())
    assert [b["status"] for b in report["benches"]] == [0, 3, 77]
    assert {"processor", "cores", "date", "revision"} <= report["machine"].keys()
    text = (tmp_path / "out/bench.md").read_text()
    assert "copy 55.1 GB/s" in text and "ended with 3" in text
    assert "FAILED  sluice-other-bench" in capsys.readouterr().err


def test_a_large_gpu_measures_64_sequences_and_one_of_80_gb_48(place, tmp_path):
    small = bench.step_bench(place, {"memory_mib": "81559"}, tmp_path)
    large = bench.step_bench(place, {"memory_mib": "143771"}, tmp_path)
    assert "1,8,32,48" in small.command
    assert "1,8,32,64" in large.command


def test_operators_of_a_step_are_timed_with_a_model_that_exists(place, tmp_path):
    timed = bench.operators_bench(Place(ROOT), tmp_path)
    assert (Path(of(timed.command, "--model")) / "config.json").is_file()
    assert of(timed.command, "--only") == "step" and Path(of(timed.command, "--json")) == timed.json_file


@pytest.mark.parametrize("tool", ["gpu-stage", "gpu-test"])
def test_help_teaches(tool):
    done = subprocess.run([ROOT / "tools" / tool, "--help"], capture_output=True, text=True, check=True)
    assert "examples:" in done.stdout and f"{tool}" in done.stdout


@pytest.mark.parametrize("part", sorted(policies.PARTS.keys() - transport.TRANSPORT_PARTS.keys()))
def test_each_part_names_a_model_and_policies_that_exist(part, tmp_path):
    for run in policies.PARTS[part]:
        if run.quality:
            continue
        for quick in (False, True):
            words = policies.command(run.quickly() if quick else run, Place(ROOT), "cpu", quick, tmp_path, None)
            flags = dict(zip(words[2::1], words[3::1]))
            assert (Path(flags["--model"]) / "config.json").is_file()
            if isinstance(run, (policies.IntervalRun, policies.HeadsRun, latent.ProfileRun,
                                policies.SpeculationRun, policies.OwnRun)):
                continue
            assert flags["--policies"].split(",")[0]
            assert int(flags["--max-batch"]) >= max(map(int, flags["--batches"].split(",")))


@pytest.mark.parametrize("part", sorted(policies.PARTS))
def test_a_run_that_is_chosen_alone_brings_the_runs_whose_files_it_reads(part, tmp_path):
    for run in policies.PARTS[part]:
        runs = policies.chosen(part, f"^{re.escape(run.name)}$")
        assert run in runs and [r for r in policies.PARTS[part] if r in runs] == runs
        words = policies.command(run, Place(ROOT), "cpu", False, tmp_path, tmp_path / "texts")
        earlier = [r.name for r in runs[:runs.index(run)]]
        for flag in {"--policy-profile", "--operators"} & set(words):
            assert Path(of(words, flag)).stem in earlier


def test_what_is_compared_is_chosen_with_what_compares_it():
    def names(part, only):
        return [run.name for run in policies.chosen(part, only)]

    assert names("ess-proportion", "forecast") == ["operators", "proportion", "forecast"]
    assert names("ess-proportion", "operators|proportion") == ["operators", "proportion"]
    assert names("clo-figure10", "llama-8k-4") == ["llama-8k-heads", "llama-8k-4"]
    assert names("kv-transport", None) == ["link-8", "link-32", "pull", "push", "pull-ranks", "push-ranks"]


def run_gpu_test(place, *flags):
    return subprocess.run([sys.executable, "-m", "sluice_gpu.gpu_test", *flags], capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": str(ROOT / "tools"), "SLUICE_GPU_ROOT": str(place.root)})


def test_gpu_test_runs_some_runs_of_a_part_and_names_all_if_it_knows_none(place, tmp_path):
    script(place.bin, "sluice-link-bench", "print('linked')")
    part = ("--bench", "--part", "kv-transport", "--device", "cpu", "--results", tmp_path / "out")
    done = run_gpu_test(place, *part, "--only", "^pu..$")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "2 passed, 0 failed, 0 skipped")
    report = json.loads((tmp_path / "out/policies-kv-transport.json").read_text())
    assert [run["name"] for run in report["runs"]] == ["pull", "push"]
    done = run_gpu_test(place, *part, "--only", "shove")
    assert done.returncode != 0
    assert done.stderr == ("gpu-test: no run of part kv-transport matches --only 'shove'; its runs are link-8, link-32, "
                           "pull, push, pull-ranks, push-ranks\n")


def test_a_part_stops_when_its_seconds_are_over(place, tmp_path):
    script(place.bin, "sluice-link-bench", "import time; time.sleep(600)")
    done = run_gpu_test(place, "--bench", "--part", "kv-transport", "--device", "cpu", "--results", tmp_path / "out",
                        "--only", "pull$", "--seconds", "2")
    assert done.returncode == 1
    assert 2 <= float(re.search(r"^FAILED  pull: ran out of time after (\S+) s$", done.stdout, re.MULTILINE)[1]) < 60


def of(words, flag):
    return words[words.index(flag) + 1]


def profile_and_run(part, quick, folder):
    """Returns the commands of a part that measures a profile and then takes it."""
    profile, run = (r.quickly() if quick else r for r in policies.PARTS[part])
    measured = policies.command(profile, Place(ROOT), "cpu", quick, folder, None)
    takes = policies.command(run, Place(ROOT), "cpu", quick, folder, None)
    assert Path(measured[0]).name == "sluice-profile" and Path(takes[0]).name == "sluice-bench"
    assert of(takes, "--policy-profile") == of(measured, "--out")
    assert of(takes, "--model") == of(measured, "--model")
    return measured, takes


@pytest.mark.parametrize("part", ["clo32k", "clo-forms", "clo128k"])
@pytest.mark.parametrize("quick", [False, True])
def test_heads_are_measured_on_the_workload_of_the_run_that_takes_them(part, quick, tmp_path):
    measured, takes = profile_and_run(part, quick, tmp_path)
    for flag in ("--drift", "--turning-heads", "--turning"):
        assert of(measured, flag) == of(takes, flag)
    assert of(measured, "--drift-context") == of(takes, "--contexts")


@pytest.mark.parametrize("quick", [False, True])
def test_shapes_of_figure_10_take_the_heads_of_their_model_and_context(quick, tmp_path):
    heads = {}
    runs = policies.PARTS["clo-figure10"] + policies.PARTS["clo-qwen128k"]
    for run in (r.quickly() if quick else r for r in runs):
        flags = policies.command(run, Place(ROOT), "cpu", quick, tmp_path, None)
        if isinstance(run, policies.HeadsRun):
            heads[of(flags, "--out")] = of(flags, "--model"), of(flags, "--drift-context")
        else:
            assert heads[of(flags, "--policy-profile")] == (of(flags, "--model"), of(flags, "--contexts"))
    assert len(heads) == 4


@pytest.mark.parametrize("part", sorted(fluxion.FLUXION_PARTS))
def test_homes_of_fluxion_fit_dram_with_their_digests(part):
    for run in policies.PARTS[part]:
        tokens = sum(run.contexts) if run.traffic else max(run.batches) * run.contexts[0]
        home = (tokens + max(run.batches) * 128) * policy_runs.token_bytes(ROOT / run.model)
        assert home * 1.117 < run.dram_gib * policy_runs.GIB, run.name


def test_speculation_runs_batches_that_fit_hbm_and_says_its_acceptance(tmp_path):
    [run] = policies.PARTS["speculation"]
    model = ROOT / run.model
    assert run.fitting(model, 143_771) == [1, 8, 24]
    small = run.fitting(model, 81_559)
    assert small[:2] == [1, 8] and 8 < small[2] < 24
    for quick in (False, True):
        words = policies.command(run.quickly() if quick else run, Place(ROOT), "cpu", quick, tmp_path, None)
        assert words[1] == "step" and "--dummy" in words
        assert of(words, "--speculation-tokens") == "3" and of(words, "--acceptance") == "0.7"
        assert Path(of(words, "--json")).parent.is_dir()


def test_links_are_measured_between_two_gpus_where_there_are_two(place, tmp_path, monkeypatch):
    for gpus, device, flags in ((2, "cuda", True), (1, "cuda", False), (2, "cpu", False)):
        monkeypatch.setattr(machine, "gpus", lambda gpus=gpus: gpus)
        for run in policies.PARTS["kv-transport"]:
            words = policies.command(run, place, device, False, tmp_path, None)
            assert Path(words[0]).name == "sluice-link-bench" and of(words, "--tokens") == "32768"
            assert ("--devices" in words) == flags
            assert int(of(policies.command(run.quickly(), place, device, True, tmp_path, None), "--tokens")) < 32768


@pytest.mark.parametrize("gpus, tensors, experts", [(0, "1,2", 16), (1, "1,2", 16), (2, "1,2", 16), (3, "1,2", 16),
                                                    (4, "1,2,4", 32), (8, "1,2,4", 32)])
def test_ranks_are_as_many_as_have_a_gpu_each(gpus, tensors, experts, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "gpus", lambda: gpus)
    for run in policies.PARTS["tp"]:
        assert of(policies.command(run, Place(ROOT), "cuda", False, tmp_path, None), "--ranks") == tensors
    [run] = policies.PARTS["ep"]
    words = policies.command(run, Place(ROOT), "cuda", False, tmp_path, None)
    config = json.loads((Path(of(words, "--model")) / "config.json").read_text())
    assert config["n_routed_experts"] == experts == 8 * int(of(words, "--ranks"))
    assert of(words, "--divide") == "experts" and Path(of(words, "--json")).parent.is_dir()


def test_homes_at_the_papers_proportion_fit_a_host_of_256_gib():
    run = ranks.PROPORTION
    tokens = run.context + (policy_runs.WINDOWS + 1) * run.steps + policy_runs.SPARE_TOKENS
    assert 61 * 656 * tokens * ranks.ESS_SEQUENCES < run.dram_gib * policy_runs.GIB < 230 * policy_runs.GIB
    assert ranks.FULL_SEQUENCES <= run.hbm_mib * (1 << 20) / (61 * 788 * tokens) < ranks.FULL_SEQUENCES + 3


def test_a_forecast_stands_beside_the_gain_that_was_measured():
    def report(**rates):
        return {"details": {"runs": [{"policy": policy, "batch": batch, "tokens_per_second": rate}
                                     for policy, by_batch in rates.items() for batch, rate in by_batch.items()]}}

    measured = report(full={1: 60.0, 52: 1000.0}) | {}
    measured["details"]["runs"] += [{"policy": "ess:ratio=0.19", "batch": 160, "tokens_per_second": 1200.0}]
    said = ranks.gains(measured, report(full={52: 2000.0, 160: 2500.0}, ess={52: 1900.0, 160: 3000.0}))
    assert "measured: full, 52 sequences, 1000 tokens/s; ess, 160 sequences, 1200 tokens/s: +20.0 % over full" in said
    assert "forecast: full, 52 sequences, 2000 tokens/s; ess, 160 sequences, 3000 tokens/s: +50.0 % over full" in said
    assert "-20.0 % off" in said


def test_a_bench_shows_its_lines_as_they_come_and_ends_in_time(tmp_path):
    came = []
    begin = time.monotonic()
    status, said = run_command(("/bin/sh", "-c", "echo one; echo two; exec sleep 60"), dict(os.environ), 3,
                               on_line=lambda line: came.append((line, time.monotonic() - begin)))
    assert status is None and said == "one\ntwo\n" and [line for line, _ in came] == ["one\n", "two\n"]
    assert came[-1][1] < 3 <= time.monotonic() - begin < 30
    assert run_command(("/bin/sh", "-c", "echo end; exit 3"), dict(os.environ), 30, on_line=print) == (3, "end\n")


def test_drawn_lengths_are_those_of_their_seed():
    lengths = fluxion.drawn(16384, 65536, seed=3)
    assert lengths == fluxion.drawn(16384, 65536, seed=3) != fluxion.drawn(16384, 65536, seed=4)
    assert len(set(lengths)) == 8 and 16384 <= min(lengths) and max(lengths) <= 65536
    for run in policies.PARTS["fluxion-mixed"] + policies.PARTS["fluxion-schedule"]:
        assert run.batches == (len(run.contexts),) and run.distinct == 1


@pytest.mark.parametrize("quick", [False, True])
def test_intervals_are_measured_before_the_run_that_takes_them(quick, tmp_path):
    measured, takes = profile_and_run("profile", quick, tmp_path)
    for profiled, run in (("--context", "--contexts"), ("--budget-tokens", "--budget"),
                          ("--dense-layers", "--dense-layers")):
        assert of(measured, profiled) == of(takes, run)
    assert {"scout", "scout:controller=1"} <= set(of(takes, "--policies").split(","))


@pytest.mark.parametrize("quick", [False, True])
def test_a_profile_is_measured_before_the_run_that_takes_it(quick, tmp_path):
    measured, takes = profile_and_run("ess-divide", quick, tmp_path)
    assert of(takes, "--contexts") == of(measured, "--contexts")
    # The pools that are divided have more places than the fewest that were profiled.
    least = float(of(measured, "--ratios").split(",")[0])
    divided = [p for p in of(takes, "--policies").split(",") if "divide=1" in p]
    assert divided and all(p.replace(":divide=1", "") in of(takes, "--policies").split(",") for p in divided)
    assert least < float(divided[0].split("ratio=")[1].split(":")[0])

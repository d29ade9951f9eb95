"""Reads deploy/Dockerfile without building it: its stages, paths, users, ports, and the steps that it calls."""

import fnmatch
import json
import re
import shlex
import subprocess
from dataclasses import dataclass, field

import pytest
from manifests import OVERLAYS, ROOT, documents, nodes_of, workloads
from support.nodes import BIN

TEXT = (ROOT / "deploy/Dockerfile").read_text()
KNOWN = {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "EXPOSE", "CMD"}


@dataclass
class Stage:
    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def all_of(self, instruction: str) -> list[str]:
        return [rest for name, rest in self.steps if name == instruction]


def parsed(text: str) -> tuple[dict[str, str], dict[str, Stage]]:
    """Returns the arguments before the first stage, and the stages by name."""
    arguments, stages, current = {}, {}, None
    text = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for line in text.replace("\\\n", " ").splitlines():
        if not line.strip():
            continue
        instruction, rest = line.strip().split(None, 1)
        assert instruction in KNOWN, line
        if instruction == "ARG":
            assert current is None
            arguments.update([rest.split("=", 1)])
        elif instruction == "FROM":
            base, name = re.fullmatch(r"(\S+) AS ([a-z-]+)", rest).groups()
            base = re.sub(r"\$\{(\w+)\}", lambda m: arguments[m[1]], base)
            assert name not in stages
            assert base in stages or re.fullmatch(r"[a-z/]+:[a-z0-9.-]+", base), base
            current = stages[name] = Stage(base)
        else:
            current.steps.append((instruction, " ".join(rest.split())))
    return arguments, stages


ARGUMENTS, STAGES = parsed(TEXT)


def lineage(name: str) -> list[Stage]:
    """Returns the stages from the first one to this one."""
    found = []
    while name in STAGES:
        found.insert(0, STAGES[name])
        name = STAGES[name].base
    return found


def images() -> dict[str, str]:
    """Returns image -> target, from the commands of deploy/README.md."""
    found = re.findall(r"docker build -f deploy/Dockerfile --target (\S+) -t (\S+) \.", (ROOT / "deploy/README.md").read_text())
    return {image: target for target, image in found}


def test_the_images_that_the_manifests_name_are_targets():
    named = {w.container["image"] for overlay in OVERLAYS for w in workloads(documents(overlay))}
    assert named <= set(images()) and set(images().values()) <= set(STAGES)
    assert len(named) == 3


@pytest.mark.parametrize("target", ["cpu", "cuda", "demo", "router"])
def test_nothing_of_root_and_nothing_to_build_with_is_in_an_image(target):
    stages = lineage(target)
    assert stages[0].base == f"{ARGUMENTS['DEBIAN']}-slim"
    users = [user for stage in stages for user in stage.all_of("USER")]
    ports = {int(p) for stage in stages for rest in stage.all_of("EXPOSE") for p in rest.split()}
    used = [w for overlay in OVERLAYS for w in workloads(documents(overlay)) if images()[w.container["image"]] == target]
    assert users and users[-1] == "10001:10001"
    for workload in used:
        security = workload.pod["securityContext"]
        assert users[-1] == f"{security['runAsUser']}:{security['runAsGroup']}"
        # Other ranks than 0 have admin ports too, as many as an overlay has ranks, and ranks of several pods meet at one.
        named = {name: port for name, port in workload.ports.items() if not name.startswith(("admin-rank-", "ranks"))}
        serves = "grpc" in named  # A pod of another rank than 0 does not.
        assert set(named.values()) == (ports if serves else ports - {7000})
    assert used or target == "cpu"
    for stage in stages:
        seen = [name for name, _ in stage.steps]
        if "USER" in seen:  # nothing can be installed after it
            assert "RUN" not in seen[seen.index("USER"):]
        for command in stage.all_of("CMD"):
            assert json.loads(command)[0] in {"sluice-server", "smg"}


def ignored(path: str) -> bool:
    patterns = [p for p in (ROOT / "deploy/Dockerfile.dockerignore").read_text().splitlines() if p and not p.startswith("#")]
    return any(fnmatch.fnmatch(path, p.removeprefix("**/")) or path.startswith(f"{p}/") for p in patterns)


def copies():
    for name, stage in STAGES.items():
        for rest in stage.all_of("COPY"):
            words = shlex.split(rest)
            source = words.pop(0).removeprefix("--from=") if words[0].startswith("--from=") else None
            yield name, source, words[:-1], words[-1]


def test_what_is_copied_is_there():
    names = list(STAGES)
    made = {"/src/.venv", "/models", "/usr/local/cuda-13.0/", "/usr/local/cuda-13.0/targets/x86_64-linux/lib/libcublasLt.so.13",
            *(f"/src/build/package/bin/{program}" for program in ("sluice-server", "sluice-prefill"))}
    for stage, source, paths, _ in copies():
        if source is None:
            for path in paths:
                assert (ROOT / path).exists() and not ignored(path), (stage, path)
        else:
            assert names.index(source) < names.index(stage)
            assert set(paths) <= made, (stage, paths)
    for needed in ("tools/setup", "tools/fetch-model", "tools/sluice_client", "CMakePresets.json", "proto", "src", "kernels",
                   "cmake", "tests"):
        assert (ROOT / needed).exists() and not ignored(needed)
    for folder in ("build", ".venv", "models", ".git"):
        assert ignored(folder)


def test_the_steps_are_the_repositorys_own():
    presets = {p["name"] for p in json.loads((ROOT / "CMakePresets.json").read_text())["configurePresets"] if not p.get("hidden")}
    options = subprocess.run([ROOT / "tools/setup", "--help"], capture_output=True, text=True, check=True).stdout
    called = set()
    for name, stage in STAGES.items():
        for step in stage.all_of("RUN"):
            for command in step.split("&&"):
                words = shlex.split(command)
                called.add(words[0])
                if words[0].endswith("tools/setup"):
                    assert all(f"tools/setup {option} " in options for option in words[1:]), command
                elif words[:2] == ["cmake", "--preset"]:
                    assert words[2] in presets
                    assert words[3:] == ["-D", "SLUICE_CUDA=ON" if name == "build-cuda" else "SLUICE_CUDA=OFF"]
                elif words[:2] == ["cmake", "--build"]:
                    assert words[2:4] == ["--preset", "package"] and set(words[5:]) == {"sluice-server", "sluice-prefill"}
                elif words[0] == "tools/fetch-model":
                    assert words[2] == f"/models/{words[1]}"
                elif words[0] == "apt-get":  # only setup installs packages, except Python for the router
                    assert name == "router"
    assert called == {"tools/setup", "/opt/sluice/tools/setup", "cmake", "strip", "tools/fetch-model", "rm", "apt-get"}


@pytest.mark.parametrize("program", ["sluice-server", "sluice-prefill"])
def test_the_packages_of_a_running_image_hold_every_library_that_the_programs_load(program):
    """Returns the packages by Debian's own records of dependencies and files."""
    setup = (ROOT / "tools/setup").read_text()
    wanted = set(re.search(r"^run_packages=\((.*?)\)", setup, re.DOTALL | re.MULTILINE)[1].split())
    held, queue = set(), list(wanted | {"libc6", "libstdc++6"})
    while queue:
        package = queue.pop()
        if package in held:
            continue
        shown = subprocess.run(["dpkg-query", "-W", "-f=${db:Status-Abbrev}${Depends}", package], capture_output=True, text=True,
                               check=False).stdout
        assert shown.startswith("ii") or package not in wanted, package
        if shown.startswith("ii"):  # otherwise it is an alternative or a virtual package
            held.add(package)
            queue += [re.match(r"[a-z0-9.+-]+", d.strip())[0] for d in re.split(r"[,|]", shown[3:]) if d.strip()]
    loaded = re.findall(r"^\s*(\S+) => (\S+)", subprocess.run(["ldd", BIN / program], capture_output=True, text=True, check=True).stdout,
                        re.MULTILINE)
    assert len(loaded) > 20
    files = set()
    for package in held:
        files |= {line.rsplit("/", 1)[-1] for line in subprocess.run(["dpkg-query", "-L", package], capture_output=True, text=True, check=True).stdout.splitlines()}
    sanitizers = ("libasan", "libubsan", "libtsan")
    missing = {name for name, _ in loaded if name not in files and not name.startswith(sanitizers)}
    assert not missing, f"add the packages of {missing} to run_packages of tools/setup"

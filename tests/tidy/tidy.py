"""Holds the tree to the architecture: what includes what, what is built, what is linked; and its pages.

    python3 tests/tidy/tidy.py SOURCE_DIR BUILD_DIR --cuda ON|OFF

prints one line per breach and exits with 1 if there is any. The rules:

include   Folders of src/ are layers. A file includes its own folder, folders below it in LAYERS,
          and of kernels/ the contracts, params.h, sparse_params.h and kernel_table.h, and the case
          table, kernel_cases.h. kernels/ includes nothing from src/, and neither includes anything from
          tests/.
unbuilt   Every .cc and .cu under src/, kernels/ and tests/ belongs to a target, as
          compile_commands.json of BUILD_DIR says. With CUDA off, .cu files and folders named cuda/
          are exempt; with it on, what stands in for them, *_absent.cc.
unused    Every header under those three is included by some file.
link      The library of a folder of src/ lists, in its own CMakeLists.txt, every folder that its
          files include: the link graph is the architecture.
room      A large folder (ROOMED) is divided into rooms, a folder and a library each. Every source file
          lies in a room, includes among rooms form no circle, and a room under src/ links the rooms
          that it includes.
name      No test case has a semicolon in its name: ctest would cut the name there and run nothing.
page      README.md has at most 250 lines, every other Markdown page at most 400. A relative link in a
          page leads to a file or folder of the tree and, with an anchor, to a heading of that page.
"""

import argparse
import json
import os
import pathlib
import re
import sys

# Layers from the top down; includes point down.
LAYERS = ["server", "profile", "bench", "facade", "service", "prefill", "engine", "scheduler", "model", "attention", "kv",
          "request", "sampling", "device", "metrics", "config", "base"]
KERNEL_CONTRACTS = {"kernels/params.h": "sluice_kernel_params",
                    "kernels/sparse_params.h": "sluice_kernel_params",
                    "kernels/bring_params.h": "sluice_kernel_params",
                    "kernels/hash_params.h": "sluice_kernel_params",
                    "kernels/fluxion_params.h": "sluice_kernel_params",
                    "kernels/fluxion_segments.h": "sluice_kernel_params",
                    "kernels/draft_params.h": "sluice_kernel_params",
                    "kernels/exchange_params.h": "sluice_kernel_params",
                    "kernels/pull_params.h": "sluice_kernel_params",
                    "kernels/peer_params.h": "sluice_kernel_params",
                    "kernels/ring_params.h": "sluice_kernel_params",
                    "kernels/list_parts.h": "sluice_kernel_params",
                    "kernels/kernel_table.h": "sluice_kernels",
                    "kernels/weight_formula.h": "sluice_kernels",
                    "kernels/cuda/common/crc32c.h": "sluice_kernels_cuda",
                    "kernels/cuda/common/launch.h": "sluice_kernels_cuda",
                    "kernels/cuda/experts/exchange.h": "sluice_kernels_cuda",
                    "kernels/cuda/ranks/peers.h": "sluice_kernels_cuda",
                    "kernels/kernel_cases.h": "sluice_kernels",
                    "kernels/latent_cases.h": "sluice_kernels",
                    "kernels/latent_params.h": "sluice_kernel_params",
                    "kernels/e4m3.h": "sluice_kernel_params",
                    "kernels/fp8.h": "sluice_kernel_params",
                    "kernels/fp8_pairs.h": "sluice_kernel_params"}
# Folders that are divided into rooms.
ROOMED = ["src/service", "src/bench", "kernels/cuda"]
ROOTS = ["src", "kernels", "tests"]
SOURCES = {".cc", ".cu"}
HEADERS = {".h", ".cuh"}
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"', re.MULTILINE)
# Folders of the root whose pages are not ours.
FOREIGN = {"build", "models"}
PAGE_LINES = 400
FRONT_DOOR_LINES = 250
MARKDOWN_LINK = re.compile(r"\]\(([^()\s]+)\)")
HEADING = re.compile(r"^#{1,6}[ \t]+(.*?)[ \t]*$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
# The names of ours that a target is declared and linked with.
DECLARATION = re.compile(r"\b(?:sluice_library|sluice_binary|add_library|add_executable|"
                         r"target_link_libraries)\s*\(([^)]*)\)")


class Tree:
    """The source files of a tree and the project files that each includes."""

    def __init__(self, root):
        self.root = pathlib.Path(root).resolve()
        self.files = sorted(
            path.relative_to(self.root).as_posix()
            for top in ROOTS for path in (self.root / top).rglob("*")
            if path.suffix in SOURCES | HEADERS and path.is_file())
        self.includes = {file: INCLUDE.findall(self.text(file)) for file in self.files}

    def text(self, file):
        return (self.root / file).read_text(encoding="utf-8")


def layer(path):
    """The folder of src/ that a file is in, or None: src/device/cpu/a.h is in device."""
    parts = path.split("/")
    return parts[1] if parts[0] == "src" and len(parts) > 2 else None


def check_include_direction(tree):
    for file, includes in tree.includes.items():
        top = file.split("/")[0]
        if top == "tests":
            continue
        own = layer(file)
        if top == "src" and own not in LAYERS:
            yield f"include: {file}: no layer of this name; the layers are {', '.join(LAYERS)}"
            continue
        for include in includes:
            other_top = include.split("/")[0]
            if other_top == "tests":
                yield f"include: {file} includes {include}: {top}/ includes nothing from tests/"
            elif top == "kernels" and other_top == "src":
                yield f"include: {file} includes {include}: kernels/ includes nothing from src/"
            elif top == "src" and other_top == "kernels" and include not in KERNEL_CONTRACTS:
                yield (f"include: {file} includes {include}: of kernels/, src/ includes only "
                       f"{' and '.join(KERNEL_CONTRACTS)}")
            elif top == "src" and other_top == "src":
                other = layer(include)
                if other not in LAYERS:
                    yield f"include: {file} includes {include}: no layer of this name"
                elif LAYERS.index(other) < LAYERS.index(own):
                    yield f"include: {file} includes {include}: {own} is below {other}"


def is_cuda(file):
    return file.endswith(".cu") or "cuda" in file.split("/")[:-1]


def is_stand_in(file):
    """What a build without CUDA has in a CUDA file's place."""
    return file.endswith("_absent.cc")


def check_every_source_is_built(tree, build_dir, cuda):
    commands = pathlib.Path(build_dir) / "compile_commands.json"
    if not commands.is_file():
        yield f"unbuilt: {commands} is missing: configure with -DCMAKE_EXPORT_COMPILE_COMMANDS=ON"
        return
    built = set()
    for entry in json.loads(commands.read_text(encoding="utf-8")):
        built.add((pathlib.Path(entry["directory"]) / entry["file"]).resolve())
    for file in tree.files:
        if pathlib.PurePosixPath(file).suffix not in SOURCES or (is_cuda(file) and not cuda):
            continue
        if is_stand_in(file) and cuda:
            continue
        if (tree.root / file).resolve() not in built:
            yield f"unbuilt: {file}: no target builds it"


def check_every_header_is_included(tree):
    included = {include for includes in tree.includes.values() for include in includes}
    for file in tree.files:
        if pathlib.PurePosixPath(file).suffix in HEADERS and file not in included:
            yield f"unused: {file}: nothing includes it"


def linked_libraries(tree, folder):
    """Names that the CMakeLists.txt files of a folder of src/ link, those below it too."""
    names = set()
    for path in sorted((tree.root / "src" / folder).rglob("CMakeLists.txt")):
        text = re.sub(r"#.*", "", path.read_text(encoding="utf-8"))
        for arguments in DECLARATION.findall(text):
            names.update(arguments.split())
    return names


def check_links(tree):
    for folder in LAYERS:
        needed = {}
        for file, includes in tree.includes.items():
            if layer(file) != folder:
                continue
            for include in includes:
                other = layer(include)
                if other in LAYERS and other != folder:
                    needed.setdefault(f"sluice_{other}", (file, include))
                elif include in KERNEL_CONTRACTS:
                    needed.setdefault(KERNEL_CONTRACTS[include], (file, include))
        linked = linked_libraries(tree, folder)
        if "sluice_kernels" in linked or (folder != "base" and "sluice_base" in linked):
            linked.add("sluice_kernel_params")  # both hand it on
        for library, (file, include) in sorted(needed.items()):
            if library not in linked and not any(name.startswith(f"{library}_") for name in linked):
                yield (f"link: src/{folder}/CMakeLists.txt does not list {library}, but {file} "
                       f"includes {include}")


def room(path):
    """The room that a file is in, as (folder, room); the room is None for a file outside of any."""
    for folder in ROOMED:
        if path.startswith(f"{folder}/"):
            below = path[len(folder) + 1:].split("/")
            return folder, below[0] if len(below) > 1 else None
    return None


def circle(edges):
    """A circle in a graph {node: {neighbour, ...}} as a list of nodes, or None."""
    done = set()

    def visit(node, path):
        if node in path:
            return path[path.index(node):] + [node]
        if node in done:
            return None
        for neighbour in sorted(edges.get(node, ())):
            found = visit(neighbour, path + [node])
            if found:
                return found
        done.add(node)
        return None

    for node in sorted(edges):
        found = visit(node, [])
        if found:
            return found
    return None


def check_rooms(tree):
    edges = {folder: {} for folder in ROOMED}
    for file, includes in tree.includes.items():
        own = room(file)
        if own is None:
            continue
        folder, name = own
        if name is None:
            yield f"room: {file}: {folder}/ is divided into rooms; put it into one"
            continue
        for include in includes:
            other = room(include)
            if other and other[0] == folder and other[1] not in (None, name):
                edges[folder].setdefault(name, {}).setdefault(other[1], (file, include))
    for folder, rooms in edges.items():
        found = circle(rooms)
        if found:
            yield f"room: the rooms of {folder}/ include each other: {' -> '.join(found)}"
        if not folder.startswith("src/"):
            continue
        layer_name = folder.split("/")[1]
        for name, others in sorted(rooms.items()):
            linked = linked_libraries(tree, f"{layer_name}/{name}")
            for other, (file, include) in sorted(others.items()):
                if f"sluice_{layer_name}_{other}" not in linked:
                    yield (f"room: {folder}/{name}/CMakeLists.txt does not list "
                           f"sluice_{layer_name}_{other}, but {file} includes {include}")


def anchor(heading):
    """The anchor that a heading has on a rendered page."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def anchors(text):
    found = set()
    for heading in HEADING.findall(FENCE.sub("", text)):
        name, number = anchor(heading), 0
        while (unique := f"{name}-{number}" if number else name) in found:
            number += 1
        found.add(unique)
    return found


def check_pages(tree):
    pages = {}
    for folder, below, files in os.walk(tree.root):
        at_root = pathlib.Path(folder) == tree.root
        below[:] = sorted(name for name in below
                          if not name.startswith(".") and not (at_root and name in FOREIGN))
        pages.update((path, path.read_text(encoding="utf-8"))
                     for path in (pathlib.Path(folder) / name for name in sorted(files)) if path.suffix == ".md")
    for path, text in pages.items():
        name = path.relative_to(tree.root).as_posix()
        limit = FRONT_DOOR_LINES if name == "README.md" else PAGE_LINES
        lines = len(text.splitlines())
        if lines > limit:
            yield f"page: {name} has {lines} lines, and at most {limit} are read"
        for link in MARKDOWN_LINK.findall(FENCE.sub("", text)):
            if re.match(r"[a-z]+:", link):
                continue
            target, _, heading = link.partition("#")
            found = (path.parent / target).resolve() if target else path
            if not found.exists():
                yield f"page: {name} links {link}: no such file"
            elif heading and found.suffix == ".md" and heading not in anchors(pages.get(found, "")):
                yield f"page: {name} links {link}: no such heading"


TEST_NAME = re.compile(r'\b(?:TEST_CASE|SLUICE_TEST_\w+)\(\s*"([^"]*)"')


def check_test_names(tree):
    for file in tree.files:
        if file.startswith("tests/"):
            for name in TEST_NAME.findall(tree.text(file)):
                if ";" in name:
                    yield f"name: {file}: the name of a test case has a semicolon: {name}"


def breaches(source_dir, build_dir, cuda):
    tree = Tree(source_dir)
    if not tree.files:
        return [f"there are no sources under {source_dir}"]
    return [*check_include_direction(tree), *check_every_source_is_built(tree, build_dir, cuda),
            *check_every_header_is_included(tree), *check_links(tree), *check_rooms(tree), *check_test_names(tree),
            *check_pages(tree)]


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source_dir")
    parser.add_argument("build_dir")
    parser.add_argument("--cuda", choices=["ON", "OFF"], required=True)
    args = parser.parse_args()
    found = breaches(args.source_dir, args.build_dir, args.cuda == "ON")
    for breach in found:
        print(breach)
    print(f"{len(found)} breaches" if found else "the tree is tidy")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

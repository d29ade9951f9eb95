"""Breaks each rule of tidy.py in a small tree of its own; exactly that must be reported."""

import json
import pathlib
import tempfile
import unittest

import tidy

# A tidy tree: base <- kv <- engine, and the kernels.
FILES = {
    "kernels/params.h": "struct P {};\n",
    "kernels/kernel_table.h": '#include "kernels/params.h"\n',
    "kernels/cpu/gemm.h": '#include "kernels/params.h"\n',
    "kernels/cpu/gemm.cc": '#include "kernels/cpu/gemm.h"\n',
    "kernels/cuda/linear/gemm.cu": '#include "kernels/params.h"\n',
    "src/base/clock.h": '#include "kernels/params.h"\n',
    "src/base/clock.cc": '#include "src/base/clock.h"\n#include <vector>\n',
    "src/base/CMakeLists.txt":
        "sluice_library(sluice_base SRCS clock.cc DEPS sluice_kernel_params)\n",
    "src/kv/pool.h": '#include "src/base/clock.h"\n',
    "src/kv/pool.cc": '#include "src/kv/pool.h"\n',
    "src/kv/CMakeLists.txt": "sluice_library(sluice_kv\n  SRCS pool.cc\n  DEPS sluice_base)\n",
    "src/engine/engine.cc": '#include "kernels/kernel_table.h"\n#include "src/kv/pool.h"\n',
    "src/engine/CMakeLists.txt":
        "sluice_library(sluice_engine SRCS engine.cc DEPS sluice_kv PRIVATE_DEPS sluice_kernels)\n",
    "tests/unit/kv/pool_test.cc": '#include "src/kv/pool.h"\n#include "kernels/cpu/gemm.h"\n',
}


class TidyTest(unittest.TestCase):
    def breaches(self, changes=None, cuda=False, unbuilt=()):
        """What is found in the tree above after `changes`; every source is built but `unbuilt`."""
        files = {**FILES, **(changes or {})}
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder) / "tree"
            build = pathlib.Path(folder) / "build"
            build.mkdir()
            for name, text in files.items():
                path = root / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            built = [name for name in files
                     if name.endswith((".cc", ".cu")) and name not in unbuilt]
            commands = [{"directory": str(root), "file": name, "command": ""} for name in built]
            (build / "compile_commands.json").write_text(json.dumps(commands), encoding="utf-8")
            return tidy.breaches(root, build, cuda)

    def expect(self, *parts, **change):
        """Exactly one breach is found, and it says all of `parts`."""
        found = self.breaches(**change)
        self.assertEqual(len(found), 1, found)
        for part in parts:
            self.assertIn(part, found[0])

    def test_a_tidy_tree_has_no_breaches(self):
        self.assertEqual(self.breaches(cuda=True), [])

    def test_an_include_that_points_up(self):
        self.expect("include: src/kv/pool.cc includes src/engine/batch.h", "kv is below engine",
                    changes={"src/engine/batch.h": "",
                             "src/kv/pool.cc": '#include "src/engine/batch.h"\n',
                             "src/kv/CMakeLists.txt":
                                 "sluice_library(sluice_kv DEPS sluice_base sluice_engine)\n"})

    def test_an_include_that_points_up_from_a_folder_below_a_layer(self):
        self.expect("include: src/kv/dram/arena.cc includes src/engine/batch.h",
                    changes={"src/engine/batch.h": "",
                             "src/kv/dram/arena.cc": '  #  include "src/engine/batch.h"\n',
                             "src/kv/CMakeLists.txt":
                                 "sluice_library(sluice_kv DEPS sluice_base sluice_engine)\n"})

    def test_every_layer_is_held_to_the_order(self):
        for upper, lower in zip(tidy.LAYERS, tidy.LAYERS[1:]):
            with self.subTest(upper=upper, lower=lower):
                found = self.breaches(changes={
                    f"src/{upper}/x.h": "",
                    f"src/{lower}/y.cc": f'#include "src/{upper}/x.h"\n'})
                self.assertTrue(any("include:" in line and f"{lower} is below {upper}" in line
                                    for line in found), found)

    def test_kernels_that_include_src(self):
        self.expect("include: kernels/cpu/gemm.cc includes src/base/clock.h", "nothing from src/",
                    changes={"kernels/cpu/gemm.cc": '#include "kernels/cpu/gemm.h"\n'
                                                    '#include "src/base/clock.h"\n'})

    def test_src_that_includes_more_of_kernels_than_the_contracts(self):
        self.expect("include: src/kv/pool.cc includes kernels/cpu/gemm.h",
                    changes={"src/kv/pool.cc": '#include "kernels/cpu/gemm.h"\n'})

    def test_src_that_includes_tests(self):
        self.expect("include: src/kv/pool.cc includes tests/helper.h",
                    changes={"tests/helper.h": "",
                             "src/kv/pool.cc": '#include "tests/helper.h"\n'})

    def test_a_folder_that_is_no_layer(self):
        self.expect("include: src/misc/a.cc", "no layer", changes={"src/misc/a.cc": ""})

    def test_a_source_that_no_target_builds(self):
        for file in ("src/kv/pool.cc", "kernels/cpu/gemm.cc", "tests/unit/kv/pool_test.cc"):
            with self.subTest(file=file):
                self.expect(f"unbuilt: {file}", unbuilt=[file])

    def test_cuda_sources_must_be_built_only_where_cuda_is_on(self):
        self.assertEqual(self.breaches(unbuilt=["kernels/cuda/linear/gemm.cu"], cuda=False), [])
        self.expect("unbuilt: kernels/cuda/linear/gemm.cu", unbuilt=["kernels/cuda/linear/gemm.cu"], cuda=True)
        stand_in = {"src/device/cuda_absent.cc": ""}
        self.assertEqual(self.breaches(stand_in, unbuilt=list(stand_in), cuda=True), [])
        self.expect("unbuilt: src/device/cuda_absent.cc", changes=stand_in, unbuilt=list(stand_in),
                    cuda=False)
        device = {"src/device/cuda/device.cc": ""}
        self.assertEqual(self.breaches(device, unbuilt=list(device), cuda=False), [])
        self.expect("unbuilt: src/device/cuda/device.cc", changes=device, unbuilt=list(device),
                    cuda=True)

    def test_a_build_folder_without_commands(self):
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "src/base").mkdir(parents=True)
            (pathlib.Path(folder) / "src/base/a.cc").write_text("")
            found = tidy.breaches(folder, folder, False)
        self.assertEqual(len(found), 1)
        self.assertIn("CMAKE_EXPORT_COMPILE_COMMANDS", found[0])

    def test_a_tree_without_sources(self):
        with tempfile.TemporaryDirectory() as folder:
            self.assertEqual(len(tidy.breaches(folder, folder, False)), 1)

    def test_a_header_that_nothing_includes(self):
        for file in ("src/kv/lost.h", "kernels/cuda/select/lost.cuh", "tests/lost.h"):
            with self.subTest(file=file):
                self.expect(f"unused: {file}", changes={file: ""})

    def test_a_library_that_does_not_list_what_its_files_include(self):
        self.expect("link: src/kv/CMakeLists.txt does not list sluice_base", "src/kv/pool.h",
                    changes={"src/kv/CMakeLists.txt": "sluice_library(sluice_kv SRCS pool.cc)\n"})
        self.expect("link: src/engine/CMakeLists.txt does not list sluice_kernels",
                    changes={"src/engine/CMakeLists.txt":
                             "sluice_library(sluice_engine SRCS engine.cc DEPS sluice_kv)\n"})

    def test_a_library_named_only_in_a_comment(self):
        self.expect("does not list sluice_base",
                    changes={"src/kv/CMakeLists.txt":
                             "sluice_library(sluice_kv  # not sluice_base\n  SRCS pool.cc)\n"})


    def test_a_semicolon_in_the_name_of_a_test(self):
        self.expect("name: tests/unit/kv/pool_test.cc", "one; two", changes={
            "tests/unit/kv/pool_test.cc": 'TEST_CASE(\n    "one; two") {}\n#include "kernels/cpu/gemm.h"\n'})

    def test_rooms(self):
        tidy_rooms = {
            "src/service/CMakeLists.txt": "",
            "src/service/wire/a.h": "",
            "src/service/pull/b.cc": '#include "src/service/wire/a.h"\n',
            "src/service/pull/CMakeLists.txt":
                "sluice_library(sluice_service_pull DEPS sluice_service_wire)\n"}
        self.assertEqual(self.breaches(changes=tidy_rooms), [])
        self.expect("room: src/service/flat.cc", "divided into rooms",
                    changes={**tidy_rooms, "src/service/flat.cc": ""})
        self.expect("room: src/service/pull/CMakeLists.txt does not list sluice_service_wire",
                    changes={**tidy_rooms,
                             "src/service/pull/CMakeLists.txt": "sluice_library(sluice_service_pull)\n"})
        self.expect("room: the rooms of kernels/cuda/", "mla -> select -> mla",
                    changes={"kernels/cuda/mla/a.cuh": '#include "kernels/cuda/select/b.cuh"\n',
                             "kernels/cuda/select/b.cuh": '#include "kernels/cuda/mla/a.cuh"\n'})

    def test_pages(self):
        pages = {
            "README.md": "# A\n[room](src/kv/README.md#its-two-words-2-of-them), [itself](#a), "
                         "[folder](src/kv), [away](https://example.org/x#y)\n```\n[code](nowhere)\n```\n",
            "src/kv/README.md": "# KV\n## Its `two` words: 2 of them\n[up](../../README.md)\n"
                                "## Twice\n## Twice\n[second](#twice-1)\n",
            "models/x/README.md": "[theirs](nowhere)\n",
            ".venv/README.md": "[theirs](nowhere)\n"}
        self.assertEqual(self.breaches(changes=pages), [])
        self.expect("page: src/kv/README.md links pool.md: no such file",
                    changes={**pages, "src/kv/README.md": pages["src/kv/README.md"] + "[lost](pool.md)\n"})
        self.expect("page: README.md links src/kv/README.md#lost: no such heading",
                    changes={**pages, "README.md": "[lost](src/kv/README.md#lost)\n"})
        self.expect("page: README.md links #b: no such heading",
                    changes={"README.md": "# A\n[lost](#b)\n```\n# b\n```\n"})
        self.assertEqual(self.breaches(changes={"README.md": "line\n" * 250, "src/page.md": "line\n" * 400}), [])
        self.expect("page: README.md has 251 lines", changes={"README.md": "line\n" * 251})
        self.expect("page: src/page.md has 401 lines", changes={"src/page.md": "line\n" * 401})


if __name__ == "__main__":
    unittest.main()

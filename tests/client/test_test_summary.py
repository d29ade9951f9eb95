"""The last line of tools/test counts every case once, and a program that died as a failure."""

import pytest
from sluice_client.test_summary import count_folder

CTEST = """<testsuite tests="5"><testcase name="a" status="run"/>
<testcase name="b" status="fail"><failure message=""/></testcase>
<testcase name="c" status="notrun"><skipped message="SKIP_RETURN_CODE=77"/></testcase>
<testcase name="d" status="disabled"/><testcase name="e" status="run"/></testsuite>"""
JUNIT = ["ctest-release.xml", "pytest-release.xml"]
PYTEST = """<testsuites><testsuite tests="4"><testcase name="a"/><testcase name="b"><error/></testcase>
<testcase name="c"><skipped/></testcase><testcase name="d"/></testsuite></testsuites>"""


@pytest.fixture
def results(tmp_path):
    (tmp_path / JUNIT[0]).write_text(CTEST)
    (tmp_path / JUNIT[1]).write_text(PYTEST)
    (tmp_path / "expected").write_text("".join(f"{name}\n" for name in JUNIT))
    (tmp_path / "format.txt").write_text("passed\n")
    return tmp_path


def test_outcomes_add_up(results):
    assert dict(count_folder(results)) == {"passed": 5, "failed": 2, "skipped": 3}


def test_a_missing_or_broken_result_is_a_failure(results):
    (results / JUNIT[0]).unlink()
    (results / JUNIT[1]).write_text("<testsuites><unfinished")
    (results / "format.txt").write_text("failed\n")
    assert dict(count_folder(results)) == {"failed": 3}


def test_a_failed_build_is_one_failure(results):
    (results / "expected").unlink()
    (results / "build-asan.txt").write_text("failed\n")
    assert dict(count_folder(results)) == {"passed": 1, "failed": 1}


def test_a_failure_is_named_with_the_end_of_what_it_said(results, capsys):
    said = "\n".join(f"line {n}" for n in range(100))
    (results / JUNIT[1]).write_text(
        f'<testsuite><testcase name="broke"><failure>{said}</failure></testcase></testsuite>'
    )
    count_folder(results)
    printed = capsys.readouterr().out
    assert "FAILED ctest-release: b\n" in printed
    assert "FAILED pytest-release: broke\n    line 60\n" in printed
    assert printed.endswith("    line 99\n")

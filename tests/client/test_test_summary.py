"""The last line of tools/test counts every case once, and a program that died as a failure."""

import pytest
from sluice_client.test_summary import count_folder

CTEST = """<testsuite tests="5"><testcase name="a" status="run"/>
<testcase name="b" status="fail"><failure message=""/></testcase>
<testcase name="c" status="notrun"><skipped message="SKIP_RETURN_CODE=77"/></testcase>
<testcase name="d" status="disabled"/><testcase name="e" status="run"/></testsuite>"""
PYTEST = """<testsuites><testsuite tests="4"><testcase name="a"/><testcase name="b"><error/></testcase>
<testcase name="c"><skipped/></testcase><testcase name="d"/></testsuite></testsuites>"""


@pytest.fixture
def results(tmp_path):
    (tmp_path / "ctest.xml").write_text(CTEST)
    (tmp_path / "pytest.xml").write_text(PYTEST)
    (tmp_path / "format.txt").write_text("passed\n")
    return tmp_path


def test_outcomes_add_up(results):
    assert dict(count_folder(results)) == {"passed": 5, "failed": 2, "skipped": 3}


def test_a_missing_or_broken_result_is_a_failure(results):
    (results / "ctest.xml").unlink()
    (results / "pytest.xml").write_text("<testsuites><unfinished")
    (results / "format.txt").write_text("failed\n")
    assert dict(count_folder(results)) == {"failed": 3}


def test_a_failed_build_is_one_failure(results):
    for name in ("ctest.xml", "pytest.xml"):
        (results / name).unlink()
    (results / "build.txt").write_text("failed\n")
    assert dict(count_folder(results)) == {"passed": 1, "failed": 1}

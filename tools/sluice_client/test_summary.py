"""The last line of tools/test: adds up the results of ctest, pytest and the one-line checks.

A results folder holds JUnit files (*.xml) and checks (*.txt: "passed" or "failed"). A file that is
there but cannot be read, or a JUnit file without which its program must have died, is a failure.
"""

import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

# Written whenever the programs ran, whatever the tests gave.
_EXPECTED = ("ctest.xml", "pytest.xml")


def count_junit(path: Path) -> Counter:
    """Test cases of one JUnit file by outcome; each case has one."""
    counts = Counter()
    try:
        cases = list(ElementTree.parse(path).iter("testcase"))
    except (OSError, ElementTree.ParseError) as error:
        print(f"{path}: {error}", file=sys.stderr)
        return Counter(failed=1)
    for case in cases:
        children = {child.tag for child in case}
        if children & {"failure", "error"} or case.get("status") == "fail":
            counts["failed"] += 1
        elif "skipped" in children or case.get("status") in ("notrun", "disabled"):
            counts["skipped"] += 1
        else:
            counts["passed"] += 1
    return counts


def count_folder(folder: Path) -> Counter:
    counts = Counter()
    for check in sorted(folder.glob("*.txt")):
        counts["passed" if check.read_text().strip() == "passed" else "failed"] += 1
    build_failed = (folder / "build.txt").exists()
    for name in _EXPECTED:
        if not build_failed:
            counts += count_junit(folder / name)
    return counts


def main() -> int:
    counts = count_folder(Path(sys.argv[1]))
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    return 1 if counts["failed"] or not counts["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())

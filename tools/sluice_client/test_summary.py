"""The last line of tools/test: adds up the results of ctest, pytest and the one-line checks.

    python -m sluice_client.test_summary FOLDER [JUNIT_FILE ...]

FOLDER holds the JUnit files named (those of the programs that ran) and checks (*.txt: "passed" or
"failed"). A JUnit file that is missing or cannot be read, since its program died, is a failure.
"""

import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

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


def count_folder(folder: Path, junit_files: Sequence[str]) -> Counter:
    counts = Counter()
    for check in sorted(folder.glob("*.txt")):
        counts["passed" if check.read_text().strip() == "passed" else "failed"] += 1
    for name in junit_files:
        counts += count_junit(folder / name)
    return counts


def main() -> int:
    counts = count_folder(Path(sys.argv[1]), sys.argv[2:])
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    return 1 if counts["failed"] or not counts["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())

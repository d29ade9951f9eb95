"""The end of tools/test: prints every failure by name with the end of its output, then the sums.

    python -m sluice_client.test_summary FOLDER...

A folder holds the JUnit files of the programs that ran, which its file `expected` names, one a line, and
checks (*.txt: "passed" or "failed"). A JUnit file that is missing or cannot be read counts as one failure,
because its program died.
"""

import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

FAILURE_LINES = 40  # last lines of a failed test's output that are shown


def report_failure(name: str, said: str = "") -> None:
    print(f"FAILED {name}")
    for line in said.strip().splitlines()[-FAILURE_LINES:]:
        print(f"    {line}")


def count_junit(path: Path) -> Counter:
    """Counts the test cases of one JUnit file by outcome and prints the failures. Each case has one outcome."""
    counts = Counter()
    try:
        cases = list(ElementTree.parse(path).iter("testcase"))
    except (OSError, ElementTree.ParseError) as error:
        report_failure(path.stem, str(error))
        return Counter(failed=1)
    for case in cases:
        children = {child.tag: child for child in case}
        if children.keys() & {"failure", "error"} or case.get("status") == "fail":
            counts["failed"] += 1
            # pytest puts a test's output into the failure, ctest into system-out.
            tags = children.keys() & {"system-out", "failure", "error"}
            said = [children[tag].text for tag in sorted(tags, reverse=True)]
            report_failure(f"{path.stem}: {case.get('name')}", "\n".join(filter(None, said)))
        elif "skipped" in children or case.get("status") in ("notrun", "disabled"):
            counts["skipped"] += 1
        else:
            counts["passed"] += 1
    return counts


def count_folder(folder: Path) -> Counter:
    counts = Counter()
    for check in sorted(folder.glob("*.txt")):
        outcome = check.read_text().strip()
        if outcome != "passed":
            report_failure(check.stem)
        counts["passed" if outcome == "passed" else "failed"] += 1
    expected = folder / "expected"
    for name in expected.read_text().split() if expected.is_file() else []:
        counts += count_junit(folder / name)
    return counts


def main() -> int:
    counts = sum((count_folder(Path(folder)) for folder in sys.argv[1:]), Counter())
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    return 1 if counts["failed"] or not counts["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())

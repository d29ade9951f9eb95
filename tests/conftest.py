"""Options that all Python tests share: --name-regex runs the tests whose name matches, as `tools/test NAME_REGEX`
does.
"""

import os
import re
import sys

# Packages that a staged folder (tools/gpu-stage) carries come behind the machine's own.
if os.environ.get("SLUICE_TEST_SITE"):
    sys.path.append(os.environ["SLUICE_TEST_SITE"])


def pytest_addoption(parser):
    parser.addoption("--name-regex", help="run the tests whose id matches this regular expression")


def pytest_collection_modifyitems(config, items):
    pattern = config.getoption("--name-regex")
    if pattern:
        expression = re.compile(pattern)
        items[:] = [item for item in items if expression.search(item.nodeid)]

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


# Files that take longest, the longest first. They start first, so that no worker is left alone with one at the end.
LONGEST = ["test_rank_caches.py", "test_rank_losses.py", "test_bench.py", "test_parity.py", "test_latent.py", "test_ranks.py",
           "test_failpoints.py", "test_rank_links.py", "test_latent_profile.py", "test_long_runs.py", "test_rank_metrics.py",
           "test_latent_faults.py", "test_hostile_clients.py", "test_latent_life.py", "test_profile.py", "test_router.py", "test_streams.py",
           "test_security.py", "test_policies.py", "test_bad_input.py", "test_process.py", "test_batch.py"]


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))
    pattern = config.getoption("--name-regex")
    if pattern:
        expression = re.compile(pattern)
        items[:] = [item for item in items if expression.search(item.nodeid)]

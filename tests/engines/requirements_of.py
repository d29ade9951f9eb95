"""Prints what an installed package requires without any extra, but for the packages that follow it on the command line."""

import re
import sys
from importlib.metadata import requires

name, *without = sys.argv[1:]
for requirement in requires(name) or ():
    if "extra ==" not in requirement and re.match(r"[\w.-]+", requirement)[0] not in without:
        print(requirement)

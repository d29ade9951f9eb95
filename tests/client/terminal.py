"""Starts a command that heeds Ctrl-C, with pipes or with a terminal of its own."""

import os
import select
import sys
import time

# This program replaces itself with the command behind it. It sets SIGINT first, because what a shell starts in the
# background inherits a SIGINT that is ignored. With "tty" its standard input becomes its terminal. It cannot be a
# preexec_fn: that would run in a copy of this process, among locks that the threads of gRPC never give back there.
_PROGRAM = """
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGINT, signal.SIG_DFL)
if sys.argv[1] == "tty":
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[2], sys.argv[2:])
"""


def heeding_ctrl_c(kind, *command):
    """Returns the command line that runs `command`; `kind` is "tty" or "pipes"."""
    return [sys.executable, "-c", _PROGRAM, kind, *map(str, command)]


def read_until(terminal, words, seconds=20):
    """Returns what the terminal shows up to `words`."""
    shown, deadline = "", time.monotonic() + seconds
    while words not in shown:
        ready, _, _ = select.select([terminal], [], [], max(0, deadline - time.monotonic()))
        assert ready, shown
        try:
            shown += os.read(terminal, 4096).decode()
        except OSError as error:  # The program has ended.
            raise AssertionError(f"the program ended without showing {words!r}; it showed: {shown}") from error
    return shown

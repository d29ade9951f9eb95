"""Runs sluice-profile."""

from support.nodes import BIN, run

PROFILE = BIN / "sluice-profile"


def profile(model, out, *flags: str, status: int = 0) -> str:
    """Runs sluice-profile and returns its standard output, or its error."""
    done = run(PROFILE, "--model", model, "--out", out, *flags, timeout=300)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stderr if status else done.stdout

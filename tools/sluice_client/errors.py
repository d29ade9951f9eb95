"""The one exception that ends a command with a sentence for people."""


class ToolError(Exception):
    """Something the user can act on. The message says what failed, where, and what to do."""

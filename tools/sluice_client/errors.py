"""The one exception that ends a command with a sentence for people."""


class ToolError(Exception):
    """An error that the user can act on. Its message says what failed, where, and what to do."""

"""The one error of the public API."""


class OscarError(ValueError):
    """Input that cannot work. The message is one sentence for the user: who, what was expected, what came, what to do."""

"""The project's exceptions.

Every error that a user can cause is a `CannError` raised where the bad value enters, with a one-line message that names
the key or the file and what is allowed. The command lines print it without a traceback and exit with code 2.
"""


class CannError(Exception):
    """Base of all errors that are the user's to fix; the message is one line."""


class RecipeError(CannError):
    """A recipe, a flag or a model config holds a key or a value that is not allowed."""


class CheckpointError(CannError):
    """A checkpoint folder is incomplete, truncated, or does not fit the model."""


class UnsupportedModelError(CannError):
    """The model has a piece that the exporter does not know; the message lists every such piece."""


class ArtifactError(CannError):
    """An artifact is damaged, of a foreign schema, or does not fit this host or world."""


class RequestError(CannError):
    """A generation request asks for something impossible (too long, bad sampling value)."""

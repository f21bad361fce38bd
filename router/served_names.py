"""The names a model is served under."""

from twopool.protocol.errors import ModelNotFoundError

_MAX_SHOWN_CHARS = 128


def served_name(asked: str | None, served_names: tuple[str, ...]) -> str:
    """The model's name as the client said it; without one, the first served name. Raises ``ModelNotFoundError``."""
    if asked is None:
        return served_names[0]
    if asked not in served_names:
        shown = asked if len(asked) <= _MAX_SHOWN_CHARS else asked[:_MAX_SHOWN_CHARS] + "..."
        raise ModelNotFoundError(f"the model {shown!r} does not exist", param="model")
    return asked

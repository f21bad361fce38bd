"""How many tokens a model's tokenizer knows; the model may have rows for more, which no text ever trained."""

from pathlib import Path

import msgspec

from twopool.protocol.errors import ModelError


class _Added(msgspec.Struct):
    id: int


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]
    """by piece, or (Unigram) in order of id"""


class _Tokenizer(msgspec.Struct):
    model: _Model
    added_tokens: list[_Added] = []


def num_tokens_known(folder: Path) -> int:
    """One more than the largest id of ``folder``'s tokenizer.json.

    Raises ``ModelError`` when that file cannot be read or holds no vocabulary.
    """
    path = folder / "tokenizer.json"
    try:
        tokenizer = msgspec.json.decode(path.read_bytes(), type=_Tokenizer)
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    vocab = tokenizer.model.vocab
    last_of_model = max(vocab.values(), default=-1) if isinstance(vocab, dict) else len(vocab) - 1
    known = 1 + max([last_of_model, *(added.id for added in tokenizer.added_tokens)])
    if known < 1:
        raise ModelError(f"{path} holds no vocabulary")
    return known

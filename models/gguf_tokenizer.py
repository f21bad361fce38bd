"""Building a Hugging Face tokenizer from a GGUF file's vocabulary.

GGUF keeps the tokens, their kinds and the merges, but names the rest of the pipeline only by a word
(``tokenizer.ggml.pre``). The pipelines here are those of the models' own published ``tokenizer.json``; a word that is
not known is refused, because a wrong split gives wrong ids that still decode to the right text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from twopool.models.gguf_reader import Metadata
from twopool.protocol.errors import ModelError

_PREFIX = "tokenizer.ggml"
_SPACE = "\u2581"  # how sentencepiece writes a space

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class TokenKind(IntEnum):
    """GGUF's ``token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class BytePairStyle:
    """How a byte-level BPE model cuts text before merging. ``split`` None means GPT-2's own pattern."""

    split: str | None = None
    single_digits: bool = False
    ignore_merges: bool = False  # a whole piece that is a token is taken as it is
    nfc: bool = False
    add_bos: bool = False  # where the file does not say


_LLAMA3 = BytePairStyle(_LLAMA3_SPLIT, ignore_merges=True, add_bos=True)
_QWEN2 = BytePairStyle(_QWEN2_SPLIT, nfc=True)
_STYLES = {
    "gpt-2": BytePairStyle(),
    "smollm": BytePairStyle(single_digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": BytePairStyle(_TEKKEN_SPLIT, ignore_merges=True, add_bos=True),
}


def build_tokenizer(metadata: Metadata) -> Tokenizer:
    """The tokenizer of the file, BOS-adding post-processor included. Raises ModelError for an unknown kind."""
    tokens = metadata.texts(f"{_PREFIX}.tokens")
    kinds = _kinds(metadata, len(tokens))
    if len(set(tokens)) != len(tokens):
        raise ModelError(f"{metadata.file_name} lists a token twice.")
    for name, token_id in _special_ids(metadata).items():
        if not 0 <= token_id < len(tokens):
            raise ModelError(f"{metadata.file_name}: {name} is {token_id}, beyond its {len(tokens)} tokens.")
    # UNUSED entries pad the embedding to a round size; text must never turn into one, nor one into text.
    pairs = zip(tokens, kinds, strict=True)
    vocab = {token: i for i, (token, kind) in enumerate(pairs) if kind != TokenKind.UNUSED}
    family = metadata.text(f"{_PREFIX}.model")
    if family == "gpt2":
        tokenizer = _byte_level(metadata, vocab)
    elif family == "llama":
        tokenizer = _sentencepiece(metadata, tokens, vocab)
    else:
        raise ModelError(f"{metadata.file_name} has the tokenizer {family!r}; supported are gpt2 and llama.")
    _add_marked_tokens(tokenizer, tokens, kinds)
    _add_bos_eos(tokenizer, metadata, tokens)
    return tokenizer


def tokenizer_config(metadata: Metadata, model_max_length: int) -> dict[str, Any]:
    """The ``tokenizer_config.json``: special tokens, chat template, and whether encoding adds BOS and EOS."""
    tokens = metadata.texts(f"{_PREFIX}.tokens")
    special = {
        name: tokens[token_id] for name, token_id in _special_ids(metadata).items() if 0 <= token_id < len(tokens)
    }
    config: dict[str, Any] = {
        **special,
        # The generic class: a model's own class would replace the pre-tokenizer of tokenizer.json by its default.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": adds_bos(metadata),
        "add_eos_token": metadata.boolean(f"{_PREFIX}.add_eos_token", False),
        "clean_up_tokenization_spaces": False,
        "model_max_length": model_max_length,
    }
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = default = metadata.text("tokenizer.chat_template")
        if "tokenizer.chat_template.tool_use" in metadata:
            tool_use = metadata.text("tokenizer.chat_template.tool_use")
            config["chat_template"] = [
                {"name": "default", "template": default},
                {"name": "tool_use", "template": tool_use},
            ]
    return config


def adds_bos(metadata: Metadata) -> bool:
    """Whether encoding plain text puts BOS first: as the file says, else as its kind of tokenizer does."""
    default = metadata.text(f"{_PREFIX}.model") == "llama" or _style(metadata).add_bos
    return metadata.boolean(f"{_PREFIX}.add_bos_token", default)


def _kinds(metadata: Metadata, num_tokens: int) -> list[int]:
    key = f"{_PREFIX}.token_type"
    if key not in metadata:
        return [TokenKind.NORMAL] * num_tokens
    kinds = [int(kind) for kind in metadata.numbers(key)]
    if len(kinds) != num_tokens:
        raise ModelError(f"{metadata.file_name} lists {num_tokens} tokens but {len(kinds)} token types.")
    return kinds


def _special_ids(metadata: Metadata) -> dict[str, int]:
    keys = {
        "bos_token": "bos_token_id",
        "eos_token": "eos_token_id",
        "unk_token": "unknown_token_id",
        "pad_token": "padding_token_id",
    }
    found = {name: metadata.optional_integer(f"{_PREFIX}.{key}") for name, key in keys.items()}
    return {name: token_id for name, token_id in found.items() if token_id is not None}


def _style(metadata: Metadata) -> BytePairStyle:
    name = metadata.text(f"{_PREFIX}.pre", "default")
    style = _STYLES.get(name)
    if style is None:
        known = ", ".join(sorted(_STYLES))
        raise ModelError(f"{metadata.file_name} has the pre-tokenizer {name!r}; supported are {known}.")
    return style


def _byte_level(metadata: Metadata, vocab: dict[str, int]) -> Tokenizer:
    style = _style(metadata)
    merges = []
    for merge in metadata.texts(f"{_PREFIX}.merges"):
        left, space, right = merge.partition(" ")
        if not space or left not in vocab or right not in vocab or left + right not in vocab:
            raise ModelError(f"{metadata.file_name} has a merge, {merge!r}, of tokens it does not list.")
        merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=style.ignore_merges))
    if style.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if style.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if style.split is not None:
        steps.append(pre_tokenizers.Split(Regex(style.split), behavior="isolated"))
    add_space = metadata.boolean(f"{_PREFIX}.add_space_prefix", False)
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=add_space, use_regex=style.split is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Metadata, tokens: Sequence[str], vocab: dict[str, int]) -> Tokenizer:
    """Llama 2's pipeline: spaces become ``▁``, one is put first, unknown characters fall back to byte tokens."""
    scores = metadata.numbers(f"{_PREFIX}.scores")
    if len(scores) != len(tokens):
        raise ModelError(f"{metadata.file_name} lists {len(tokens)} tokens but {len(scores)} scores.")
    unknown_id = metadata.integer(f"{_PREFIX}.unknown_token_id", 0)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges_from_scores(vocab, scores),
            unk_token=tokens[unknown_id],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
    cleanup: list[decoders.Decoder] = [
        decoders.Replace(_SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if metadata.boolean(f"{_PREFIX}.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend(_SPACE))
        cleanup.append(decoders.Strip(content=" ", left=1, right=0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(cleanup)
    return tokenizer


def _merges_from_scores(vocab: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Sentencepiece joins the pair whose result scores highest; as BPE: all pairs, best result first."""
    ranked = []
    for token, token_id in vocab.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                ranked.append((-scores[token_id], token_id, vocab[left], vocab[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _add_marked_tokens(tokenizer: Tokenizer, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    """Tokens that text is matched against whole: control ones are special, user-defined ones are plain text."""
    special_kinds = (TokenKind.CONTROL, TokenKind.UNKNOWN)
    pairs = list(zip(tokens, kinds, strict=True))
    special = [AddedToken(t, special=True, normalized=False) for t, k in pairs if k in special_kinds]
    plain = [AddedToken(t, special=False, normalized=False) for t, k in pairs if k == TokenKind.USER_DEFINED]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _add_bos_eos(tokenizer: Tokenizer, metadata: Metadata, tokens: Sequence[str]) -> None:
    ids = _special_ids(metadata)
    wanted = {
        "bos_token": adds_bos(metadata),
        "eos_token": metadata.boolean(f"{_PREFIX}.add_eos_token", False),
    }
    added = {name: (tokens[ids[name]], ids[name]) for name, add in wanted.items() if add and name in ids}
    if not added:
        return
    head = [added["bos_token"][0]] if "bos_token" in added else []
    tail = [added["eos_token"][0]] if "eos_token" in added else []
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*head, "$A", *tail],
        pair=[*head, "$A", *tail, *(f"{t}:1" for t in head), "$B:1", *(f"{t}:1" for t in tail)],
        special_tokens=list(dict.fromkeys(added.values())),
    )

"""Small real tokenizers, built with the ``tokenizers`` library, and model folders around them."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "Hello world, hello there! DEF abc",
    "été 日本語 🙂 👩‍👩‍👧",
] * 4


def byte_level_tokenizer(*, added: tuple[str, ...] = ("<think>",)) -> Tokenizer:
    """Byte-level BPE: ids 0-2 are special, the 256 bytes and a few merges follow, then ``added``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|end|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(list(added))
    return tokenizer


def byte_fallback_tokenizer(*, strip: bool = True) -> Tokenizer:
    """Sentencepiece's way: metaspace, byte fallback, ``<s>`` and ``</s>``; with Llama's decoder if ``strip``."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += ["▁", "▁▁", "a", "b", "h", "e", "l", "o", "\n", "é", "�", ".", "▁h", "▁he", "ll", "▁hell", "▁hello"]
    names += ["▁a", "▁b", "▁world"]
    vocab = {name: index for index, name in enumerate(names)}
    merges = [("▁", "h"), ("▁h", "e"), ("l", "l"), ("▁he", "ll"), ("▁hell", "o"), ("▁", "a"), ("▁", "b"), ("▁", "▁")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")])
    return tokenizer


def metaspace_tokenizer() -> Tokenizer:
    """Unigram-like vocabulary with the Metaspace decoder (T5's way)."""
    names = [("<unk>", 0.0), ("▁", -2.0), ("▁hello", -1.0), ("a", -3.0), ("b", -3.0), ("▁a", -2.5), (".", -3.0)]
    tokenizer = Tokenizer(models.Unigram(names, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def wordpiece_tokenizer() -> Tokenizer:
    """BERT's way: ``##`` continues a word, a space goes before everything else."""
    names = ["[UNK]", "hello", "##a", "##b", "world", ".", "do", "##n", "'", "t", "!"]
    tokenizer = Tokenizer(models.WordPiece({name: index for index, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def write_model_folder(
    folder: Path,
    tokenizer: Tokenizer,
    *,
    vocab_padding: int = 8,
    config: dict[str, Any] | None = None,
    generation_config: dict[str, Any] | None = None,
    tokenizer_config: dict[str, Any] | None = None,
) -> Path:
    """What the router reads of a model: no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    sizes = {"vocab_size": tokenizer.get_vocab_size() + vocab_padding, "max_position_embeddings": 512}
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": CHATML}
    (folder / "config.json").write_text(
        json.dumps({"model_type": "llama", "eos_token_id": 2, **sizes, **(config or {})})
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special, **(tokenizer_config or {})})
    )
    if generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation_config))
    return folder

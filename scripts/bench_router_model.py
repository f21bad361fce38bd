"""What the router benchmark serves: a model folder without weights, and the text every mock worker answers with."""

import json
from pathlib import Path
from pydoc_data import topics

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 8192
MAX_MODEL_LEN = 1 << 20
_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_ANSWER_TOPICS = ("operator-summary", "while", "with", "class", "import", "exceptions")


def build_model(folder: Path) -> Path:
    """Write a byte-level BPE tokenizer trained on the standard library's own documentation, and what goes with it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(topics.topics.values(), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(folder / "config.json", {"vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_MODEL_LEN})
    _write(folder / "tokenizer_config.json", {"eos_token": "<|im_end|>", "chat_template": _CHATML})
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")  # a file of no tensors
    ids = tokenizer.encode("\n".join(topics.topics[name] for name in _ANSWER_TOPICS), add_special_tokens=False).ids
    _write(answer_file(folder), {"ids": ids, "texts": [tokenizer.decode([token_id]) for token_id in ids]})
    return folder


def answer_file(folder: Path) -> Path:
    """JSON: ``ids``, the tokens of the answer, and ``texts``, what each one says. Longer answers start over."""
    return folder / "answer.json"


def read_answer(folder: Path) -> tuple[list[int], list[str]]:
    """Ids and texts of ``answer_file``."""
    answer = json.loads(answer_file(folder).read_text(encoding="utf-8"))
    return answer["ids"], answer["texts"]


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")

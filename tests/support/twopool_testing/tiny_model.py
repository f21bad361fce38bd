"""Tiny random models with a real tokenizer, and what transformers makes of a prompt."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs!",
    "prefill and decode run in separate pools; the router pairs each request with two workers",
    "0 1 2 3 4 5 6 7 8 9 10 100 1000 def main(): return [x * 2 for x in range(10)]",
    "é ü ß 漢字 日本語 Привет 🙂 👍🏽 👩\u200d👩\u200d👧",
]
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tokenizer(folder: Path) -> int:
    """Write tokenizer files of a byte-level BPE into ``folder``; returns the vocabulary size."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": 2048,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return int(tokenizer.get_vocab_size())


def build_tiny_llama(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """A random Llama of about 0.2 M weights in fp32, whose greedy text does not loop at once."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = build_tokenizer(folder)
    fields: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**(fields | overrides))).float().save_pretrained(folder)
    generation = {"eos_token_id": [2], "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


class Reference:
    """transformers' own fp32 model of a folder."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model.eval()

    def greedy(self, prompt_ids: list[int], num_tokens: int) -> list[int]:
        """The ``num_tokens`` greedy ids after ``prompt_ids``, EOS ignored."""
        return self.scored(prompt_ids, num_tokens)[0]

    def scored(self, prompt_ids: list[int], num_tokens: int, **options: Any) -> tuple[list[int], torch.Tensor]:
        """``num_tokens`` ids after ``prompt_ids``, EOS ignored; greedy unless ``options`` of ``generate`` differ.

        Also what each was chosen by, [num_tokens, vocab_size]: log-probabilities after all that ``options`` do to the
        logits.
        """
        ids = torch.tensor([prompt_ids])
        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                min_new_tokens=None,
                eos_token_id=[],
                pad_token_id=0,
                return_dict_in_generate=True,
                output_scores=True,
                **{"do_sample": False, **options},
            )
        result: list[int] = output.sequences[0, len(prompt_ids) :].tolist()
        return result, torch.cat(output.scores).log_softmax(dim=-1)

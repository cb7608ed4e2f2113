"""A model that engines load without a download: made-up words, no weights, one layer."""

import json
from pathlib import Path
from typing import Any

VOCABULARY = 4096  # token ids; below 3 are special


def write_model(folder: Path) -> None:
    """A model without weights: a tokenizer of whole words, and the sizes of a tiny Llama."""
    folder.mkdir()
    special = ["<unk>", "<s>", "</s>"]
    vocabulary = {
        word: n for n, word in enumerate([*special, *(f"t{n}" for n in range(3, VOCABULARY))])
    }
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": n, "content": word, "special": True, **added} for n, word in enumerate(special)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }
    files: dict[str, dict[str, Any]] = {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
        },
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "num_key_value_heads": 2,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 8192,
        },
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": 2},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))

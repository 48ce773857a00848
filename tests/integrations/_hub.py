"""Tokenizer, small model, sentences and metric, in place of those that examples of Hugging Face take from its hub.

Importing this module puts them in place of what the examples ask the hub for.
"""

from __future__ import annotations

import random
from typing import Any

import datasets
import evaluate
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = [f"w{number}" for number in range(60)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
SAMPLES = {"train": 160, "validation": 48, "test": 48}


def tokenizer(*_: Any, **__: Any) -> Any:
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )


def classifier(*_: Any, **__: Any) -> Any:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(vocab_size=64, max_position_embeddings=64, num_labels=2, **sizes)
    )


def sentences(*_: Any, **__: Any) -> Any:
    def of_split(seed: int, count: int) -> Any:
        draw = random.Random(seed)
        rows: dict[str, list[Any]] = {"sentence1": [], "sentence2": [], "label": [], "idx": list(range(count))}
        for _ in range(count):
            label = draw.randrange(2)
            rows["sentence1"].append(" ".join(draw.choices(WORDS[30 * label : 30 * label + 30], k=6)))
            rows["sentence2"].append(" ".join(draw.choices(WORDS, k=6)))
            rows["label"].append(label)
        return datasets.Dataset.from_dict(rows)

    return datasets.DatasetDict({split: of_split(seed, count) for seed, (split, count) in enumerate(SAMPLES.items())})


class Accuracy:
    """A metric with the methods that the examples call."""

    def __init__(self, *_: Any) -> None:
        self._right: list[bool] = []

    def add_batch(self, *, predictions: Any, references: Any) -> None:
        self._right += (predictions == references).tolist()

    def compute(self, **_: Any) -> dict[str, float]:
        return {"accuracy": sum(self._right) / max(1, len(self._right))}


transformers.AutoTokenizer.from_pretrained = tokenizer
transformers.AutoModelForSequenceClassification.from_pretrained = classifier
datasets.load_dataset = sentences
evaluate.load = Accuracy

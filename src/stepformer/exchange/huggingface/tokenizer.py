"""A stepformer tokenizer as a `tokenizer.json` of Hugging Face, with the same ids."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from stepformer.base import files
from stepformer.base.errors import StepformerError
from stepformer.data.merges import merges_of
from stepformer.data.tokenizers import END_OF_TEXT, Tokenizer, byte_of_letter


def as_transformers_tokenizer(tokenizer: Tokenizer, context: int | None = None) -> PreTrainedTokenizerFast:
    """The same tokenizer for `transformers`; end of text begins, ends and pads, on the left as generation needs it.

    Unlike ours it reads "<|endoftext|>" in a text as that token, unless called with `split_special_tokens=True`.
    """
    return PreTrainedTokenizerFast(
        tokenizer_object=as_tokenizers(tokenizer),
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        model_max_length=context,
    )


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context: int | None = None) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    as_transformers_tokenizer(tokenizer, context).save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    # the name of the class that transformers 4 and 5 both know
    files.write_json(path, {**json.loads(path.read_text()), "tokenizer_class": "PreTrainedTokenizerFast"}, sealed=False)


def as_tokenizers(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """The tokenizer in the form of the package `tokenizers`: a byte-level BPE; bytes are one without merges."""
    pieces = [tokenizer.piece(i) for i in range(tokenizer.eot)]
    letters = {byte: letter for letter, byte in byte_of_letter().items()}

    def spelled(piece: bytes) -> str:
        return "".join(letters[byte] for byte in piece)

    merges = [(spelled(left), spelled(right)) for left, right in merges_of(pieces)]
    model = models.BPE(vocab={spelled(piece): i for i, piece in enumerate(pieces)}, merges=merges)
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([tokenizers.AddedToken(END_OF_TEXT, special=True, normalized=False)])
    if made.token_to_id(END_OF_TEXT) != tokenizer.eot:
        raise StepformerError(
            f"The tokenizer {tokenizer.name} ends a text with id {tokenizer.eot}, which is not the one after all "
            "others: it cannot be written as a Hugging Face tokenizer."
        )
    return made

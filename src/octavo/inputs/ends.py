"""Texts that end a turn or a document, whatever a model's id keys say, as data.

Promises: one list for every kind of file.
Does not know: vocabularies (see `tokenizer.ends_of_generation`), or how a generation is ended.

Files in the wild often name one end of theirs and leave out the one that their template writes. None of these texts is
a word: where it is one entry of a vocabulary, it is there to end something. In a base model it stands between
documents, and ends a generation there as well.
"""

from typing import Final

END_TEXTS: Final = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>", "<|end_of_text|>",
    "<|endofturn|>", "<|end_of_turn|>", "<|END_OF_TURN_TOKEN|>", "<end_of_utterance>", "<EOT>", "_<EOT>", "\u2581<EOT>",
    "[EOT]", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<turn|>", "[e~[",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)  # fmt: skip

# Where a vocabulary has all texts of one of these groups, the text beside it ends a message within a turn only.
WITHIN_A_TURN: Final = ((("<|return|>", "<|call|>"), "<|end|>"), (("<|flush|>", "<|calls|>"), "<|end|>"))

"""A small byte-level BPE tokenizer in a model's directory, with or without a chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

#: Ids are below this.
VOCABULARY = 400
#: ChatML, as many models have it: every turn is only ever added to.
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
#: The same, with the assistant's part marked.
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}{% else %}"
    "{{ message.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
#: Says first how many turns there are: what it has rendered changes with every one.
UNSTABLE = "{{ messages|length }} turns\n" + CHATML


def save_tokenizer(directory: Path, *, eos: bool = True, template: str | None = None) -> Path:
    """A small byte-level BPE with a vocabulary of at most 400."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<eos>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(["the quick brown fox jumps over the lazy dog\n    return self.value\n"] * 9, trainer)
    wrapped: Any = PreTrainedTokenizerFast
    made = wrapped(tokenizer_object=bpe, eos_token="<eos>" if eos else None)
    made.chat_template = template
    made.save_pretrained(directory)
    return directory

"""Byte-level tokenizers without merges, and small chat templates written like those of the families that people train on."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Qwen3: reasoning is cut from all turns before the last question, and an empty think block is put where the last turn has none.
THINKING = (
    "{%- for m in messages -%}{%- if m.role == 'assistant' -%}{%- set words = m.content.split('</think>')[-1].lstrip('\n') -%}"
    "<|im_start|>assistant\n{%- if loop.last -%}{{ '\n<think>\n' }}"
    "{%- if m.reasoning_content is string -%}{{ m.reasoning_content.strip('\n') }}"
    "{%- elif '</think>' in m.content -%}{{ m.content.split('</think>')[0].split('<think>')[-1].strip('\n') }}{%- endif -%}"
    "{{ '\n</think>\n\n' + words }}{%- else -%}{{ '\n' + words }}{%- endif -%}"
    "{%- for call in m.tool_calls or [] -%}{{ '\n<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}{%- endfor -%}"
    "{{ '<|im_end|>\n' }}{%- else -%}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
# Qwen3.5 refuses a chat without a question.
NEEDS_QUESTION = (
    "{% if 'user' not in messages | map(attribute='role') | list %}{{ raise_exception('No user query found.') }}{% endif %}" + THINKING
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# GLM-4 ends an assistant's turn with the token that opens the user's.
GLM = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
SPECIAL = [
    *("<|pad|>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|system|>"),
]


def byte_tokenizer(
    template: str | None = CHATML, eos: str | None = "<|im_end|>", adds_bos: bool = False, **options
) -> PreTrainedTokenizerFast:
    """256 byte tokens and a few special ones; ``<think>`` and ``<tool_call>`` are added but not special, as in Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([], trainers.BpeTrainer(special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False))
    tokenizer.add_tokens([AddedToken(t, special=False) for t in ("<think>", "</think>", "<tool_call>", "</tool_call>")])
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, bos_token="<s>", eos_token=eos, **options)

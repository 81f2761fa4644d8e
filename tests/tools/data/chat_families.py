"""Chat templates in the style of five families, with marks, and a tokenizer that has their special tokens."""

import json
import re
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

MARKED = {
    "chatml": """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages and messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {%- if message.content is string %}{{- message.content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n' }}{{- call.function | tojson }}{{- '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
        {%- endgeneration %}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
""",
    "llama": """{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] }}
    {%- if message.name is defined %}{{- ' ' + message.name | string }}{%- endif %}
    {{- '<|end_header_id|>\\n\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{- message['content'] | trim }}{{- '<|eot_id|>' }}{%- endgeneration %}
    {%- else %}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
""",
    "mistral": """{{- bos_token }}
{%- set ns = namespace(system='') %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- set ns.system = message.content + '\\n\\n' %}
    {%- elif message.role in ('user', 'tool') %}
        {{- '[INST] ' + ns.system + message.content + ' [/INST]' }}
        {%- set ns.system = '' %}
    {%- else %}
        {%- generation %}{{- ' ' + message.content | trim + eos_token }}{%- endgeneration %}
    {%- endif %}
{%- endfor %}
""",
    "gemma": """{{ bos_token }}{% for message in messages %}{% set role = message.role %}
{% if role == 'assistant' %}{% set role = 'model' %}{% endif %}
{{ '<start_of_turn>' + role + '\\n' }}{% if role == 'model' %}{% generation %}{{ message.content | trim }}<end_of_turn>
{% endgeneration %}{% else %}{{ message.content | trim + '<end_of_turn>\\n' }}{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}""",
    "zephyr": """{% for message in messages %}
{% if message['role'] == 'assistant' %}
<|assistant|>
{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{{ '\\n' }}
{% else %}
{{ '<|' + message['role'] + '|>\\n' + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}<|assistant|>
{% endif %}{% endfor %}""",
}
UNMARKED = {family: re.sub(r"\{%-? (end)?generation %\}", "", text) for family, text in MARKED.items()}
SPECIAL = [
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>", "<|assistant|>", "<|user|>", "<|system|>", "[INST]", "[/INST]"),
]
TEXT = "Hello, what is the sum of two numbers? The answer is 42. <tool_call> assistant user system tools function"


def write_tokenizer(folder: Path, template: str) -> Path:
    """A tokenizer.json of bytes and some merges, with a chat template beside it."""
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=360, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator([TEXT] * 3, trainer)
    folder.mkdir(exist_ok=True)
    model.save(str(folder / "tokenizer.json"))
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder / "tokenizer.json"

"""A language model small enough to learn on a laptop's CPU, made on the spot: no download.

`python -m art_server.tiny_model DIR` writes a Qwen3 of about 2 M parameters with random, repeatable
weights, a byte-level BPE tokenizer and a chat template that knows tools (the Hermes convention).
It knows nothing: it is there for the demo, the tests and the examples.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TOOL_TAGS = ["<tool_call>", "</tool_call>"]

# What the merges are learned from: the kind of text that the demo and the tests write.
CORPUS = [
    "system user assistant tool You are a helpful agent. Answer with one short line.",
    "You play tic-tac-toe as X against O. Answer with the number of a free square, 1 to 9.",
    "Board: 1 X O 4 X 6 O 8 9 Your move? The board is now | win draw lose invalid move",
    '{"type": "function", "function": {"name": "search", "description": "Search the text",',
    '"parameters": {"type": "object", "properties": {"query": {"type": "string"}, "count":',
    '{"type": "integer"}}, "required": ["query"]}}} {"name": "search", "arguments": {"query": "',
    "# Tools: call one by writing its name and arguments as JSON between the tags.",
    "The quick brown fox jumps over the lazy dog. What is the answer to the question, and why?",
    "0 1 2 3 4 5 6 7 8 9 10 20 50 100 true false null yes no up down left right",
]

CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools: call one by writing its name and arguments as JSON between the tags.\\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
    {{- '<tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments if call.function.arguments is string
                else call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def make_tokenizer(context_length: int = 2048) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=507,
        special_tokens=[END_OF_TEXT, IM_START, IM_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.add_tokens(TOOL_TAGS)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        model_max_length=context_length,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_tiny_model(
    folder: Path,
    *,
    hidden_size: int = 192,
    layers: int = 4,
    context_length: int = 2048,
    seed: int = 0,
) -> Path:
    """Write model and tokenizer to `folder`; the same arguments give the same bytes."""
    tokenizer = make_tokenizer(context_length)
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 8 // 3 // 32 * 32,
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=max(1, hidden_size // 64),
        head_dim=32,
        max_position_embeddings=context_length,
        tie_word_embeddings=True,
        initializer_range=0.12,  # large enough for frozen, tied embeddings to give sharp logits
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).to(torch.float32)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    make_tiny_model(parser.parse_args().folder)


if __name__ == "__main__":
    main()

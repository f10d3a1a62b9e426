"""What tests of decoding share: prompts, and answers that owe nothing to the engine: a text, a cut, a fresh cache."""

import torch

from speculative import Sampling, Tree

FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma", "phi", "gpt_neox", "gpt2"]
PROMPTS = [[5, 9, 3, 7], [1, 2, 3, 4, 5, 6, 7, 8], [30], [11, 12, 13, 14, 15, 16], [40, 41, 42], [20, 9]]
EIGHT = [*PROMPTS, [8, 8, 1, 8, 8], [25, 3, 19, 44, 2]]
LONG = [prompt * 2 for prompt in PROMPTS]
BUDGETS = [20, 3, 11, 1, 16, 7]
WARM = Sampling(temperature=0.8, top_k=30, top_p=0.95)
TREES = {"wide": (3, 2, 1), "binary": (2, 2, 2), "flat": (4,), "uneven": Tree((0, 0, 0, 1, 1, 3, 4))}


def transformers_greedy(model, prompt, new_tokens):
    """What ``generate`` of transformers writes."""
    ids = torch.tensor([prompt])
    done = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)
    return done[0, len(prompt) :].tolist()


def cut(tokens, eos):
    """The tokens up to the first EOS id, that one included."""
    places = [place for place, token in enumerate(tokens) if token in eos]
    return tokens[: places[0] + 1] if places else tokens


def keys_and_values(model, tokens):
    """Of every layer, from one forward over the tokens."""
    cache = model(torch.tensor([tokens]), use_cache=True).past_key_values
    return [(layer.keys, layer.values) for layer in cache.layers]


def compare(cached, row, tokens):
    """Assert that a row of a slot cache holds what a fresh prefill of the tokens holds."""
    for layer, fresh in zip(cached.cache.layers, keys_and_values(cached.model, tokens), strict=True):
        for store, want in zip((layer.keys, layer.values), fresh, strict=True):
            torch.testing.assert_close(store[row, :, : len(tokens)], want[0], rtol=0, atol=1e-10)

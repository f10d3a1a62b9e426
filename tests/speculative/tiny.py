"""Random two-layer models small enough to enumerate, with logits spread out so that choices are not ties."""

import copy

import torch
from transformers import AutoConfig, AutoModelForCausalLM

ROTARY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
}
SHAPES = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "gemma": ROTARY | {"head_dim": 8},
    "mistral": ROTARY | {"sliding_window": None},
}
DOUBLE = torch.float64
KEPT = [*range(15), *range(15, 48, 3)]  # ids of a trimmed vocabulary
SPECIAL = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))


def tiny(kind="llama", vocabulary=48, seed=0, dtype=torch.float32, implementation=None, **changes):
    """A model in eval mode; the global generator is left as it was."""
    shape = SHAPES.get(kind, ROTARY) | SPECIAL | {"vocab_size": vocabulary, "initializer_range": 0.3} | changes
    config = AutoConfig.for_model(kind, **shape)
    chosen = {} if implementation is None else {"attn_implementation": implementation}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, **chosen).eval().to(dtype)


def perturbed(model, scale=0.04, seed=9):
    """A copy with noise on every weight: it agrees with the model often, not always."""
    generator = torch.Generator().manual_seed(seed)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for weight in twin.parameters():
            weight += scale * torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(weight.dtype)
    return twin


def trimmed(kept, **shape):
    """A draft whose output ids 0, 1, … stand for the target ids ``kept``; it reads target ids."""
    model = tiny(**shape)
    head = torch.nn.Linear(model.config.hidden_size, len(kept), bias=False, dtype=model.dtype)
    with torch.no_grad():
        head.weight.copy_(model.lm_head.weight[kept])
    model.lm_head = head
    return model

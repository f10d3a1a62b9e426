"""A generation configuration is read as transformers reads it, or refused with the field that cannot be served."""

import pytest
import torch
from transformers import GenerationConfig, NoBadWordsLogitsProcessor

from speculative import Controls, Draft, Sampling, generate
from speculative.settings import read
from tests.speculative.tiny import perturbed, tiny

PROMPTS = [[5, 9, 3, 7], [1, 2, 3, 4, 5, 6]]


def test_an_empty_configuration_is_greedy_and_without_end():
    found = read(GenerationConfig())
    assert (found.sampling, found.controls) == (Sampling(0.0), Controls())
    assert (found.max_new_tokens, found.max_length, found.eos_token_ids, found.stop_strings) == (None, None, (), ())


def test_sampling_without_a_top_k_has_transformers_default():
    assert read(GenerationConfig(do_sample=True)).sampling == Sampling(1.0, top_k=50)
    assert read(GenerationConfig(do_sample=True, top_k=0, top_p=0.9, min_p=0.1)).sampling == Sampling(1.0, 0, 0.9, 0.1)


def test_temperatures_without_sampling_are_greedy():
    assert read(GenerationConfig(do_sample=False, temperature=0.7)).sampling.greedy


def test_fields_by_hand():
    found = read(
        GenerationConfig(
            max_new_tokens=7, eos_token_id=[3, 4], stop_strings="x", repetition_penalty=1.2, min_new_tokens=2,
            bad_words_ids=[[1]], num_beams=1, use_cache=True, pad_token_id=0,
        )
    )  # fmt: skip
    assert (found.max_new_tokens, found.eos_token_ids, found.stop_strings) == (7, (3, 4), ("x",))
    assert (found.controls.repetition_penalty, found.controls.min_new_tokens) == (1.2, 2)
    assert [type(p) for p in found.controls.processors] == [NoBadWordsLogitsProcessor]
    assert read(GenerationConfig(eos_token_id=9)).eos_token_ids == (9,)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_beams": 4},
        {"num_return_sequences": 3, "do_sample": True},
        {"guidance_scale": 1.5},
        {"penalty_alpha": 0.6},
        {"epsilon_cutoff": 0.1},
        {"eta_cutoff": 0.1},
        {"encoder_repetition_penalty": 1.2},
        {"exponential_decay_length_penalty": [5, 1.1]},
        {"forced_eos_token_id": 3},
        {"max_time": 3.0},
        {"top_h": 0.4},
        {"begin_suppress_tokens": [3]},
        {"renormalize_logits": True},
        {"min_length": 5},
        {"token_healing": True},
        {"watermarking_config": {"bias": 2.0}},
    ],
)
def test_what_cannot_be_served_is_refused_by_name(fields):
    name = next(iter(fields))
    with pytest.raises(ValueError, match=rf"generation_config: {name}=.* cannot be decoded exactly"):
        read(GenerationConfig(**fields))


def test_max_length_counts_the_prompt():
    done = generate(tiny(), None, PROMPTS, generation_config=GenerationConfig(max_length=9))
    assert list(map(len, done.tokens)) == [5, 3]


def test_what_is_given_beside_the_configuration_counts_more():
    model = tiny()
    config = GenerationConfig(max_new_tokens=4, do_sample=True, eos_token_id=list(range(48)))
    done = generate(model, None, PROMPTS, generation_config=config, max_new_tokens=6, sampling=Sampling(0.0), eos_token_ids=[])
    assert done.tokens == generate(model, None, PROMPTS, max_new_tokens=6).tokens


@pytest.mark.parametrize("padding", ["left", "right"])
def test_a_padded_tensor_is_its_rows(padding):
    model = tiny()
    width = max(map(len, PROMPTS))
    pads = [[0] * (width - len(row)) for row in PROMPTS]
    ids = [pad + row if padding == "left" else row + pad for pad, row in zip(pads, PROMPTS, strict=True)]
    mask = [[0] * len(pad) + [1] * len(row) for pad, row in zip(pads, PROMPTS, strict=True)]
    mask = mask if padding == "left" else [row[::-1] for row in mask]
    done = generate(model, None, torch.tensor(ids), attention_mask=torch.tensor(mask), max_new_tokens=5)
    assert done.tokens == generate(model, None, PROMPTS, max_new_tokens=5).tokens


def test_a_model_is_a_draft():
    model = tiny()
    done = generate(model, perturbed(model), PROMPTS, max_new_tokens=9)
    assert done.tokens == generate(model, Draft(model), PROMPTS, max_new_tokens=9).tokens
    assert done.draft_forwards > 0


@pytest.mark.parametrize("count", [0, 3])
def test_log_probabilities_are_the_teacher_forced_ones(count):
    model = tiny(dtype=torch.float64)
    options = {"max_new_tokens": [9, 4], "sampling": Sampling(0.7, top_k=9), "log_probs": True, "seed": 2}
    done = generate(model, Draft(perturbed(model)), PROMPTS, num_draft_tokens=count, eos_token_ids=[11], **options)
    for prompt, tokens, found in zip(PROMPTS, done.tokens, done.log_probs, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        want = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
        torch.testing.assert_close(torch.tensor(found).double(), want, atol=1e-5, rtol=0)
    assert generate(model, None, PROMPTS, max_new_tokens=3).log_probs is None


def test_logits_that_are_no_numbers_are_an_error():
    model = tiny()
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    with pytest.raises(ValueError, match="NaN or infinite"):
        generate(model, None, PROMPTS, max_new_tokens=3)


def test_a_model_that_breaks_later_is_an_error_too():
    model = tiny()
    generate(model, None, PROMPTS, max_new_tokens=3)  # it passed its trial
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    for sampling in (Sampling(0.0), Sampling(1.0)):
        with pytest.raises(ValueError, match="NaN or infinite"):
            generate(model, None, PROMPTS, max_new_tokens=3, sampling=sampling)


def test_rows_of_very_different_lengths_stand_side_by_side():
    model = tiny(max_position_embeddings=4200, dtype=torch.float64)
    long = torch.randint(48, (4000,), generator=torch.Generator().manual_seed(0)).tolist()
    done = generate(model, Draft(perturbed(model)), [[7], long], max_new_tokens=6, num_draft_tokens=3)
    assert done.tokens == [generate(model, None, [prompt], max_new_tokens=6).tokens[0] for prompt in ([7], long)]

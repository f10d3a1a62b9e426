"""What cannot be decoded is refused by name before the first token; what only looks strange is decoded right."""

import copy

import pytest
import torch

from speculative import Draft, Sampling, generate, stream
from speculative.cache import UnsupportedModelError
from speculative.metrics import total
from tests.speculative.laws import decode
from tests.speculative.oracles import PROMPTS, WARM, transformers_greedy
from tests.speculative.tiny import perturbed, tiny


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "at least one token"),
        ([[1, 2], []], {}, "at least one token"),
        ([[1]], {"num_draft_tokens": -1}, "num_draft_tokens must lie between 0 and 128, not -1"),
        ([[1]], {"num_draft_tokens": 10**6}, "num_draft_tokens must lie between 0 and 128, not 1000000"),
        ([[1]], {"max_new_tokens": None}, "max_new_tokens: say how many"),
        ([[1, 48]], {}, "a prompt has token id 48, the target knows 0 … 47"),
        ([[1, -2]], {}, "a prompt has token id"),
        (["text"], {}, "prompts given as text need a tokenizer"),
        ([1, 2, 3], {}, r"a list of rows: a single one of ids is \[\[1, 2, 3\]\], not \[1, 2, 3\]"),
        (torch.tensor([[1.5]]), {}, "prompts must hold token ids, whole numbers, not 1.5"),
        ([[1, 2.0]], {}, "prompts must hold token ids, whole numbers, not 2.0"),
        (["text", [1]], {}, "prompts must be all texts, or all rows of token ids"),
        ({"input_ids": [[1]]}, {}, "prompts must be the rows themselves: give its input_ids"),
        ([[1]], {"stop_strings": ["x"]}, "stop_strings need a tokenizer"),
        ([[1]], {"stop_strings": "x"}, "stop_strings need a tokenizer"),
        ([[1]], {"stop_strings": [5]}, r"stop_strings must be texts, not \[5\]"),
        ([[1]], {"stop_strings": ["x", ""]}, "stop_strings: an empty string would end every row at once"),
        ([[1]], {"eos_token_ids": "x"}, "eos_token_ids must be token ids, whole numbers, not 'x'"),
        ([[1]], {"eos_token_ids": 2.0}, "eos_token_ids must be token ids, whole numbers, not 2.0"),
        ([[1]], {"eos_token_ids": -2}, "eos_token_ids must be ≥ 0, not -2"),
        ([[1]], {"verification": "exact"}, "verification must be one of token, block, match, typical, not 'exact'"),
        ([[1]], {"confidence": 1.5}, "confidence must lie in"),
        ([[1]], {"max_new_tokens": -1}, "max_new_tokens must be one number ≥ 0"),
        ([[1]], {"max_new_tokens": [1, 2]}, "or one for each prompt"),
        ([[1]], {"num_draft_tokens": 2.5}, "num_draft_tokens must lie between 0 and 128, not 2.5"),
        ([[1]], {"max_new_tokens": 2.5}, "max_new_tokens must be one number ≥ 0"),
        ("text", {}, "prompts must be a list, if only of one text"),
        (torch.tensor([1, 2]), {}, r"a tensor of prompts must be \(B, T\), not \(2,\)"),
        ([[1, 2]], {"attention_mask": torch.ones(1, 2)}, "attention_mask belongs to prompts that are a tensor"),
        (torch.ones(1, 2).long(), {"attention_mask": torch.ones(1, 3)}, "attention_mask belongs to prompts .* has its shape"),
        (torch.ones(1, 2).long(), {"attention_mask": torch.zeros(1, 2)}, "at least one token"),
        ([[1] * 128], {"max_new_tokens": 1}, "need 129 positions, the target's context has 128"),
        ([[1] * 120], {"max_new_tokens": 9}, "need 129 positions, the target's context has 128"),
    ],
)
def test_inputs_are_refused_with_the_reason(target, prompts, options, message):
    with pytest.raises(ValueError, match=message):
        generate(target, None, prompts, **{"max_new_tokens": 5} | options)


def test_the_whole_context_can_be_used(target, drafts):
    options = {"max_new_tokens": 28, "draft": drafts["near"], "num_draft_tokens": 4}
    assert len(decode(target, [[1] * 100], **options).tokens[0]) == 28
    short = tiny("gpt2", seed=2, n_positions=64)
    own = generate(short, Draft(short), [[1] * 50], max_new_tokens=14, num_draft_tokens=4)
    assert len(own.tokens[0]) == 14
    with pytest.raises(ValueError, match="the draft's context has 64"):
        generate(target, Draft(short), [[1] * 60], max_new_tokens=5, num_draft_tokens=2)


NEO = {"num_layers": 2, "num_heads": 4}


@pytest.mark.parametrize("name", ["target", "draft"])
def test_training_mode_is_refused(name):
    models = {"target": tiny(), "draft": tiny(seed=1)}
    models[name].train()
    with pytest.raises(ValueError, match=f"the {name} is in training mode"):
        generate(models["target"], Draft(models["draft"]), [[1]], max_new_tokens=3, num_draft_tokens=2)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("mistral", {"sliding_window": 4}, "mistral: .*cannot be rolled back"),
        ("gemma2", {"head_dim": 8}, "gemma2: .*sliding_attention.*cannot be rolled back"),
        ("qwen2", {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1}, "qwen2: .*rolled back"),
        ("mamba", {"state_size": 8}, "mamba: .*cannot be rolled back"),
        ("gpt_neo", NEO | {"attention_types": [[["global", "local"], 1]]}, r"gpt_neo: layers of kind \['local'\] cannot be"),
    ],
)
def test_caches_that_cannot_roll_back_are_refused(target, kind, changes, message):
    model = tiny(kind, **changes)
    with pytest.raises(UnsupportedModelError, match=message):
        generate(model, None, [[1, 2]], max_new_tokens=3)
    with pytest.raises(UnsupportedModelError, match=message):
        generate(target, Draft(model), [[1, 2]], max_new_tokens=3, num_draft_tokens=2)


@pytest.mark.parametrize("vocabulary", [[3, 1, 2], [1, 1, 2]])
def test_a_draft_vocabulary_out_of_order_is_refused(target, vocabulary):
    with pytest.raises(ValueError, match="sorted and without repeats"):
        Draft(target, torch.tensor(vocabulary))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "the draft would read id 47, its embedding has 30 rows: give the draft inputs"),
        ({"inputs": torch.arange(48)}, "the draft would read id 47, its embedding has 30 rows"),
        ({"inputs": torch.arange(40)}, "the draft reads 40 ids, the target writes 48"),
        ({"inputs": torch.arange(48) % 30, "outputs": torch.tensor([1, 2, 48])}, "name row 48 of its head, which has 48"),
    ],
)
def test_tables_that_do_not_fit_the_draft_are_refused(target, changes, message):
    model = tiny(seed=1)
    model.set_input_embeddings(torch.nn.Embedding(30, 32))
    vocabulary = torch.arange(3) if "outputs" in changes else None
    with pytest.raises(ValueError, match=message):
        generate(target, Draft(model, vocabulary, **changes), [[1]], max_new_tokens=3)


def test_tables_go_where_the_model_is():
    placed = Draft(tiny().to("meta"), outputs=torch.arange(48), inputs=torch.arange(48)).placed()
    assert (placed.outputs.device.type, placed.inputs.device.type, placed.vocabulary) == ("meta", "meta", None)


def test_a_stream_refuses_before_it_is_read(target):
    with pytest.raises(ValueError, match="at least one token"):
        stream(target, None, [[]], max_new_tokens=3)


def test_models_are_left_as_they_were(target, drafts):
    def snapshot(model):
        return copy.deepcopy((model.config.to_dict(), model.generation_config.to_dict(), model.state_dict()))

    pair = (target, drafts["near"].model)
    before = [snapshot(model) for model in pair]
    generate(target, drafts["near"], PROMPTS, max_new_tokens=8, num_draft_tokens=3, sampling=WARM)
    for model, (config, generation, weights) in zip(pair, before, strict=True):
        assert (model.config.to_dict(), model.generation_config.to_dict()) == (config, generation)
        assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
        assert not model.training


@pytest.mark.parametrize("keys", [[7], [1, 2, 3]])
def test_keys_must_be_one_for_each_row(target, keys):
    with pytest.raises(ValueError, match="row_keys"):
        generate(target, None, PROMPTS[:2], max_new_tokens=4, sampling=WARM, row_keys=keys)


@pytest.mark.parametrize("size", [40, 64])
def test_a_draft_of_another_vocabulary_size_is_refused(target, size):
    with pytest.raises(ValueError, match="vocabulary"):
        generate(target, Draft(tiny(vocabulary=size)), PROMPTS, max_new_tokens=8, num_draft_tokens=3)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("gpt_neo", NEO | {"attention_types": [[["global"], 2]]}),
        ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128}),
    ],
)
def test_other_attention_is_exact(kind, changes):
    model = tiny(kind, **changes)
    done = generate(model, None, PROMPTS, max_new_tokens=16).tokens
    assert done == [transformers_greedy(model, prompt, 16) for prompt in PROMPTS]
    drafted = generate(model, perturbed(model, 0.02), PROMPTS, max_new_tokens=16)
    assert drafted.tokens == done
    assert total(drafted.acceptance).proposed > 0


def test_a_state_that_is_no_cache_is_found_by_trying():
    with pytest.raises(UnsupportedModelError, match="rwkv: its output depends on how tokens are fed; it is not supported"):
        generate(tiny("rwkv", attention_hidden_size=32), None, PROMPTS, max_new_tokens=16)


def test_a_draft_on_another_device_is_refused(target):
    with pytest.raises(ValueError, match="the draft is on meta, the target on cpu; move one of them"):
        generate(target, Draft(tiny().to("meta")), [[1]], max_new_tokens=3)


@pytest.mark.parametrize("sampling", [Sampling(0.0), WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_draft_in_another_number_format_changes_nothing(target, dtype, sampling):
    draft = perturbed(tiny(), 0.02).to(dtype)
    options = {"max_new_tokens": 15, "sampling": sampling, "seed": 2}
    done = generate(target, Draft(draft), PROMPTS, verification="match", **options)
    assert done.tokens == generate(target, None, PROMPTS, **options).tokens
    assert total(done.acceptance).accepted > 0


def test_a_draft_with_other_special_tokens_changes_nothing(target):
    """Only the target's ends count; what the draft's own configuration says of them is not read."""
    draft = perturbed(tiny(dtype=torch.float64))
    for settings in (draft.config, draft.generation_config):
        settings.bos_token_id, settings.eos_token_id, settings.pad_token_id = 7, list(range(20)), 9
    done = generate(target, Draft(draft), PROMPTS, max_new_tokens=15, eos_token_ids=[33])
    assert done.tokens == generate(target, None, PROMPTS, max_new_tokens=15, eos_token_ids=[33]).tokens


def test_a_draft_that_gives_no_numbers_is_refused(target):
    model = tiny(seed=1)
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    with pytest.raises(UnsupportedModelError, match="NaN or infinite"):
        generate(target, Draft(model), PROMPTS, max_new_tokens=3)


def test_no_drafts_is_plain_decoding(target, drafts):
    done = generate(target, drafts["near"], PROMPTS, max_new_tokens=6, num_draft_tokens=0)
    assert (done.tokens, done.draft_forwards) == (generate(target, None, PROMPTS, max_new_tokens=6).tokens, 0)

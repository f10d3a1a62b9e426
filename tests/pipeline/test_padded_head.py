"""A head with more rows than the tokenizer has ids: the rows behind are never drawn and get no mass."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

import speculative
from data.logit_cache import LogitCache
from data.responses import Request, Response, read_shards
from data.targets import DenseTargets
from pipeline import baselines, contestants, drafter_prompts, heads, held_out, lossless, lossy, plan, race, tiny, trees
from pipeline.config import Decoding, Target
from pipeline.drafter_prompts import Case
from pipeline.target import resolve
from speculative import Draft, Sampling, Tree, calibration
from tests.pipeline.conftest import SMOKE, only
from tests.speculative.tiny import perturbed

MORE = 40


@pytest.fixture(scope="module")
def padded(tmp_path_factory):
    """A tiny target whose padding would be drawn often."""
    folder = tmp_path_factory.mktemp("padded") / "model"
    tiny.make(folder, seed=0)
    model = AutoModelForCausalLM.from_pretrained(folder)
    rows = model.config.vocab_size
    model.resize_token_embeddings(rows + MORE)
    with torch.no_grad():
        model.get_input_embeddings().weight[rows:] = torch.randn(MORE, 64, generator=torch.Generator().manual_seed(0))
    model.save_pretrained(folder)
    drawn = speculative.generate(model.eval(), None, [[5, 6, 7]] * 8, max_new_tokens=8, sampling=speculative.Sampling(1.0))
    assert max(map(max, drawn.tokens)) >= rows  # or there would be nothing to cut
    return folder, rows


def test_it_is_known_by_the_tokenizer(padded, tmp_path):
    folder, rows = padded
    found = resolve(Target(str(folder)), tmp_path, 0)
    assert (found.ids, found.vocabulary_size, found.padding) == (rows, rows + MORE, {"ids": rows})
    assert resolve(Target("random:tiny"), tmp_path, 0).padding == {}


@pytest.mark.parametrize("codec", ["topk", "hidden"])
def test_no_stage_gives_it_mass(padded, tmp_path, attempt, prompts, codec):
    folder, rows = padded
    given = [SMOKE, f"target.path={folder}", "corpus=dataset", f"corpus.path={prompts}", "corpus.train=8", f"codec={codec}"]
    given += ["corpus.validation=2", "corpus.test=1", "generate.max_new_tokens=8", "decoding.longest_draft=1"]
    stages = "[corpus,generate,logits,distil,calibrate]"
    code, stderr = attempt(*given, f"stages={stages}", "trainer.max_steps=2", work=tmp_path)
    assert code == 0, stderr
    responses = list(read_shards(only(tmp_path / "artifacts" / "generate")))
    assert max(token for response in responses for token in response.tokens) < rows
    place = only(tmp_path / "artifacts" / "logits")
    assert json.loads((place / "manifest.json").read_text())["identity"]["ids"] == rows
    for part in ("train", "validation-1"):
        cache = LogitCache(place / part, place.name)
        for index in range(len(cache)):
            targets = cache[index].targets
            if isinstance(targets, DenseTargets):
                assert targets.log_probs.shape[1] == rows
            else:
                assert int(targets.ids.max()) < rows
                assert bool((targets.log_probs.exp().sum(-1) > 0.1).all())


# What measures: with the number of ids, it is as if the head had no more rows


@pytest.fixture(scope="module")
def pair(padded):
    """The padded model, and the same one without the padding."""
    folder, rows = padded
    model, twin = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for _ in range(2))
    twin.resize_token_embeddings(rows)
    return model, twin, rows


TEXTS = [
    Response(Request(n, split, f"p{n}", "user", 1.0, (5 + n, 9, 3, 7)), tuple(range(20 + n, 36 + n)), False)
    for n in range(3)
    for split in ("validation",)
]
SAMPLINGS = [Sampling(0.0), Sampling(1.0)]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_agreement_is_that_of_models_without_padding(pair, sampling):
    model, twin, rows = pair
    draft, own = perturbed(model), perturbed(twin)
    own.load_state_dict(
        {name: value[:rows] if len(value) == rows + MORE else value for name, value in draft.state_dict().items()}
    )
    [found] = held_out.measure(model, [Draft(draft)], TEXTS, sampling, "", rows)
    [want] = held_out.measure(twin, [Draft(own)], TEXTS, sampling, "")
    assert found.acceptance == [pytest.approx(row, abs=1e-5) for row in want.acceptance]
    assert found.means == pytest.approx(want.means, abs=1e-4)
    [uncut] = held_out.measure(model, [Draft(draft)], TEXTS, sampling, "")
    assert uncut.means["forward_kl"] != pytest.approx(want.means["forward_kl"], abs=1e-4)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("trimmed", [False, True])
def test_agreement_of_heads_is_that_of_heads_without_padding(pair, sampling, trimmed):
    model, twin, rows = pair
    kept = torch.arange(0, rows + MORE, 3) if trimmed else None
    made, own = heads.build(model, 2, kept), heads.build(twin, 2, None if kept is None else kept[kept < rows])
    [found] = heads.measure(model, [made], TEXTS, sampling, "", rows)
    [want] = heads.measure(twin, [own], TEXTS, sampling, "")
    assert found.acceptance == [pytest.approx(row, abs=1e-5) for row in want.acceptance]
    assert found.means == pytest.approx(want.means, abs=1e-4)


def test_transformers_chooses_from_as_many_ids(pair):
    model, twin, rows = pair
    want = baselines.decode(twin, [5, 6, 7], 24, Sampling(0.0), 0).tokens
    assert baselines.decode(model, [5, 6, 7], 24, Sampling(0.0), 0).tokens != want  # it meets the padding
    assert baselines.decode(model, [5, 6, 7], 24, Sampling(0.0), 0, ids=rows).tokens == want


def test_the_proof_compares_texts_without_padding(pair):
    model, _, rows = pair
    found = lossless.prove(model, Draft(perturbed(model)), [None], [(5, 6, 7), (8, 9)], 24, 2, [Tree.of((2, 1))], rows)
    assert (found["different"], found["oracle_answers"], found["oracle_different"]) == (0, 2, 0)


def test_everything_that_decodes_is_told_how_many_ids_there_are(pair, monkeypatch):
    """Each call of the engine, from the race, the choice of a tree, the settings of drafters and their prompts."""
    model, _, rows = pair
    given, engine, begin = [], speculative.generate, calibration.prepare

    def noted(*models, **options):
        given.append(options.get("vocabulary_size"))
        return engine(*models, **options)

    def prepared(*models, **options):
        given.append(options.get("vocabulary_size"))
        return begin(*models, **options)

    monkeypatch.setattr(speculative, "generate", noted)
    monkeypatch.setattr(calibration, "prepare", prepared)
    draft, sampling = Draft(perturbed(model)), Sampling(1.0)
    seen = {}

    def of(name, made):
        seen[name] = (len(given) > 0, set(given))
        given.clear()
        return made

    config = Decoding(tree=[2, 1], longest_draft=1, max_new_tokens=4)
    *_, costs = of("costs of trees", list(trees.calibrated(model, draft, [[5, 6]] * 2, sampling, config, rows, new_tokens=4)))
    of("choice of a tree", trees.choose(model, draft, TEXTS, sampling, config, costs, 0, rows))
    trained = contestants.Trained("draft model", draft, 1.0)
    ways = of("settings", contestants.ways(model, trained, None, TEXTS, sampling, config, 0, rows))
    of("ways", [way.decode(model, (5, 6), 4) for way in ways])

    class Words:
        eos_token_id = None

    of("answers", drafter_prompts.answered(model, Words(), [Case("chat", (5, 6), 0)], 4, sampling, 0, rows))
    heat = plan.Heat(TEXTS[0], 4, 1, sampling, 1.0)
    racing = race.Race(model, draft, [], lossy.rule(config), 0, {1.0: Tree.of((2, 1))}, rows)
    of("race", racing.test_step(heat, 0))
    assert seen == dict.fromkeys(seen, (True, {rows}))

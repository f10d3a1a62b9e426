"""A head with more rows than the tokenizer has ids: the rows behind are never drawn and get no mass."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

import speculative
from data.logit_cache import LogitCache
from data.responses import read_shards
from data.targets import DenseTargets
from pipeline import tiny
from pipeline.config import Target
from pipeline.target import resolve
from tests.pipeline.conftest import SMOKE, only

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

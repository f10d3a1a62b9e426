"""The fitted head finds a planted map, reads a whole copy as the target does, and listens to response positions alone."""

import pytest
import torch

from data.batching import Batch
from data.targets import SparseTargets
from pipeline.config import Draft as DraftConfig
from pipeline.draft import build
from pipeline.head_fit import RIDGE, fit_head, ridge
from tests.pipeline.test_draft import KEPT, tiny

NOTHING = SparseTargets(torch.empty(0, 1), torch.empty(0, 1), torch.empty(0))


def batches(count: int = 4, rows: int = 8, width: int = 12, seed: int = 0) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    predicts = torch.arange(width).expand(rows, -1) >= 3
    return [Batch(torch.randint(50, (rows, width), generator=generator), predicts, NOTHING) for _ in range(count)]


def test_a_planted_map_is_found():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2000, 6, generator=generator, dtype=torch.float64)
    planted = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    found = ridge(x.T @ x, x.T @ (x @ planted), RIDGE)
    torch.testing.assert_close(found, planted, atol=0.01, rtol=0)


def test_a_direction_never_visited_is_not_used():
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    x[:, 2] = 0
    found = ridge(x.T @ x, x.T @ x, RIDGE)
    assert found[2].abs().max() == 0
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("vocabulary", [None, KEPT])
def test_a_whole_copy_keeps_the_targets_head(vocabulary):
    target = tiny()
    draft = build(target, DraftConfig(layers=[]), vocabulary)
    before = draft.model.get_output_embeddings().weight.clone()
    fit_head(draft, target, batches())
    error = (draft.model.get_output_embeddings().weight - before).norm() / before.norm()
    assert error < 0.02  # the ridge shrinks a little


@pytest.mark.parametrize("vocabulary", [None, KEPT])
def test_a_shallow_copy_comes_closer_on_text_it_has_not_seen(vocabulary):
    target = tiny()
    draft = build(target, DraftConfig(layers=[0, 1]), vocabulary)
    [unseen] = batches(count=1, seed=9)

    @torch.no_grad()
    def distance() -> float:
        logits = target(input_ids=unseen.tokens).logits
        wanted = logits if vocabulary is None else logits[..., vocabulary]
        return float((draft.model(input_ids=unseen.tokens).logits - wanted)[unseen.predicts].norm())

    before = distance()
    fit_head(draft, target, batches(count=40))
    assert distance() < 0.8 * before


def test_prompt_positions_have_no_say():
    target = tiny()
    drafts = [build(target, DraftConfig(layers=[0]), KEPT) for _ in range(2)]
    whole = batches(count=2)
    silent = [Batch(b.tokens, b.predicts & (torch.arange(12) < 8), b.targets) for b in whole]
    changed = [Batch(b.tokens.where(torch.arange(12) < 9, 0), b.predicts & (torch.arange(12) < 8), b.targets) for b in whole]
    for draft, given in zip(drafts, (silent, changed), strict=True):
        fit_head(draft, target, given)
    heads = [draft.model.get_output_embeddings().weight for draft in drafts]
    torch.testing.assert_close(heads[0], heads[1], atol=1e-5, rtol=1e-5)
    fit_head(drafts[1], target, whole)
    assert not torch.allclose(heads[0], heads[1], atol=1e-3)


def test_the_target_and_everything_but_the_head_stay_as_they_were():
    target = tiny(tied=True)
    draft = build(target, DraftConfig(layers=[0, 3]), None)
    before = {name: tensor.clone() for name, tensor in draft.model.state_dict().items()}
    kept = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    fit_head(draft, target, batches())
    assert all(torch.equal(tensor, kept[name]) for name, tensor in target.state_dict().items())
    changed = [name for name, tensor in draft.model.state_dict().items() if not torch.equal(tensor, before[name])]
    assert changed == ["lm_head.weight"]

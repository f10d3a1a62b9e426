"""With trees too, both caches equal a fresh prefill after every round: the kept path has been moved to its positions."""

import pytest
import torch

from speculative import Sampling, Tree, api, engine, generate
from speculative.cache import CachedModel, SlotCache
from speculative.rows import Rows
from speculative.tree_drafter import TreeDrafter
from tests.speculative.oracles import FAMILIES, LONG, TREES, WARM, compare
from tests.speculative.tiny import DOUBLE, perturbed, tiny

GREEDY = Sampling(0.0)


@pytest.fixture
def audit(monkeypatch):
    """Compare every row of both caches with a fresh prefill after every round; collects the kept paths."""
    paths, models, state = [], [], {}
    real = Rows.commit

    class Watched(CachedModel):
        def __init__(self, *args):
            super().__init__(*args)
            models.append(self)

    class Audited(TreeDrafter):
        def rollback(self, lengths):
            super().rollback(lengths)
            for row, length in enumerate(lengths.tolist()):
                committed = state["tokens"][row, :length].tolist()
                compare(models[-1], row, committed[:-1])
                valid = int(self.model.lengths[row])
                assert length - 2 - (state["drafts"] == 0) <= valid < length  # the bonus and a leaf before it are not fed
                compare(self.model.cached, row, committed[:valid])

    def commit(rows, block, verdict, eos, stop):
        alive = rows.alive
        result = real(rows, block, verdict, eos, stop)
        state.update(tokens=rows.tokens, drafts=block.shape[1] - 1)
        if verdict.path is not None:
            paths.extend(tuple(path) for path in verdict.path[alive].tolist())
        return result

    monkeypatch.setattr(engine, "CachedModel", Watched)
    monkeypatch.setattr(api, "TreeDrafter", Audited)
    monkeypatch.setattr(Rows, "commit", commit)
    return paths


def moved(path):
    """Whether a node of it stood in another slot than its position."""
    return any(node > place for place, node in enumerate(path, start=1))


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["other", "near", "trimmed"])
@pytest.mark.parametrize("tree", ["wide", "uneven"])
def test_both_caches_equal_a_fresh_prefill_after_every_round(target, drafts, audit, tree, name, sampling):
    generate(target, drafts[name], LONG, max_new_tokens=[14, 3, 9, 2, 12, 14], tree=TREES[tree], sampling=sampling)
    assert len(audit) > 10
    assert any(moved(path) for path in audit) or name == "other"


@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind != "llama"])
def test_the_caches_of_every_family_are_right(kind, audit):
    target = tiny(kind, dtype=DOUBLE)
    generate(target, perturbed(target, 0.03), LONG[:3], max_new_tokens=[10, 4, 8], tree=(3, 2))
    assert any(moved(path) for path in audit)


@pytest.mark.parametrize("fault", ["the path is not moved", "one slot too far"])
def test_the_audit_sees_a_path_that_is_not_where_it_should_be(target, drafts, audit, monkeypatch, fault):
    real = SlotCache.keep_path
    wrong = {"the path is not moved": lambda *_: None, "one slot too far": lambda self, p, a: real(self, p, a + 1)}[fault]
    monkeypatch.setattr(SlotCache, "keep_path", wrong)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        generate(target, drafts["near"], LONG, max_new_tokens=14, tree=(3, 2, 1))


def test_a_node_s_position_is_its_depth(target, monkeypatch):
    """The published mistake: siblings at positions of their own."""
    tokens = torch.tensor([[7, 3, 9, 1, 4], [7, 3, 9, 5, 4]])
    with torch.inference_mode():
        whole = target(tokens).logits
        cached = CachedModel(target, 1, 12)
        cached.prefill(tokens[:1], torch.tensor([2]))
        nodes = torch.tensor([[9, 1, 5, 4, 4]])
        fed = cached.feed_nodes(nodes, torch.tensor([2]), Tree((0, 0, 1, 2)), range(5))[0]
    for node, (row, place) in enumerate([(0, 2), (0, 3), (1, 3), (0, 4), (1, 4)]):
        torch.testing.assert_close(fed[node], whole[row, place])

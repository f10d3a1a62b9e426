"""What a reference draft shows to be learnable counts, by hand; a reference of other ids is refused."""

import pytest
import torch

from data.batching import collate
from pipeline import selection
from pipeline.config import Draft as DraftConfig
from pipeline.config import Objective
from pipeline.draft import build, save
from pipeline.errors import PipelineError
from pipeline.losses import forward_kl, support
from tests.pipeline.test_module import KEPT, loader, model, module, rows, trainer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.*litlogger.*")


def test_the_positions_furthest_above_the_reference_count_by_hand():
    values, reference = torch.tensor([3.0, 1.0, 5.0, 2.0]), torch.tensor([2.5, 0.0, 4.9, 3.0])
    # Excess: 0.5, 1.0, 0.1, −1.0. The highest loss of all is one that the reference has not learnt either.
    assert selection.learnable(values, reference, 0.5).tolist() == [1.0, 1.0, 0.0, 0.0]
    assert selection.learnable(values, reference, 0.51).tolist() == [1.0, 1.0, 1.0, 0.0]
    assert selection.learnable(values, reference, 0.01).tolist() == [0.0, 1.0, 0.0, 0.0]


def selective(keep: float, **options):
    """A learner, and the draft that tells it what is learnable."""
    reference = build(model(2), DraftConfig(layers=[]), KEPT).model.requires_grad_(False)
    return module(build(model(1), DraftConfig(layers=[]), KEPT), objective=Objective(keep=keep), reference=reference, **options)


def test_the_loss_is_the_mean_over_the_chosen_positions():
    batch = collate(rows(model(0)))
    learner = selective(0.25)
    target = support(batch.targets, learner.draft_ids)
    with torch.no_grad():
        values, learnt = (forward_kl(log_q(batch), target) for log_q in (learner.log_q, learner.reference))
    count = -(-len(values) // 4)
    chosen = (values - learnt).sort(descending=True).indices[:count]
    found = learner.training_step(batch, 0)
    torch.testing.assert_close(found, values[chosen].mean())
    assert abs(float(found - values.mean())) > 1e-3
    found.backward()  # through the draft alone
    assert all(p.grad is not None for p in learner.model.parameters())


def test_the_reference_is_neither_trained_nor_stored(tmp_path):
    learner = selective(0.5)
    [before] = [learner.reference.args[0].get_output_embeddings().weight.clone()]
    trainer(tmp_path, max_steps=3).fit(learner, loader([collate(rows(model(0)))] * 3))
    assert torch.equal(learner.reference.args[0].get_output_embeddings().weight, before)
    assert {name.split(".")[0] for name in learner.state_dict()} == {"model"}


def test_a_reference_comes_from_its_folder_or_is_refused(tmp_path):
    draft = build(model(1), DraftConfig(layers=[0]), KEPT)
    save(draft, tmp_path / "same")
    save(build(model(1), DraftConfig(layers=[0]), KEPT - 1), tmp_path / "other ids")
    save(build(model(1), DraftConfig(layers=[0]), None), tmp_path / "all ids")
    weight = selection.load(str(tmp_path / "same"), draft).get_output_embeddings().weight
    assert torch.equal(weight, draft.model.get_output_embeddings().weight)
    assert not weight.requires_grad
    for name in ("other ids", "all ids"):
        with pytest.raises(PipelineError, match=rf"^objective\.reference=.*{name}: its draft vocabulary is not this draft's"):
            selection.load(str(tmp_path / name), draft)
    with pytest.raises(PipelineError, match=r"^objective\.reference=.*nowhere: no distilled draft; give the folder draft"):
        selection.load(str(tmp_path / "nowhere"), draft)

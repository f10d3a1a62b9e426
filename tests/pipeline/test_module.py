"""Distillation learns one batch by heart, stops at the step of a bad loss, and counts before it divides."""

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from data.batching import Batch, collate
from data.logit_cache import Row
from data.targets import SparseTargets
from pipeline import losses
from pipeline.config import Draft as DraftConfig
from pipeline.config import Objective, Optimizer
from pipeline.draft import build
from pipeline.errors import PipelineError
from pipeline.module import Distillation, freeze_embedding
from speculative import Draft
from speculative.alignment import agreement
from speculative.cost import Costs

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.*litlogger.*")

VOCABULARY = 40
KEPT = torch.arange(1, VOCABULARY, 2)
FORWARD_KL = Objective()
COSTS = Costs(plain_seconds=1.0, draft=0.1, verify=(1.0,) * 5, other=(0.0,) * 5)
PROMPTS = ([3, 1, 4], [15, 9], [2, 6, 5, 35])


def model(seed: int, layers: int = 2) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


@torch.no_grad()
def rows(target: LlamaForCausalLM) -> list[Row]:
    """Texts with the target's own distributions, whole and without rounding, at every response token."""
    made = []
    for number, start in enumerate(PROMPTS):
        extra = torch.randint(VOCABULARY, (6 + number,), generator=torch.Generator().manual_seed(number))
        tokens = torch.cat([torch.tensor(start), extra])
        logits = target(input_ids=tokens[None]).logits[0, len(start) - 1 : -1]
        log_probs, ids = logits.log_softmax(-1).sort(descending=True)
        made.append(Row(tokens, len(start), SparseTargets(ids, log_probs, torch.full((len(ids),), 1e-12).log())))
    return made


def module(
    draft: Draft, names: tuple[str, ...] = ("validation-1",), objective=FORWARD_KL, reference=None, **options
) -> Distillation:
    texts = {name: float(name.removeprefix("validation-")) for name in names}
    settings = {"learning_rate": 1e-2, "weight_decay": 0.0} | options
    made = Distillation(draft, VOCABULARY, objective, Optimizer(**settings), 200, texts, COSTS, reference)
    made.trainer = L.Trainer(accelerator="cpu", barebones=True)  # replaced by the one that fits; it tells the precision
    return made


def trainer(tmp_path, **options) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        devices=1,
        default_root_dir=tmp_path,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"enable_checkpointing": False} | options,
    )


def loader(batches: list[Batch]) -> DataLoader:
    return DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch)


@pytest.mark.parametrize("vocabulary", [None, KEPT])
def test_log_q_is_what_the_draft_says_at_the_marked_positions(vocabulary):
    draft = build(model(0), DraftConfig(layers=[]), vocabulary)
    made = rows(model(0))
    with torch.no_grad():
        found = module(draft).log_q(collate(made))
        alone = [draft.model(input_ids=r.tokens[None]).logits[0, r.start - 1 : -1].log_softmax(-1) for r in made]
    torch.testing.assert_close(found, torch.cat(alone), atol=1e-5, rtol=1e-5)


def test_a_draft_equal_to_its_target_has_no_loss():
    target = model(0)
    loss = module(build(target, DraftConfig(layers=[]), None)).training_step(collate(rows(target)), 0)
    assert loss.item() == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("vocabulary", [None, KEPT])
def test_one_batch_is_learnt_by_heart(tmp_path, vocabulary):
    target = model(0, layers=3)
    batch = collate(rows(target))
    learner = module(build(model(1), DraftConfig(layers=[]), vocabulary))
    support = losses.support(batch.targets, learner.draft_ids)
    # A trimmed draft reaches the restricted p at best, whose overlap with p is the mass that the vocabulary keeps.
    reachable = support.p.sum(-1).mean()
    with torch.no_grad():
        before = losses.overlap_at_least(learner.log_q(batch), support).mean() / reachable
    learner.model.train()
    trainer(tmp_path, max_steps=200).fit(learner, loader([batch] * 200))
    with torch.no_grad():
        after = losses.overlap_at_least(learner.log_q(batch), support).mean() / reachable
    assert before < 0.8
    assert after > 0.95
    assert list(tmp_path.iterdir()) == []


def test_a_loss_that_is_not_finite_stops_at_its_step(tmp_path):
    good = collate(rows(model(0)))
    broken = SparseTargets(good.targets.ids, good.targets.log_probs, torch.full_like(good.targets.log_tail, torch.nan))
    batches = [good, good, good, Batch(good.tokens, good.predicts, broken), good]
    learner = module(build(model(1), DraftConfig(layers=[0]), None), learning_rate=0.0125)
    with pytest.raises(PipelineError, match=r"optimizer\.learning_rate=0\.0125: the loss is nan at step 3;"):
        trainer(tmp_path, max_steps=5).fit(learner, loader(batches))
    assert all(torch.isfinite(p).all() for p in learner.model.parameters())


class Spoil(Callback):
    """Multiplies the head after one step, as a rate that is too high would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer, pl_module, *_) -> None:
        if trainer.global_step == self.step:
            pl_module.model.get_output_embeddings().weight.data.mul_(1e4)


@pytest.mark.parametrize("every", [1, 2])
def test_weights_that_diverge_stop_at_their_step_and_the_last_good_checkpoint_stays(tmp_path, every):
    good = collate(rows(model(0)))
    learner = module(build(model(1), DraftConfig(layers=[0]), None))
    keep = ModelCheckpoint(tmp_path, monitor="validation-1/overlap", mode="max", save_last=True)
    runner = trainer(
        tmp_path, max_steps=6, callbacks=[Spoil(3), keep], val_check_interval=every, check_val_every_n_epoch=None,
        num_sanity_val_steps=0, enable_checkpointing=True,
    )  # fmt: skip
    with pytest.raises(PipelineError, match=r"the loss is [\d.e+]+ at step 3; the last good checkpoint is kept"):
        runner.fit(learner, loader([good] * 6), loader([(good, ("a",) * len(PROMPTS))]))
    kept = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert kept["global_step"] == 2
    learner.load_state_dict(kept["state_dict"])
    with torch.no_grad():
        assert losses.forward_kl(learner.log_q(good), losses.support(good.targets, None)).mean() < 4
    resumed = module(build(model(1), DraftConfig(layers=[0]), None))
    resumed.on_load_checkpoint(kept)
    assert resumed.limit == learner.limit


def test_a_loss_may_rise_as_far_as_ten_times_that_of_a_draft_that_knows_nothing():
    learner = module(build(model(1), DraftConfig(layers=[0]), None))
    for loss in (0.1, 30.0, 36.8):  # 10 ln 40 = 36.89
        learner._refuse_divergence(loss)
    with pytest.raises(PipelineError, match="the loss is 37 at step 0"):
        learner._refuse_divergence(37.0)
    other = module(build(model(1), DraftConfig(layers=[0]), None))
    for loss in (50.0, 499.0):  # a draft may begin worse than even
        other._refuse_divergence(loss)


def test_validation_divides_sums_by_counts(tmp_path):
    target = model(0)
    made = rows(target)
    draft = build(model(1), DraftConfig(layers=[0]), KEPT)
    learner = module(draft, names=("validation-1", "validation-0"))
    # Batches of two rows and of one: a mean of batch means would be another number.
    loaders = [
        loader([(collate(made[:2]), ("a", "b")), (collate(made[2:]), ("a",))]),
        loader([(collate(made[:1]), ("a",))]),
    ]
    runner = trainer(tmp_path)
    runner.validate(learner, loaders, verbose=False)
    with torch.no_grad():
        parts = [
            agreement(
                target(input_ids=r.tokens[None]).logits[0, r.start - 1 : -1],
                draft.model(input_ids=r.tokens[None]).logits[0, r.start - 1 : -1],
                KEPT,
            )
            for r in made
        ]
    for name, chosen in (("validation-1", parts), ("validation-0", parts[:1])):
        for metric in ("overlap", "top1", "forward_kl"):
            dense = torch.cat([getattr(part, metric) for part in chosen]).mean().item()
            assert runner.callback_metrics[f"{name}/{metric}"].item() == pytest.approx(dense, abs=1e-4)
    found = runner.callback_metrics
    for kind, chosen in (("a", parts[::2]), ("b", parts[1:2])):
        dense = torch.cat([part.overlap for part in chosen]).mean().item()
        assert found[f"validation-1/overlap_kind_{kind}"].item() == pytest.approx(dense, abs=1e-4)
    assert "validation-0/overlap_kind_b" not in found
    means = [torch.cat([p.overlap for p in group]).mean() for group in (parts[:2], parts[2:])]
    assert abs(sum(means) / 2 - torch.cat([p.overlap for p in parts]).mean()) > 1e-3


def test_the_rate_warms_up_and_ends_at_its_final_share():
    learner = module(Draft(model(0)), learning_rate=2.0, warmup_share=0.05, final_share=0.1)
    learner.steps = 105  # 5 of warm-up, then half a cosine over 100
    made = learner.configure_optimizers()
    assert made["lr_scheduler"]["interval"] == "step"
    rates = []
    for _ in range(120):
        rates.append(made["optimizer"].param_groups[-1]["lr"])  # that of AdamW
        made["optimizer"].step()
        made["lr_scheduler"]["scheduler"].step()
    assert rates[:6] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0, 2.0])
    assert rates[55] == pytest.approx(2.0 * (0.1 + 0.9 / 2))
    assert rates[5:106] == sorted(rates[5:106], reverse=True)
    assert rates[105:] == pytest.approx([0.2] * 15)


def test_norms_do_not_decay_and_frozen_weights_are_not_trained():
    draft = build(model(0), DraftConfig(layers=[0]), KEPT)
    freeze_embedding(draft.model)
    optimizer = module(draft, weight_decay=0.3).configure_optimizers()["optimizer"]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.3, 0.0]
    assert [{p.ndim for p in group["params"]} for group in optimizer.param_groups] == [{2}, {2}, {1}]
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    embedding = draft.model.get_input_embeddings().weight
    assert trained == {id(p) for p in draft.model.parameters()} - {id(embedding)}
    assert id(draft.model.get_output_embeddings().weight) in trained

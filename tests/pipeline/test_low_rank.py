"""A head of low rank begins as the best of its rank, is trained by both its factors, and leaves as one matrix."""

import json
from dataclasses import asdict

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

import speculative
from pipeline import low_rank, optimizers, price, proposer
from pipeline.check import check
from pipeline.choices import Method
from pipeline.config import Draft as DraftConfig
from pipeline.config import Optimizer as OptimizerConfig
from pipeline.draft import build, load, save, shape
from pipeline.errors import PipelineError
from pipeline.expand import expand
from pipeline.head_fit import RIDGE, fit_head, penalised
from pipeline.low_rank import LowRankHead, factors, multiplied_out
from speculative import Draft, pack
from speculative.packing import _Packed
from tests.pipeline.test_config import composed
from tests.pipeline.test_draft import FAMILIES, KEPT, TOKENS, logits, tiny
from tests.pipeline.test_head_fit import batches

MANY = torch.arange(0, 50, 2)
DOUBLE = torch.float64


def thin(
    rank: int = 3, vocabulary: torch.Tensor | None = MANY, family: str = "llama", layers: tuple[int, ...] = (0, 1)
) -> Draft:
    draft = build(tiny(family), DraftConfig(layers=list(layers)), vocabulary)
    low_rank.factor(draft.model, rank)
    return draft


def error(matrix: torch.Tensor, product: torch.Tensor, hidden: torch.Tensor) -> float:
    """Of logits, squared and summed over ``hidden`` states (N, d)."""
    return float((hidden @ (matrix - product).T).square().sum())


@pytest.fixture(scope="module")
def planted():
    """A matrix (20, 8), and hidden states (300, 8) of uneven directions."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(20, 8, generator=generator, dtype=DOUBLE)
    lengths = torch.tensor([9.0, 5, 3, 2, 1, 0.5, 0.2, 0.1], dtype=DOUBLE)
    turned = torch.linalg.qr(torch.randn(8, 8, generator=generator, dtype=DOUBLE)).Q
    return matrix, torch.randn(300, 8, generator=generator, dtype=DOUBLE) * lengths @ turned


@pytest.mark.parametrize("rank", [1, 3, 7])
def test_the_error_is_the_least_that_any_matrix_of_its_rank_has(planted, rank):
    matrix, hidden = planted
    up, down = factors(matrix, hidden.T @ hidden, rank)
    assert (up.shape, down.shape) == ((20, rank), (rank, 8))
    found = error(matrix, up @ down, hidden)
    # Logits of rank r lie no nearer to these than the singular values behind the r-th (Eckart & Young).
    assert found == pytest.approx(float(torch.linalg.svdvals(hidden @ matrix.T)[rank:].square().sum()), rel=1e-6)
    generator = torch.Generator().manual_seed(1)
    for scale in (1e-3, 1e-2, 0.1, 1.0):
        for _ in range(20):
            moved = [f + scale * torch.randn(f.shape, generator=generator, dtype=DOUBLE) for f in (up, down)]
            assert error(matrix, moved[0] @ moved[1], hidden) > found
    plain = factors(matrix, torch.eye(8), rank)
    assert error(matrix, plain[0] @ plain[1], hidden) > 1.01 * found, "the states must have a say"


def test_without_states_it_is_the_truncated_decomposition(planted):
    matrix, _ = planted
    up, down = factors(matrix, torch.eye(8), 3)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    torch.testing.assert_close(up @ down, (left[:, :3] * values[:3]) @ right[:3])
    torch.testing.assert_close(up.norm(dim=0), down.norm(dim=1))


def test_a_matrix_of_a_lower_rank_is_kept_and_makes_no_nan():
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(20, 2, generator=generator, dtype=DOUBLE) @ torch.randn(2, 8, generator=generator, dtype=DOUBLE)
    up, down = factors(matrix, torch.eye(8), 5)
    torch.testing.assert_close(up @ down, matrix)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_that_is_fitted_is_the_best_of_its_rank(family):
    target = tiny(family)
    full, draft = build(target, DraftConfig(layers=[0, 1]), MANY), thin(4, family=family)
    before = draft.model.get_output_embeddings().weight.detach().double()
    given = batches(count=20)
    for one in (full, draft):
        fit_head(one, target, given)
    head = draft.model.get_output_embeddings()
    assert isinstance(head, LowRankHead)
    with torch.no_grad():
        states = [full.model.base_model(input_ids=b.tokens).last_hidden_state[b.predicts].double() for b in given]
        hidden = torch.cat(states)
        fitted, found = (one.model.get_output_embeddings().weight.double() for one in (full, draft))
    root = torch.linalg.cholesky(penalised(hidden.T @ hidden, RIDGE)).T  # as good as states: its square is their moment
    least = float(torch.linalg.svdvals(root @ fitted.T)[4:].square().sum())
    assert error(fitted, found, root) == pytest.approx(least, rel=1e-4)
    assert error(fitted, before, root) > 1.05 * least


def test_every_id_stays_and_the_shape_counts_the_factors():
    layer = 2 * 256 + 2 * 128 + 3 * 512 + 2 * 16
    found = shape(thin(3))
    read = 2 * layer + 16 + 3 * (16 + 25)
    assert (found.vocabulary, found.head_rank, found.head) == (25, 3, 3 * (16 + 25))
    assert (found.read_per_step, found.parameters) == (read, read + 50 * 16)
    full = shape(build(tiny(), DraftConfig(layers=[0, 1]), MANY))
    assert (full.head_rank, full.head, full.read_per_step) == (0, 16 * 25, 2 * layer + 16 + 16 * 25)
    assert proposer.words(asdict(found)) == "2 layers, width 16, vocabulary 25, head of rank 3"
    assert proposer.words(asdict(full)) == "2 layers, width 16, vocabulary 25"
    assert price.whole_vocabulary(found, 50, 0.9, 0.4, 2, 4)["head_bytes_here"] == 4 * 3 * (16 + 25)


@pytest.mark.parametrize("vocabulary", [None, MANY])
def test_it_survives_its_folder_bit_for_bit(tmp_path, vocabulary):
    draft = thin(3, vocabulary)
    save(draft, tmp_path)
    loaded = load(tmp_path, torch.float32)
    assert torch.equal(logits(loaded.model), logits(draft.model))
    assert shape(loaded) == shape(draft)
    assert json.loads((tmp_path / "shape.json").read_text())["head_rank"] == 3
    assert load(tmp_path, torch.bfloat16).model.get_output_embeddings().up.weight.dtype is torch.bfloat16


def test_the_gradient_reaches_both_factors_and_a_step_changes_the_product():
    draft = thin(3)
    head = draft.model.get_output_embeddings()
    for read in (lambda: draft.model(input_ids=TOKENS).logits, lambda: head.weight):
        draft.model.zero_grad()
        read().square().sum().backward()
        assert all(factor.weight.grad.abs().max() > 0 for factor in (head.down, head.up))
    before = head.weight.detach().clone()
    with torch.no_grad():
        head.down.weight.mul_(2)
    torch.testing.assert_close(head.weight, 2 * before)
    torch.testing.assert_close(multiplied_out(draft.model).get_output_embeddings().weight, 2 * before)


def test_its_factors_go_where_a_head_goes():
    model = thin(3).model
    muon, adamw = optimizers.make(model, OptimizerConfig(method=Method.muon), torch.float32).parts
    [decayed] = [group["params"] for group in adamw.param_groups if group["weight_decay"] > 0]
    factors_of_head = {id(p) for p in model.get_output_embeddings().parameters()}
    assert len(factors_of_head) == 2
    assert factors_of_head <= {id(p) for p in decayed}
    assert not factors_of_head & {id(p) for group in muon.param_groups for p in group["params"]}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("vocabulary", [None, MANY])
def test_it_leaves_as_a_stock_model_with_one_matrix(tmp_path, family, vocabulary):
    draft = thin(3, vocabulary, family)
    kept = logits(draft.model)
    expand(draft, [TOKENS[0].tolist()], 50).model.save_pretrained(tmp_path)
    stock, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    found = logits(stock)
    assert found.shape[-1] == 50
    torch.testing.assert_close(found if vocabulary is None else found[..., MANY], kept, atol=1e-5, rtol=1e-5)
    assert isinstance(draft.model.get_output_embeddings(), LowRankHead), "the draft itself stays as it was"


class Products(TorchDispatchMode):
    """The widest matrix of any product: (V, d) where the factors are multiplied out."""

    def __init__(self) -> None:
        super().__init__()
        self.multiplied_out = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        self.multiplied_out |= isinstance(made, torch.Tensor) and made.shape == (len(MANY), 16)
        return made


@pytest.mark.parametrize("sampling", [speculative.Sampling(0.0), speculative.Sampling(1.0)], ids=["greedy", "sampled"])
def test_decoding_never_multiplies_out_and_packed_writes_what_it_wrote(sampling):
    target, draft = tiny(), thin(6, layers=(0, 1, 2, 3))
    options = {"max_new_tokens": 20, "num_draft_tokens": 3, "sampling": sampling}
    prompts = [[1, 5, 9], [3, 2, 7, 7, 4]]
    with Products() as seen:
        wanted = speculative.generate(target, draft, prompts, **options)
    assert not seen.multiplied_out
    found = speculative.generate(pack(target), Draft(pack(draft.model), MANY), prompts, **options)
    assert found.tokens == wanted.tokens
    assert found.acceptance == wanted.acceptance
    assert sum(one.accepted for one in found.acceptance) > 0
    if torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        head = draft.model.get_output_embeddings()
        assert all(isinstance(factor, _Packed) for factor in (head.down, head.up))
    if sampling.greedy:
        assert wanted.tokens == speculative.generate(target, None, prompts, max_new_tokens=20, sampling=sampling).tokens


@pytest.mark.parametrize(("rank", "vocabulary", "said"), [(16, MANY, "25 × 16; give a number from 1 to 9"),
                                                          (10, MANY, "25 × 16; give a number from 1 to 9"),
                                                          (4, KEPT, "5 × 16; give a number from 1 to 3")])  # fmt: skip
def test_a_rank_that_makes_nothing_smaller_is_refused(rank, vocabulary, said):
    with pytest.raises(PipelineError, match=rf"^draft\.head_rank={rank}: no smaller than the full head of {said}, or null"):
        thin(rank, vocabulary)
    assert shape(thin(rank - 1 if rank < 10 else 9, vocabulary)).head_rank in (3, 9)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["draft.head_rank=0"], r"^draft\.head_rank=0: give a number above 0, or null for the full head$"),
        (["draft.head_rank=-4"], r"^draft\.head_rank=-4: give a number above 0"),
        (
            ["draft=medusa", "codec=hidden", "draft.head_rank=8"],
            r"^draft\.head_rank=8: Medusa heads read the target's own head",
        ),
    ],
)
def test_what_is_no_rank_is_refused_early(overrides, message):
    with pytest.raises(PipelineError, match=message):
        check(composed(*overrides))

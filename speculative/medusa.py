"""Medusa heads: the target drafts for itself, from the state that its own head has just read.

Head k (1, 2, … K) reads the last hidden state h of the target at position t and proposes token t + 1 + k, whatever token
t + 1 became: logits = E · (h + SiLU(W_k h + b_k)), the residual blocks of Cai et al. (2401.10774) before one matrix E that
all heads share. q is what the token was drawn from, so the output stays the target's. Knows no training.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from speculative.drafters import Proposal
from speculative.sampling import Sampling
from speculative.tree import Tree
from speculative.tree_drafter import draw_children
from speculative.tree_verification import Branches
from speculative.verification import Guess

WEIGHTS, CONFIG = "medusa.safetensors", "medusa.json"


class MedusaHeads(nn.Module):
    """K heads for a target with states of ``width`` numbers, over D ``outputs``.

    ``vocabulary`` (D,), sorted, is the target id of each output; None means equal. Heads begin as the identity: with the
    target's own head rows as ``matrix`` every head repeats what the target says of the next token.
    """

    def __init__(self, count: int, width: int, outputs: int, vocabulary: Tensor | None = None) -> None:
        super().__init__()
        if count < 1:
            raise ValueError(f"Medusa needs one head or more, not {count}")
        if vocabulary is not None and (len(vocabulary) != outputs or not bool((vocabulary.diff() > 0).all())):
            raise ValueError(f"the heads' vocabulary must be {outputs} target ids, sorted and without repeats")
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        for block in self.blocks:
            nn.init.zeros_(block.weight)
            nn.init.zeros_(block.bias)
        self.matrix = nn.Linear(width, outputs, bias=False)
        self.register_buffer("vocabulary", vocabulary)

    @property
    def count(self) -> int:
        return len(self.blocks)

    @property
    def width(self) -> int:
        return self.matrix.in_features

    @property
    def size(self) -> int:
        """Ids that can be drafted, D."""
        return self.matrix.out_features

    def below(self, size: int) -> int:
        """How many of these ids are below ``size``, and so can be drawn where the ids from there on are padding."""
        return min(self.size, size) if self.vocabulary is None else int((self.vocabulary < size).sum())

    def seen(self, head: int, states: Tensor) -> Tensor:
        """What E reads for ``head``, 0 the first: states (..., width) behind its residual block."""
        return states + nn.functional.silu(self.blocks[head](states))

    def forward(self, states: Tensor) -> Tensor:
        """Logits (..., K, D) of states (..., width)."""
        return self.matrix(torch.stack([self.seen(head, states) for head in range(self.count)], -2))

    def check_fits(self, target: PreTrainedModel) -> None:
        """Raise ValueError unless these are heads for ``target``."""
        width, size = target.get_output_embeddings().weight.shape[1], target.config.vocab_size
        if self.width != width:
            raise ValueError(f"the Medusa heads read states of {self.width} numbers, the target's have {width}")
        fits = self.size == size if self.vocabulary is None else int(self.vocabulary[-1]) < size
        if not fits:
            raise ValueError(f"the Medusa heads draft ids that the target, with {size}, does not have, or lack a vocabulary")
        ours, theirs = (self.matrix.weight.device, self.matrix.weight.dtype), (target.device, target.dtype)
        if ours != theirs:
            raise ValueError(f"the Medusa heads are {ours[1]} on {ours[0]}, the target is {theirs[1]} on {theirs[0]}; move one")


def save(heads: MedusaHeads, folder: Path, target: str) -> None:
    """Write weights and configuration; ``target`` names the model that the heads belong to."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in heads.state_dict().items()}, folder / WEIGHTS)
    shape = {"heads": heads.count, "width": heads.width, "outputs": heads.size}
    (folder / CONFIG).write_text(json.dumps({"kind": "medusa", "target": target} | shape, indent=2) + "\n")


def load(folder: Path, target: str, dtype: torch.dtype) -> MedusaHeads:
    """The heads saved in ``folder``, in eval mode.

    Raises:
        ValueError: they were trained for another target.
    """
    config = json.loads((folder / CONFIG).read_text())
    if config["target"] != target:
        raise ValueError(f"{folder}: these heads belong to the target {config['target']}, not to {target}")
    state = load_file(folder / WEIGHTS)
    heads = MedusaHeads(config["heads"], config["width"], config["outputs"], state.get("vocabulary")).to(dtype)
    heads.load_state_dict(state)
    return heads.eval()


class MedusaDrafter:
    """Draws from the heads: a chain, or ``tree`` if there is one; a node's children depend on its depth alone.

    Ids from ``size`` on are never drawn; None: all are.
    """

    def __init__(self, heads: MedusaHeads, sampling: Sampling, seed: int, tree: Tree | None, size: int | None = None) -> None:
        self.heads, self.sampling, self.seed, self.tree = heads, sampling, seed, tree
        vocabulary = heads.vocabulary
        self.outputs = None if size is None else heads.below(size)
        self.vocabulary = None if vocabulary is None else vocabulary[: self.outputs]
        self.states: Tensor | None = None  # (B, width) behind the token before the anchor
        self.forwards = 0

    def prefill(self, tokens: Tensor, lengths: Tensor) -> None:
        """Nothing to read: states come from the target's rounds, so the first one has no drafts."""

    def observe(self, states: Tensor) -> None:
        """The target's states (B, width) that the newest committed tokens were chosen from."""
        self.states = states

    def propose(self, tokens: Tensor, lengths: Tensor, rows: Tensor, count: int) -> Proposal:
        if self.states is None:
            return Proposal(Guess(tokens[:, :0], None), torch.zeros_like(lengths))
        tree = Tree.of((1,) * count) if self.tree is None else self.tree.cut(count)
        logits = self.heads(self.states)[..., : self.outputs]
        self.forwards += 1
        drafted = tokens.new_zeros(len(tokens), tree.size)
        distributions = []
        for depth, level in enumerate(tree.levels):
            by_node = logits[:, depth, None].expand(-1, len(level), -1)
            q = draw_children(by_node, tree, level, self.sampling, self.seed, lengths, rows, self.vocabulary, drafted)
            distributions += [] if q is None else [q]
        q = torch.cat(distributions, 1) if distributions else None
        guess = Guess(drafted, q, self.vocabulary) if self.tree is None else Branches(tree, drafted, q, self.vocabulary)
        return Proposal(guess, torch.full_like(lengths, tree.depth))

    def keep(self, path: Tensor, lengths: Tensor, tree: Tree) -> None:
        """Nothing is kept of a branch."""

    def rollback(self, lengths: Tensor) -> None:
        """Nothing was kept."""

    def select(self, rows: Tensor) -> None:
        self.states = None if self.states is None else self.states[rows]

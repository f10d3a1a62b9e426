"""The draft model: built from the target's own parts, saved as safetensors, loaded for decoding.

A draft is a shallow copy: some of the target's layers, its embedding and final norm, and the head rows of the tokens
in the draft vocabulary. A head of 8k rows in place of 49k is most of what makes a small draft cheap.
"""

import copy
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from pipeline import low_rank
from pipeline.config import Draft as DraftConfig
from pipeline.errors import PipelineError
from speculative import Draft
from speculative.drafters import head_rows

TRANSLATION = ("vocabulary", "outputs", "inputs")  # fields of Draft that are kept beside its weights


@dataclass(frozen=True)
class Shape:
    """The figures of a draft that people compare. ``read_per_step``: parameters that one draft step reads.

    ``heads`` of Medusa heads, which have no layers and read all their parameters once a round; 0 of a model.
    ``head_rank`` of a head that is a product of two matrices; 0 of one matrix.
    """

    layers: int
    width: int
    vocabulary: int
    parameters: int
    read_per_step: int
    heads: int = 0
    head_rank: int = 0

    @property
    def head(self) -> int:
        """Parameters of a model's head."""
        return self.head_rank * (self.width + self.vocabulary) if self.head_rank else self.width * self.vocabulary


def choose_vocabulary(responses: Iterable[Iterable[int]], size: int, always: Iterable[int]) -> tuple[Tensor, float]:
    """The ``size`` most frequent ids (sorted) in generated text, and the share of the text they cover.

    ``always`` (EOS ids) are part of it whatever their count. Ties go to the smaller id, unseen ids are filled in order.
    """
    counts = Counter(token for response in responses for token in response)
    forced = list(dict.fromkeys(always))
    ranked = [token for token, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])) if token not in forced]
    chosen = (forced + ranked)[:size]
    unseen = (token for token in range(max(counts, default=0) + size) if token not in counts and token not in forced)
    chosen += [next(unseen) for _ in range(size - len(chosen))]
    covered = sum(counts[token] for token in chosen) / max(counts.total(), 1)
    return torch.tensor(sorted(chosen)), covered


def smallest_vocabulary(responses: Iterable[Iterable[int]], coverage: float, always: Iterable[int]) -> int:
    """The least size at which the vocabulary of ``choose_vocabulary`` covers a share ``coverage`` of generated text."""
    counts = Counter(token for response in responses for token in response)
    forced = set(always)
    missing = coverage * counts.total() - sum(counts[token] for token in forced)
    size = len(forced)
    for count in sorted((count for token, count in counts.items() if token not in forced), reverse=True):
        if missing <= 0:
            break
        missing, size = missing - count, size + 1
    return max(size, len(forced) + 1)


def build(source: PreTrainedModel, config: DraftConfig, vocabulary: Tensor | None) -> Draft:
    """A float32 draft whose every part starts from the ``source``'s: the target, or a model that exists.

    Raises:
        PipelineError: a layer that the source does not have, or an architecture whose layers are not found.
    """
    depth = source.config.num_hidden_layers
    wrong = [layer for layer in config.layers if not -depth <= layer < depth]
    if wrong:
        raise PipelineError(f"draft.layers={wrong}: the model has layers 0 … {depth - 1} (negative counts from the end)")
    _check_head(source)
    chosen = [layer % depth for layer in config.layers] or list(range(depth))
    model = _empty(_shallow(source.config, chosen), vocabulary)
    parts = dict(source.state_dict())
    prefix = _layer_prefix(source)
    state = {name: tensor for name, tensor in parts.items() if not name.startswith(prefix)}
    for new, old in enumerate(chosen):
        start = f"{prefix}{old}."
        state |= {f"{prefix}{new}.{n.removeprefix(start)}": t for n, t in parts.items() if n.startswith(start)}
    head = source.get_output_embeddings().weight
    name = next(n for n, m in model.named_modules() if m is model.get_output_embeddings())
    state[f"{name}.weight"] = head if vocabulary is None else head[vocabulary]
    model.load_state_dict({name: tensor.detach().float().clone() for name, tensor in state.items()})
    return Draft(model.eval(), vocabulary)


def _check_head(source: PreTrainedModel) -> None:
    """Refuse a head that does more than multiply: training and export apply it as a bare matrix."""
    if getattr(source.get_output_embeddings(), "bias", None) is not None or not head_is_last(source, 1e-3):
        raise PipelineError(
            f"target.path: {source.config.model_type} adds a bias to its logits or scales them; "
            "drafts of it cannot be built yet"
        )


@torch.inference_mode()
def head_is_last(model: PreTrainedModel, tolerance: float) -> bool:
    """Whether the logits are the head applied to the last hidden state and nothing more, tried on one text."""
    ids = torch.arange(min(8, model.config.vocab_size), device=model.device)[None]
    wanted = model(input_ids=ids, use_cache=False).logits
    found = model.get_output_embeddings()(model.base_model(input_ids=ids, use_cache=False).last_hidden_state)
    return found.shape == wanted.shape and torch.allclose(found, wanted, atol=tolerance, rtol=tolerance)


def shape(draft: Draft) -> Shape:
    model = draft.model
    total = sum(p.numel() for p in model.parameters())
    lookup = model.get_input_embeddings().weight
    rank = low_rank.rank_of(model)
    tied = not rank and lookup is model.get_output_embeddings().weight
    return Shape(
        layers=model.config.num_hidden_layers,
        width=model.config.hidden_size,
        vocabulary=head_rows(model),
        parameters=total,
        read_per_step=total if tied else total - lookup.numel(),
        head_rank=rank,
    )


def save(draft: Draft, folder: Path) -> None:
    """Write config, weights and vocabulary into ``folder``, and how ids are translated for a draft with another tokenizer."""
    state = {name: tensor.detach().clone().contiguous() for name, tensor in draft.model.state_dict().items()}
    translation = {name: getattr(draft, name) for name in TRANSLATION}
    state |= {f"draft_{name}": tensor for name, tensor in translation.items() if tensor is not None}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / "draft.safetensors")
    draft.model.config.save_pretrained(folder)
    (folder / "shape.json").write_text(json.dumps(asdict(shape(draft)), indent=2) + "\n")


def load(folder: Path, dtype: torch.dtype) -> Draft:
    """The draft saved in ``folder``, in eval mode."""
    state = load_file(folder / "draft.safetensors")
    translation = {name: state.pop(f"draft_{name}", None) for name in TRANSLATION}
    trimmed = translation["vocabulary"] if translation["outputs"] is None else None  # else the head has all its own rows
    model = _empty(AutoConfig.from_pretrained(folder, trust_remote_code=False), trimmed)
    low_rank.make_room(model, state)
    model.load_state_dict(state)
    return Draft(model.to(dtype).eval(), **translation)


def _empty(config: AutoConfig, vocabulary: Tensor | None) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if vocabulary is not None:
        model.set_output_embeddings(nn.Linear(config.hidden_size, len(vocabulary), bias=False))
    return model


def _shallow(config: AutoConfig, layers: list[int]) -> AutoConfig:
    """The target's config with fewer layers and a head of its own."""
    config = copy.deepcopy(config)
    depth = config.num_hidden_layers
    for key, value in config.to_dict().items():  # layer_types and other lists with an entry for each layer
        if isinstance(value, list) and len(value) == depth:
            setattr(config, key, [value[layer] for layer in layers])
    config.num_hidden_layers = len(layers)
    config.tie_word_embeddings = False
    config.dtype = torch.float32
    return config


def _layer_prefix(model: PreTrainedModel) -> str:
    """The state-dict prefix of the target's list of layers, e.g. ``model.layers.``."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == model.config.num_hidden_layers:
            return f"{name}."
    raise PipelineError(f"target.path: {model.config.model_type} has no list of layers to copy a draft from")

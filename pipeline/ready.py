"""Models as they decode one prompt at a time: in their number format, their weights packed, and compiled if that is wanted.

It knows nothing of what is decoded, or of how drafts are made.
"""

import logging
import os

from transformers import PreTrainedModel

from pipeline.context import Context
from pipeline.errors import PipelineError
from pipeline.proposer import Proposer, prepared
from speculative import MedusaHeads, NotCompiledError, compiled, pack

log = logging.getLogger("draftsmith")


def target(context: Context) -> PreTrainedModel:
    """The target of the run."""
    model = pack(context.target.load(context.dtype))
    return _compiled(model, context, "the target") if context.config.decoding.compile else model


def draft(proposer: Proposer, context: Context) -> Proposer:
    """``proposer`` itself. Medusa heads read the target's states, and the target runs as it is for them."""
    prepared(proposer, context.dtype)
    if context.config.decoding.compile and not isinstance(proposer, MedusaHeads):
        _compiled(proposer.model, context, "the draft")
    return proposer


def keep_compiled(context: Context, name: str) -> None:
    """Let what torch compiles from now on lie with the results, and say that ``name`` is being compiled."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(context.work / "compiled")
    log.info("%s is being compiled, which takes minutes the first time", name)


def _compiled(model: PreTrainedModel, context: Context, name: str) -> PreTrainedModel:
    keep_compiled(context, name)
    try:
        return compiled(model)
    except NotCompiledError as error:
        raise PipelineError(f"decoding.compile=true: {error}; give decoding.compile=false") from error

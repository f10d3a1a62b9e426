"""Speculative decoding: a draft proposes, the target verifies, the output law stays the target's.

The library of the algorithm: sampling, verification, cache, engine, drafters, alignment measures and the cost model.
One rule, typical acceptance, is lossy; its results say so. The library knows nothing of configuration, tracking, training
or where models come from.
"""

from speculative.api import Piece, generate, stream
from speculative.compiled import NotCompiledError, compiled
from speculative.controls import Controls
from speculative.cost import Costs
from speculative.drafters import Draft
from speculative.engine import Generation
from speculative.length import AutoLength
from speculative.lookup import PromptLookup
from speculative.medusa import MedusaHeads
from speculative.packing import pack
from speculative.rows import Finish
from speculative.sampling import Sampling
from speculative.tree import Tree
from speculative.typical import Typical
from speculative.verification import Rule
from speculative.vocabulary import shared_draft

__all__ = [
    "AutoLength",
    "Controls",
    "Costs",
    "Draft",
    "Finish",
    "Generation",
    "MedusaHeads",
    "NotCompiledError",
    "Piece",
    "PromptLookup",
    "Rule",
    "Sampling",
    "Tree",
    "Typical",
    "compiled",
    "generate",
    "pack",
    "shared_draft",
    "stream",
]

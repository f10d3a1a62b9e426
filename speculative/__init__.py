"""Speculative decoding: a draft proposes, the target verifies, the output law stays the target's.

The library of the algorithm: sampling, verification, cache, engine, drafters, alignment measures and the cost model.
It knows nothing of configuration, tracking, training or where models come from.
"""

from speculative.drafters import Draft
from speculative.engine import Generation, generate
from speculative.sampling import Sampling

__all__ = ["Draft", "Generation", "Sampling", "generate"]

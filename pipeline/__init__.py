"""The application: corpus → generate → logits → distil → calibrate → speculate → report → export."""

import os

# PyTorch asks the system for huge pages where tensors are large: without them half the time of sampling and of training on
# a processor goes into page faults. It reads the variable at its first allocation.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

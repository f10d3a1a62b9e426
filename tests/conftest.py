"""Tests run side by side, one thread each: two that want all cores would wait for each other."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

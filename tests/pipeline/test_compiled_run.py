"""A run that decodes with compiled forwards: what is refused before it, and that it is the same run but for its time."""

import json
import re
import shutil

import pytest

from data.artifact import MANIFEST
from pipeline.check import check
from pipeline.errors import PipelineError
from tests.pipeline.conftest import SMOKE, start
from tests.pipeline.test_config import composed
from tests.pipeline.test_medusa_run import newest


def test_medusa_heads_are_refused_by_name():
    check(composed("draft=medusa", "codec=hidden"))
    with pytest.raises(PipelineError, match=r"decoding\.compile=True: Medusa heads read states"):
        check(composed("draft=medusa", "codec=hidden", "decoding.compile=true"))


def test_a_machine_without_a_compiler_is_told_so(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    check(composed())
    message = "decoding.compile=True: there is no C++ compiler no-such-compiler; install it, or give decoding.compile=false"
    with pytest.raises(PipelineError, match=re.escape(message)):
        check(composed("decoding.compile=true"))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling needs a C++ compiler")
def test_a_compiled_run_is_lossless_and_keeps_its_programs_below_its_work_folder(work):
    before = newest(work, "speculate")
    _, _, stderr, code, _ = start(SMOKE, "stages=[calibrate,speculate]", "decoding.compile=true", work=work)
    assert code == 0, stderr
    after = newest(work, "speculate")
    assert after != before
    figures = [json.loads((folder / MANIFEST).read_text())["metrics"] for folder in (before, after)]
    assert figures[1]["lossless/different"] == 0
    assert figures[1]["lossless/prompts"] == figures[0]["lossless/prompts"]
    assert figures[1]["alignment/overlap"] == pytest.approx(figures[0]["alignment/overlap"], abs=1e-6)
    assert any((work / "compiled").rglob("*.so"))

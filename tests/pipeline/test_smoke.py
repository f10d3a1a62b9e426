"""The smoke experiment goes all the way, a second run finds nothing to do, and what it exports works without us."""

import json
import re
import stat

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.choices import Stage
from pipeline.config import Config
from pipeline.flow import MODULES
from tests.pipeline.conftest import SMOKE, STAGES, digest, only, start

ROWS = (
    "corpus",
    "target",
    "responses",
    "logits",
    "draft",
    "training",
    "alignment T=0",
    "alignment T=1",
    "acceptance T=0",
    "acceptance T=1",
    "speed T=0",
    "speed T=1",
    "lossless",
    "export",
    "tracking",
)


def manifest(work, stage):
    return json.loads((only(work / "artifacts" / stage) / "manifest.json").read_text())


def test_every_stage_runs(smoke):
    assert smoke.returncode == 0, smoke.stderr
    assert tuple(stage.name for stage in Config().stages) == STAGES
    assert set(MODULES) == set(Stage)
    assert re.findall(r"(\w+): begins", smoke.stdout) == list(STAGES)
    assert smoke.seconds < 120


@pytest.mark.parametrize("row", ROWS)
def test_table_has_the_row(smoke, row):
    table = smoke.stdout[smoke.stdout.index("Draftsmith") :]
    [text] = re.findall(rf"^│{re.escape(row)} *│(.*)│$", table, re.MULTILINE)
    assert text.strip()


def test_table_says_where_speculation_loses(smoke):
    details = manifest(smoke.work, "speculate")["details"]["by_temperature"]
    losing = {t for t, entry in details.items() if entry["ratio"]["low"] < 1}
    assert {t for t in details if f"verdict T={t}" in smoke.stdout} == losing


def test_greedy_output_is_lossless(smoke):
    lossless = manifest(smoke.work, "speculate")["details"]["lossless"]
    assert lossless["different"] == 0
    assert lossless["prompts"] == 6
    assert lossless["draft_tokens"] >= 1


def test_report_is_a_picture_in_the_output_folder(smoke):
    [output] = (smoke.work / "runs").iterdir()
    picture = (output / "report.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n")
    assert len(picture) > 10_000
    assert "| lossless |" in (output / "report.md").read_text()


def test_nothing_is_written_outside_the_work_folder(smoke):
    assert smoke.outside == ()
    assert smoke.git_after == smoke.git_before
    assert not list(smoke.work.rglob("*.partial"))


def test_what_holds_text_is_private(smoke):
    assert stat.S_IMODE(smoke.work.stat().st_mode) & 0o077 == 0
    shards = [*smoke.work.rglob("*.parquet"), *smoke.work.rglob("*.jsonl"), *smoke.work.rglob("*.safetensors")]
    assert {path.suffix for path in shards} >= {".parquet", ".safetensors"}
    assert [path for path in shards if stat.S_IMODE(path.stat().st_mode) & 0o077] == []


def test_second_run_skips_every_stage_and_changes_nothing(work):
    before = digest(work / "artifacts")
    _, stdout, stderr, code, seconds = start(SMOKE, work=work)
    assert code == 0, stderr
    assert re.findall(r"(\w+): nothing has changed, skipped", stdout) == list(STAGES)
    assert "begins" not in stdout
    assert digest(work / "artifacts") == before
    assert seconds < 60
    assert all(f"│{row}" in stdout for row in ROWS)
    [output] = (work / "runs").iterdir()
    assert (output / "report.png").read_bytes() == (only(work / "artifacts" / "report") / "report.png").read_bytes()


def test_part_run_with_another_learning_rate_uses_what_exists(work, attempt):
    before = digest(work / "artifacts")
    code, stderr = attempt(SMOKE, "stages=[distil,speculate]", "optimizer.learning_rate=3e-3", work=work)
    assert code == 0, stderr
    after = digest(work / "artifacts")
    assert before.items() <= after.items()
    assert {path.split("/")[0] for path in after.keys() - before.keys()} == {"distil", "speculate"}
    drafts = {value for path, value in after.items() if path.endswith("draft/draft.safetensors") and path.startswith("distil")}
    assert len(drafts) == 2


def test_part_run_whose_results_exist_does_nothing(work, attempt):
    before = digest(work / "artifacts")
    code, stderr = attempt(SMOKE, "stages=[distil,speculate]", work=work)
    assert code == 0, stderr
    assert digest(work / "artifacts") == before


def test_the_export_was_read_in_a_process_of_its_own_and_let_out_by_the_gate(smoke):
    made = manifest(smoke.work, "export")
    found = made["details"]["transformers"]
    assert found["largest_logit_difference"] <= 1e-4
    assert abs(found["overlap"] - found["overlap_trained"]) <= 0.01
    assert abs(found["acceptance"] - found["acceptance_trained"]) <= 0.01
    assert found["same_output"] is True
    stock = made["details"]["stock"]["0"]
    assert stock["accepted"] == round(stock["acceptance_rate"] * stock["proposed"])
    assert stock["draft_step"] > 0 < stock["draft_step_here"]
    assert stock == manifest(smoke.work, "speculate")["details"]["by_temperature"]["0"]["stock"]
    assert (made["details"]["gate"], made["details"]["passed"]) == ("on", True)
    folder = only(smoke.work / "artifacts" / "export") / "draft"
    assert {"README.md", "serve.md", "gate.json", "provenance.json"} <= {path.name for path in folder.iterdir()}
    record = json.loads((folder / "provenance.json").read_text())
    assert set(record["runs"]) == set(STAGES)
    assert record["overrides"] == ["+experiment=smoke", "paths.work=…"]
    report = (only(smoke.work / "artifacts" / "report") / "report.html").read_text(encoding="utf-8")
    assert "python -m pipeline +experiment=smoke paths.work=…" in report
    assert str(smoke.work) not in report
    assert str(smoke.work) not in "".join(path.read_text() for path in folder.glob("*.md"))


def test_a_draft_that_loses_is_refused_and_only_its_evidence_is_kept(work, attempt):
    before = digest(work / "artifacts")
    code, stderr = attempt(SMOKE, "export.minimum_overlap=1.0", work=work)
    assert code == 2
    assert "overlap at temperature 0 is" in stderr
    assert "below export.minimum_overlap=1" in stderr
    added = [path for path in digest(work / "artifacts").keys() - before.keys() if not path.endswith(".lock")]
    assert [path.split("/")[0] + "/" + path.split("/")[-1] for path in added] == ["export/gate.json"]


def test_export_loads_without_remote_code_and_assists_without_changing_greedy_output(smoke):
    folder = only(smoke.work / "artifacts" / "export") / "draft"
    [target_folder] = [p for p in (smoke.work / "targets").iterdir() if p.is_dir()]
    assert not list(folder.glob("*.py"))
    draft, target = (
        AutoModelForCausalLM.from_pretrained(place, trust_remote_code=False, dtype=torch.float32).eval()
        for place in (folder, target_folder)
    )
    ours, theirs = (AutoTokenizer.from_pretrained(place, trust_remote_code=False) for place in (folder, target_folder))
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.chat_template == theirs.chat_template
    assert draft.config.vocab_size == target.config.vocab_size
    assert draft.config.num_hidden_layers < target.config.num_hidden_layers
    calls = []
    draft.register_forward_hook(lambda *_: calls.append(1))
    for text in ("Say the number 4.", "What does os.walk do?", "x"):
        chat = [{"role": "user", "content": text}]
        inputs = ours.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        options = {"max_new_tokens": 32, "do_sample": False, "pad_token_id": ours.pad_token_id}
        plain = target.generate(**inputs, **options)
        assert torch.equal(target.generate(**inputs, **options, assistant_model=draft), plain)
        assert plain.shape[1] > inputs["input_ids"].shape[1]
    assert calls

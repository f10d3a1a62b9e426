"""Text comes in whole characters and ends where a stop string begins, however tokens and rounds cut both."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speculative import Controls, Draft, Finish, generate, stream
from speculative.text import Transcript
from tests.speculative.laws import decode
from tests.speculative.texts import WORDS, byte_level, spell
from tests.speculative.tiny import perturbed, tiny

TOKENIZER = byte_level()
SIZE = len(TOKENIZER)
PROMPTS = [[60, 61, 62], [100, 9]]


@pytest.fixture(scope="module")
def target():
    return tiny(vocabulary=SIZE)


def rounds(ids, sizes):
    """``ids`` cut into rounds of the given sizes, the last size repeated."""
    place = 0
    for number in range(len(ids)):
        size = sizes[min(number, len(sizes) - 1)]
        if place < len(ids):
            yield ids[place : place + size]
        place += size


@pytest.mark.parametrize("sizes", [[1], [2], [3], [100]])
@pytest.mark.parametrize(
    ("parts", "stops", "kept", "text"),
    [
        (["hello", "Ġworld", "stop", "he"], ["stop"], 3, "hello world"),
        (["hello", "st", "op", "he"], ["stop"], 3, "hello"),  # over two tokens
        (["hello", "Ġworld", "he"], ["wor"], 2, "hello "),  # inside a token
        (["he", "ll", "st", "he"], ["stop"], None, "hellsthe"),  # begun and not completed
        (["hello", "END", "stop"], ["stop", "END"], 2, "hello"),  # the first of two
        (["st", "st", "op"], ["stop"], 3, "st"),  # a false start before the real one
    ],
)
def test_stop_strings_by_hand(sizes, parts, stops, kept, text):
    ids = spell(TOKENIZER, *parts)
    transcript = Transcript(TOKENIZER, 1, stops)
    seen, pieces, ended = 0, "", False
    for part in rounds(ids, sizes):
        stays = transcript(0, part)
        seen += len(part) if stays is None else stays
        ended = stays is not None
        pieces += transcript.take(0, last=ended)
        if ended:
            break
    pieces += transcript.take(0, last=True)
    assert (seen if ended else None) == kept
    assert pieces == text


def test_nothing_is_handed_on_that_a_stop_string_may_take_back():
    transcript = Transcript(TOKENIZER, 1, ["stop"])
    transcript(0, spell(TOKENIZER, "hello", "st"))
    assert transcript.take(0, last=False) == "hello"
    transcript(0, spell(TOKENIZER, "he"))
    assert transcript.take(0, last=False) == "sthe"


def test_a_character_waits_for_its_last_byte():
    ids = spell(TOKENIZER, "aé€😀b".encode())
    transcript = Transcript(TOKENIZER, 1)
    pieces = []
    for token in ids:
        transcript(0, [token])
        pieces.append(transcript.take(0, last=False))
    assert [piece for piece in pieces if piece] == ["a", "é", "€", "😀", "b"]
    assert len(ids) == 11


def test_a_character_that_is_never_completed_shows_at_the_end():
    transcript = Transcript(TOKENIZER, 1)
    transcript(0, spell(TOKENIZER, "he", "😀".encode())[:-1])
    assert transcript.take(0, last=False) == "he"
    assert transcript.take(0, last=True).startswith("�")


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.one_of(st.sampled_from(WORDS), st.sampled_from("aé€ 😀")), max_size=12), st.lists(st.integers(1, 5), min_size=1)
)
def test_pieces_put_together_are_the_whole_text(parts, sizes):
    ids = spell(TOKENIZER, *(part if part in WORDS else part.encode() for part in parts))
    transcript, pieces = Transcript(TOKENIZER, 1), ""
    for part in rounds(ids, sizes):
        transcript(0, part)
        pieces += transcript.take(0, last=False)
    assert pieces + transcript.take(0, last=True) == TOKENIZER.decode(ids)


# Special tokens leave no text


MARKED = byte_level(eos_token="<|im_end|>")
MARK = len(MARKED) - 1


@pytest.mark.parametrize("sizes", [[1], [2], [100]])
@pytest.mark.parametrize(
    ("parts", "kept", "text"),
    [
        (["hello", "<|im_end|>", "he"], 2, "hello"),
        (["hello", "ð", "Ł", "<|im_end|>"], 4, "hello�"),  # a character that is never completed
        (["hello", b"<|im_end|>", "he"], 11, "hello"),  # its signs one by one
        (["hello", b"<|im_", "<|im_end|>", b"end|>"], 7, "hello<|im_"),  # begun as signs, then the token itself
        (["hello", "he"], None, "hellohe"),
    ],
)
def test_a_special_token_is_a_stop_string(sizes, parts, kept, text):
    transcript = Transcript(MARKED, 1, ["<|im_end|>"])
    seen, ended = 0, None
    for part in rounds(spell(MARKED, *parts), sizes):
        ended = transcript(0, part)
        if ended is not None:
            break
        seen += len(part)
    assert (None if ended is None else seen + ended) == kept
    assert transcript.take(0, last=True) == text


def test_decoding_ends_at_a_special_token():
    model = tiny(vocabulary=len(MARKED))
    options = {"max_new_tokens": 6, "tokenizer": MARKED, "controls": Controls(logit_bias={MARK: 99.0})}
    for stops in ("<|im_end|>", ["<|im_end|>"]):
        done = generate(model, None, PROMPTS, stop_strings=stops, **options)
        assert (done.tokens, done.text, done.finish) == ([[MARK]] * 2, ["", ""], [Finish.STOP] * 2)


@pytest.mark.parametrize("stop", ["<|im_end|>\n", "a<|im_end|>"])
def test_a_special_token_within_a_stop_string_is_refused(stop):
    with pytest.raises(ValueError, match=rf"holds the special token '<|im_end|>'.*or its id {MARK} in eos_token_ids"):
        Transcript(MARKED, 1, ["END", stop])


@pytest.mark.parametrize("count", [0, 1, 4])
def test_decoding_ends_at_the_string_that_plain_text_has(target, count):
    """Every pair of signs of the free text as a stop string: ids, text, reasons and counts are cut together."""
    draft = Draft(perturbed(target, 0.02)) if count else None
    free = generate(target, None, PROMPTS, max_new_tokens=16, tokenizer=TOKENIZER)
    assert free.text == [TOKENIZER.decode(row) for row in free.tokens]
    for place in range(0, min(map(len, free.text)) - 2, 3):
        stop = free.text[0][place : place + 2]
        if "�" in stop:
            continue
        done = generate(
            target,
            draft,
            PROMPTS,
            max_new_tokens=16,
            num_draft_tokens=count,
            tokenizer=TOKENIZER,
            stop_strings=[stop],
            log_probs=True,
        )
        for row in range(2):
            at = free.text[row].find(stop)
            assert done.finish[row] is (Finish.LENGTH if at < 0 else Finish.STOP)
            assert done.text[row] == (free.text[row] if at < 0 else free.text[row][:at])
            assert done.tokens[row] == free.tokens[row][: len(done.tokens[row])]
            assert done.acceptance[row].emitted == len(done.tokens[row])
            assert len(done.log_probs[row]) == len(done.tokens[row])
            if at >= 0:
                assert stop in TOKENIZER.decode(done.tokens[row])
                assert stop not in TOKENIZER.decode(done.tokens[row][:-1])


@pytest.mark.parametrize("stops", [[], ["a"], ["he", "\n"]])
def test_a_stream_put_together_is_the_result(target, stops):
    draft = Draft(perturbed(target, 0.02))
    options = {"max_new_tokens": 24, "tokenizer": TOKENIZER, "stop_strings": stops, "eos_token_ids": [5]}
    done = generate(target, draft, PROMPTS, **options)
    tokens, texts, finish = [[], []], ["", ""], [None, None]
    for piece in stream(target, draft, PROMPTS, **options):
        assert finish[piece.row] is None  # nothing comes after the end
        assert piece.tokens
        tokens[piece.row] += piece.tokens
        texts[piece.row] += piece.text
        finish[piece.row] = piece.finish
    assert (tokens, texts, finish) == (done.tokens, done.text, done.finish)


def test_one_stop_string_is_a_list_of_one(target):
    options = {"max_new_tokens": 24, "tokenizer": TOKENIZER}
    text = generate(target, None, PROMPTS, **options).text[0]
    stop = next(text[place : place + 2] for place in range(4, len(text)) if "�" not in text[place : place + 2])
    one, listed = (generate(target, None, PROMPTS, stop_strings=stops, **options) for stops in (stop, [stop]))
    assert (one.tokens, one.text, one.finish) == (listed.tokens, listed.text, listed.finish)
    assert one.text[0] == text[: text.index(stop)]


def test_a_stream_can_be_closed(target):
    pieces = stream(target, None, PROMPTS, max_new_tokens=24)
    first = next(pieces)
    pieces.close()
    assert list(pieces) == []
    assert first.tokens == decode(target, [PROMPTS[first.row]], max_new_tokens=1).tokens[0]


def test_the_earliest_event_ends_a_row(target):
    free = generate(target, None, [PROMPTS[0]], max_new_tokens=24, tokenizer=TOKENIZER)
    [row], [text] = free.tokens, free.text
    first = {sign: next(n for n in range(1, 25) if sign in TOKENIZER.decode(row[:n])) for sign in set(text) - {"�"}}
    stop, at = max(first.items(), key=lambda item: item[1])
    assert at > 2
    options = {"max_new_tokens": 24, "tokenizer": TOKENIZER, "stop_strings": [stop]}
    before, never = next(t for t in row[: at - 1] if t != row[at - 1]), next(t for t in range(SIZE) if t not in row)
    cases = [([never], 24, Finish.STOP, at), ([before], 24, Finish.EOS, row.index(before) + 1)]
    cases += [([row[at - 1]], 24, Finish.EOS, at), ([never], at - 1, Finish.LENGTH, at - 1)]
    for eos, budget, reason, length in cases:
        done = generate(target, None, [PROMPTS[0]], **options | {"eos_token_ids": eos, "max_new_tokens": budget})
        assert (done.finish, done.tokens) == ([reason], [row[:length]])

import hashlib

import pytest

from data.prompts import CorpusError, prompt


def test_the_id_is_a_hash_of_source_kind_and_text():
    p = prompt("email", "write", "Grüße")
    assert p.id == hashlib.sha256('["email","write","Grüße"]'.encode()).hexdigest()[:16]
    assert (p.source, p.kind, p.text) == ("email", "write", "Grüße")


@pytest.mark.parametrize("other", [("b", "k", "t"), ("a", "l", "t"), ("a", "k", "u"), ("ak", "", "t")])
def test_the_id_differs_when_any_part_differs(other):
    assert prompt("a", "k", "t").id != prompt(*other).id


def test_a_corpus_error_is_a_value_error():
    assert issubclass(CorpusError, ValueError)

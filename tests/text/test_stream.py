"""Streams and whole answers are one machine: whole characters, nothing of a stop string, pieces that are tokens."""
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.text.stream import Stream, render, text_of
from hetero.text.tokenizer import ALPHABET


def run(tok, ids, stop=(), every=1, **more):
    """Chunks of pieces as a client would get them, and whether a stop string ended them."""
    stream, chunks = Stream(tok, stop, **more), []
    for n, i in enumerate(ids):
        ended = stream.see(i)
        if n % every == 0:
            chunks.append(stream.take())
        if ended:
            break
    return [c for c in [*chunks, stream.finish()] if c], stream


@pytest.fixture(scope="module")
def byte_tok(make_tok):
    return make_tok(specials=["<|end|>"], plain=["<think>"], words=["DEF", "G", "HI", "J", ".\n", "User", ":"], ends=["<|end|>"])


def test_characters_split_over_tokens_arrive_whole(byte_tok):
    text = "😀é漢x"
    chunks, _ = run(byte_tok, list(text.encode()))
    assert [text_of(c) for c in chunks] == list(text)
    assert all("\ufffd" not in text_of(c) for c in chunks)


def test_a_broken_character_is_flushed_within_one_rune_and_at_the_end(byte_tok):
    chunks, _ = run(byte_tok, [0xF0, 0x9F, 0x41, 0xE6, 0xBC])
    assert [text_of(c) for c in chunks] == ["\ufffdA", "\ufffd"]


def ids_of(tok, *words):
    letters = {b: c for c, b in ALPHABET.items()}
    return [tok.id_of("".join(letters[b] for b in w.encode())) for w in words]


def test_nothing_of_a_stop_string_is_shown(byte_tok):
    chunks, stream = run(byte_tok, ids_of(byte_tok, "a", "DEF", "G", "HI", "J", "b"), stop=["DEFGHIJ"])
    assert "".join(map(text_of, chunks)) == "a" and stream.stopped == "DEFGHIJ" and stream.tokens == 5


def test_a_stop_that_begins_inside_a_token_keeps_the_token_s_first_part(byte_tok):
    chunks, _ = run(byte_tok, ids_of(byte_tok, "a", ".\n", "User", ":"), stop=["\nUser:"])
    pieces = [p for c in chunks for p in c]
    assert [p.text for p in pieces] == ["a", "."] and [p.data for p in pieces] == [b"a", b"."]


def test_a_stop_that_fails_late_is_released(byte_tok):
    chunks, stream = run(byte_tok, ids_of(byte_tok, "DEF", "G", "HI", "a"), stop=["DEFGHIJ"])
    assert [text_of(c) for c in chunks] == ["DEFGHIa"] and stream.stopped is None


def test_the_earliest_stop_wins_and_of_two_at_one_place_the_longest(byte_tok):
    assert render(byte_tok, list(b"xxabc"), stop=["c", "abc"]) == "xx"
    assert run(byte_tok, ids_of(byte_tok, "a", "DEF"), stop=["DE", "DEF"])[1].stopped == "DEF"


def test_special_tokens_are_hidden_and_can_be_stops(byte_tok):
    end = byte_tok.id_of("<|end|>")
    assert render(byte_tok, [97, end, 98]) == "ab"
    chunks, stream = run(byte_tok, [97, end, 98], stop=["<|end|>"])
    assert "".join(map(text_of, chunks)) == "a" and stream.stopped == "<|end|>"
    assert run(byte_tok, [97, 0xF0, end], stop=["<|end|>"])[0][-1][-1].text == "\ufffd"


def test_no_stop_counts_before_min_tokens(byte_tok):
    assert "".join(map(text_of, run(byte_tok, list(b"a.b.c"), stop=["."], min_tokens=3)[0])) == "a.b"


def test_a_fork_goes_its_own_way(byte_tok):
    stream = Stream(byte_tok, ["abc"])
    for i in b"xa\xf0":
        stream.see(i)
    twin = stream.fork()
    assert not stream.see(0x9F) and not twin.see(ord("y"))
    assert text_of(twin.take() + twin.finish()) == "xa\ufffdy"
    assert text_of(stream.take() + stream.finish()) == "xa\ufffd"


def naive(data: bytes, stops):
    """What the text must be: bytes up to the stop that completes first."""
    for n in range(1, len(data) + 1):
        found = [data[:n].find(s.encode()) for s in stops if s.encode() in data[:n]]
        if found:
            return data[: min(found)].decode("utf-8", "replace")
    return data.decode("utf-8", "replace")


@given(data=st.lists(st.sampled_from([b"a", b"b", b"c", b",", "é".encode(), "😀".encode(), b"\xf0", b"\x9f"]), max_size=30),
       stops=st.lists(st.text("abc,é😀", min_size=1, max_size=4), max_size=3), every=st.integers(1, 7))
def test_any_chunking_gives_the_text_of_the_whole(byte_tok, data, stops, every):
    ids = list(b"".join(data))
    chunks, _ = run(byte_tok, ids, stops, every)
    text = "".join(map(text_of, chunks))
    assert text == render(byte_tok, ids, stops) == naive(bytes(ids), stops)
    pieces = [p for c in chunks for p in c]
    assert b"".join(p.data for p in pieces).decode("utf-8", "replace") == text
    assert [p.token for p in pieces] == ids[: len(pieces)]
    for c in chunks:                      # a chunk's tokens and text are the same thing
        assert b"".join(p.data for p in c).decode("utf-8", "replace") == text_of(c)

"""Input lines: what is a row, what is wrong with what is none."""
import gzip
import json

import pytest

from hetero.batch.keys import Keys
from hetero.batch.rows import MAX_LINE_BYTES, Misread, key_of, parse, read_lines
from hetero.errors import BadRequest

CHAT = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": []}}


def rows(tmp_path, data: bytes):
    path = tmp_path / "in.jsonl"
    path.write_bytes(data)
    return list(read_lines(path))


def test_blank_lines_marks_crlf_and_a_missing_newline_do_no_harm(tmp_path):
    found = rows(tmp_path, b'\xef\xbb\xbf{"prompt":"a"}\r\n\r\n  \n{"prompt":"b"}\n\n{"prompt":"c"}')
    assert [(r.turn, r.number, parse(r).body["prompt"]) for r in found] == [(0, 1, "a"), (1, 4, "b"), (2, 6, "c")]


def test_gzip_is_known_by_its_bytes_and_a_cut_one_is_refused(tmp_path):
    data = gzip.compress(json.dumps({"prompt": "a"}).encode() * 1)
    assert parse(rows(tmp_path, data)[0]).body == {"prompt": "a"}
    with pytest.raises(BadRequest, match="cannot be read beyond line"):
        rows(tmp_path, gzip.compress(b'{"prompt": "abc"}\n' * 9000)[:-20])


def test_a_line_beyond_the_limit_is_bad_and_the_next_is_read(tmp_path):
    found = rows(tmp_path, b'{"prompt":"' + b"x" * (2 * MAX_LINE_BYTES + 5) + b'"}\n{"prompt":"b"}\n')
    with pytest.raises(Misread, match="longer than 16 MiB"):
        parse(found[0])
    assert (found[1].number, parse(found[1]).id) == (2, "row-2")


def test_short_rows_take_their_line_as_id_unless_they_bring_one(tmp_path):
    found = [parse(r) for r in rows(tmp_path, b'{"prompt":"a"}\n{"messages":[],"id":"x"}\n{"prompt":"a","id":7,"top_k":3}\n')]
    assert [(r.id, r.url, r.short, r.body) for r in found] == [
        ("row-1", "/v1/completions", True, {"prompt": "a"}), ("x", "/v1/chat/completions", True, {"messages": []}),
        ("7", "/v1/completions", True, {"prompt": "a", "top_k": 3})]


@pytest.mark.parametrize(("line", "param", "words"), [
    (b"{", None, "not JSON"), (b"[1]", None, "not an object"), (b"\xff{}", None, "not UTF-8"), (b'{"prompt": NaN}', None, "NaN"),
    (b"[" * 100_000, None, "not JSON"), (b"{}", None, "neither"), (b'{"prompt":"a","messages":[]}', None, "both"),
    (b'{"prompt":"a","stream":true}', "stream", "whole answers"), (b'{"prompt":"a","id":""}', "id", "1 to 512"), (b'{"prompt":"a","id":true}', "id", "1 to 512"),
    (json.dumps({**CHAT, "custom_id": None}).encode(), "custom_id", "missing"), (json.dumps({**CHAT, "custom_id": 3}).encode(), "custom_id", "text"),
    (json.dumps({**CHAT, "method": "GET"}).encode(), "method", "POST"), (json.dumps({**CHAT, "url": "/v1/embeddings"}).encode(), "url", "/v1/embeddings"),
    (json.dumps({"custom_id": "a", "body": {}}).encode(), "url", "missing"), (json.dumps({**CHAT, "body": []}).encode(), "body", "object"),
    (json.dumps({**CHAT, "body": {"stream": True}}).encode(), "body.stream", "whole answers")])
def test_what_is_no_row_is_named_by_field(tmp_path, line, param, words):
    with pytest.raises(Misread) as found:
        parse(rows(tmp_path, line + b"\n")[0])
    assert found.value.param == param and words in str(found.value)


def test_keys_find_repeats_and_members():
    keys = Keys(key_of(i, 0) for i in ["a", "b", "a", "c", "b", "a"])
    assert keys.first().tolist() == [0, 1, 0, 3, 1, 0]
    assert keys.within(Keys([key_of("c", 0), key_of("b", 0)])).tolist() == [False, True, False, True, True, False]
    assert Keys().first().tolist() == [] and Keys().within(keys).tolist() == [] and keys.within(Keys()).tolist() == [False] * 6
    assert key_of(None, 3) != key_of("line 3", 0)

"""A batch from input to exit code, over a scripted engine."""
import errno
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hetero.batch import journal
from hetero.batch.desk import Wanted, seed_of
from hetero.batch.progress import Meter, Progress
from hetero.batch.run import check
from hetero.engine.scripted import Script
from hetero.errors import BadOption, BadRequest, EngineFailed, NotWritable

HI = [{"role": "user", "content": "hi"}]


def openai(id, url="/v1/chat/completions", **body):
    return {"custom_id": id, "method": "POST", "url": url, "body": {"messages": HI, **body} if "chat" in url else body}


def many(n):
    return [{"id": f"r{i}", "prompt": f"Once upon a time there were {i % 7} cats and {i} dogs", "max_tokens": 20} for i in range(n)]


def test_each_kind_of_row_gets_its_own_kind_of_answer(place):
    place.write([openai("a"), openai("b", "/v1/completions", prompt=["x", "y"], n=2, max_tokens=4), openai("c", "/v1/responses", input="hello"),
                 {"prompt": "Once"}, {"messages": HI, "id": "e", "logprobs": True, "top_logprobs": 1}])
    assert place.run() == 0 and place.bad.read_text() == ""
    found = {line["custom_id"]: line for line in place.lines()}
    assert set(found) == {"a", "b", "c", "row-4", "e"} and all(line["error"] is None and line["response"]["status_code"] == 200 for line in found.values())
    body = {id: line["response"]["body"] for id, line in found.items()}
    assert body["a"]["object"] == "chat.completion" and body["a"]["choices"][0]["finish_reason"] == "stop" and body["a"]["usage"]["completion_tokens"] == 11
    assert [c["index"] for c in body["b"]["choices"]] == [0, 1, 2, 3] and body["b"]["choices"][0]["finish_reason"] == "length"
    assert body["c"]["object"] == "response" and body["c"]["status"] == "completed" and body["c"]["output"][0]["content"][0]["text"]
    assert len(body["e"]["choices"][0]["logprobs"]["content"]) == 11 and body["row-4"]["choices"][0]["finish_reason"] == "stop"
    assert {r.sampling.seed for r in place.asked} == {seed_of(0, id) for id in found}
    assert len({line["id"] for line in found.values()}) == 5 and all(line["response"]["request_id"].startswith("req_") for line in found.values())


def test_bad_rows_go_to_the_error_file_with_line_and_field_and_good_ones_run(place):
    place.write([openai("a"), openai("a"), "{", openai("b", temperature=-1), openai("c", model="gpt-4"), {"prompt": "x " * 600}, openai("d", messages=3),
                 openai("e", response_format={"type": "json_schema", "json_schema": {"schema": {"uniqueItems": True}}}), openai("f", stream=True)])
    assert place.run() == 3
    assert [line["custom_id"] for line in place.lines()] == ["a"]
    errors = {line["error"]["line"]: (line["custom_id"], line["error"]["code"], line["error"]["param"], line["response"]["status_code"]) for line in place.lines(place.bad)}
    assert errors == {2: ("a", "duplicate_id", "custom_id", 400), 3: (None, "invalid_request", None, 400), 4: ("b", "invalid_request", "temperature", 400),
                      5: ("c", "invalid_request", "model", 400), 6: ("row-6", "context_length_exceeded", "prompt", 400), 7: ("d", "invalid_request", "messages", 400),
                      8: ("e", "invalid_request", "response_format", 400), 9: ("f", "invalid_request", "body.stream", 400)}
    assert place.run(resume=True) == 3 and place.runs == 1, "nothing is left to run"


def test_abort_runs_nothing_and_leaves_no_files(place):
    place.write([openai("a"), "{"])
    with pytest.raises(BadRequest, match="1 of 2 rows are bad"):
        place.run(on_error="abort")
    assert not place.runs and not place.out.exists() and not place.bad.exists()


def test_check_tells_every_bad_line(place):
    place.write([openai("a"), openai("a"), openai("b", top_p=7), ""])
    found = []
    survey = check(str(place.input), None, place.options, Wanted(), lambda fault: found.append(fault.text("in")))
    assert (survey.rows, survey.bad) == (3, 2) and survey.prompt_tokens > 0
    assert found == ["in:3: top_p is 7.0, but must be a number from 0 to 1", "in:2: custom_id: its id is that of line 1 too"]


def test_order_and_form_of_the_input_change_no_answer(place, tmp_path):
    place.write(many(60))
    assert place.run() == 0
    texts = place.texts()
    place.out.unlink()
    place.write(many(60), "gzip")
    assert place.run(order="input", window=8) == 0
    assert list(place.texts()) == [f"r{i}" for i in range(60)] and place.texts() == texts


def test_prompts_that_share_a_beginning_run_together(place):
    place.write(many(40))
    assert place.run() == 0
    prompts = list(dict.fromkeys(r.prompt for r in place.asked))
    assert prompts == sorted(prompts)


class Killed(BaseException):
    pass


def dying(place, after):
    """The crew, killed at its n-th new request: nothing of it is flushed."""
    def script(request):
        if len({r.id for r in place.asked}) > after:
            raise Killed
        return type(place).script(place, request)
    return script


def test_killed_anywhere_and_resumed_every_row_is_there_once_and_equal(place, monkeypatch):
    place.write([*many(50), "{"])
    assert place.run() == 3
    texts, bad = place.texts(), place.lines(place.bad)
    place.out.unlink(), place.bad.unlink()
    monkeypatch.setattr(journal, "GROUP_ROWS", 3)
    for resume, after in enumerate((9, 20, 5, 17)):
        place.asked.clear()
        place.script = dying(place, after)
        with pytest.raises(Killed):
            place.run(resume=resume > 0)
        with place.out.open("ab") as file:
            file.write(b'{"id": "torn')
    del place.script
    place.asked.clear()
    assert place.run(resume=True) == 3
    assert place.texts() == texts and len(place.lines()) == 50 and place.lines(place.bad) == bad
    assert len(place.asked) < 50 * 11, "what was finished did not run again"


def test_a_batch_that_differs_is_refused_by_what_differs(place):
    place.write(many(4))
    assert place.run(seed=3) == 0
    with pytest.raises(BadOption, match="has rows already"):
        place.run()
    place.write([*many(4), {"prompt": "more"}])
    with pytest.raises(BadOption, match=r"input\.sha256 was '\w+' and is '\w+'"):
        place.run(resume=True)
    place.write(many(4))
    with pytest.raises(BadOption, match="another batch than this one: seed was 3 and is 4"):
        place.run(resume=True, seed=4)
    with pytest.raises(BadOption, match=r"deterministic was False and is True.*|formats\.experts"):
        place.run(resume=True, options=place.options.with_values("argument", deterministic=True))
    with pytest.raises(BadOption, match=r"sampling\.temperature was 0\.7 and is 0\.1"):
        place.run(resume=True, wanted=Wanted(sampling={"temperature": 0.1}))
    (place.folder / "out.jsonl.manifest.json").unlink()
    with pytest.raises(BadOption, match="no manifest"):
        place.run(resume=True)


def test_failed_rows_run_again_when_asked(place):
    place.write(many(6))
    scripts = type(place).script
    place.script = lambda request: Script((300,), fault_at=0) if b"3 dogs" in place.bytes(request) else scripts(place, request)
    from hetero.text import tokenizer
    from hetero.weights.source import EMBEDDED
    tok = tokenizer.read(EMBEDDED)
    place.bytes = lambda request: tok.decode(list(request.prompt)).encode()
    assert place.run() == 3
    [failed] = place.lines(place.bad)
    assert failed["custom_id"] == "r3" and failed["response"]["status_code"] == 500 and failed["error"]["code"] == "server_error"
    assert place.run(resume=True) == 3 and place.runs == 1
    del place.script
    assert place.run(resume=True, retry_errors=True) == 0
    assert sorted(place.texts()) == [f"r{i}" for i in range(6)] and place.bad.read_text() == ""
    assert len(place.lines(place.folder / "out.errors.jsonl.1")) == 1


def test_an_engine_that_fails_ends_the_batch_and_no_row(place):
    place.write(many(20))
    place.script = lambda request: Script((300, 2), fault_at=0, fault=EngineFailed("the team is lost")) if len(place.asked) > 60 else type(place).script(place, request)
    with pytest.raises(EngineFailed, match="the team is lost"):
        place.run()
    assert place.bad.read_text() == "" and 0 < len(place.lines()) < 20
    del place.script
    assert place.run(resume=True) == 0 and len(place.texts()) == 20


@pytest.mark.parametrize(("signals", "least"), [(1, 8), (2, 0)])
def test_a_signal_drains_and_a_second_stops(place, signals, least):
    place.write(many(100))

    def script(request):
        if len(place.asked) == 30:
            for _ in range(signals):
                os.kill(os.getpid(), signal.SIGINT)
        return type(place).script(place, request)
    place.script = script
    assert place.run() == 130
    assert least <= len(place.lines()) < 60
    del place.script
    assert place.run(resume=True) == 0 and len(place.texts()) == 100


def test_check_reads_a_pipe(place):
    """/dev/stdin of a pipe can be read once and not wound back."""
    done = subprocess.run([sys.executable, "-m", "hetero", "batch", "check", "-"], input=b'{"prompt": "hi"}\n{"prompt": 3}\n', capture_output=True)
    assert done.returncode == 3 and b"-:2: prompt: " in done.stdout + done.stderr and b"2 rows, 1 bad" in done.stdout + done.stderr


def test_stdin_is_kept_until_the_batch_is_finished(place, monkeypatch):
    place.write(many(10))
    data = place.input.read_bytes()
    place.input = "-"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    place.script = dying(place, 4)
    with pytest.raises(Killed):
        place.run()
    assert (place.folder / "out.jsonl.stdin").read_bytes() == data
    del place.script
    assert place.run(resume=True) == 0 and len(place.texts()) == 10
    assert not (place.folder / "out.jsonl.stdin").exists()


def test_a_full_disk_ends_with_a_clear_error_and_loses_nothing(place, monkeypatch):
    place.write(many(30))
    write, left = os.write, [3000]

    def full(fd, data):
        if left[0] < len(data):
            raise OSError(errno.ENOSPC, "No space left on device")
        left[0] -= len(data)
        return write(fd, data)
    monkeypatch.setattr(journal, "GROUP_ROWS", 2)
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(NotWritable, match=r"out\.jsonl: No space left on device; what was finished before is kept"):
        place.run()
    kept = place.texts()
    monkeypatch.setattr(os, "write", write)
    assert 0 < len(kept) < 30 and place.run(resume=True) == 0
    assert len(place.lines()) == 30 and kept.items() <= place.texts().items()


def test_an_output_that_cannot_be_written_is_said_before_anything_runs(place):
    place.write(many(3))
    place.out = place.folder / "nowhere" / "out.jsonl"
    with pytest.raises(BadOption, match="no such folder"):
        place.run()
    place.out = place.input
    with pytest.raises(BadOption, match="different files"):
        place.run()
    for name in ("/sys/out.jsonl", str(place.folder / ("x" * 300))):
        place.out = Path(name)
        with pytest.raises(NotWritable, match=r"out\.jsonl: |File name too long"):
            place.run()
    assert not place.runs


def test_progress_says_rows_rates_hits_and_time_left():
    meter = Meter(100, 10, 38, 2, 1000, 250, 4000, 8, 5.0)
    meter.began_s -= 10
    lines, data = io.StringIO(), io.StringIO()
    Progress(meter, "lines", lines).tick(last=True)
    Progress(meter, "json", data).tick(last=True)
    assert lines.getvalue() == "50 of 100 rows, prompt 100 tok/s, generated 400 tok/s, prefix hits 25%, 50% of the ceiling, 2 failed, 0:00:12 left\n"
    assert json.loads(data.getvalue()) == {"rows": 100, "done": 50, "failed": 2, "running": 8, "prompt_tok_s": 100.0, "generated_tok_s": 400.0, "eta_s": 12.5,
                                           "cache_hits": 0.25, "of_ceiling": 0.5, "elapsed_s": 10.0}
    quiet = Progress(meter, "lines", io.StringIO())
    quiet.tick()
    assert quiet.to.getvalue() == ""
    with pytest.raises(BadOption, match="known: auto, bar"):
        Progress(meter, "dots")

"""A conversation on a terminal, driven through a fake model and a fake keyboard."""
import json
import os
import signal

import pytest

from hetero.chat import HELP, Console, Talk, once, read_value, safe, terminal
from hetero.errors import BadRequest, ContextExceeded
from hetero.request import Sampling
from hetero.text.reply import Chunk, Timings
from hetero.text.stream import Piece


class Parrot:
    """Says what it was told, word by word; records what it was asked."""
    name, sampling = "parrot", Sampling()

    def __init__(self, hurt=None, interrupt_at=None):
        self.asked, self.closed, self.hurt, self.interrupt_at = [], 0, hurt, interrupt_at

    def stream(self, prompt, sampling=None):
        self.asked.append((list(prompt), sampling))
        if isinstance(self.hurt, Exception):
            raise self.hurt
        words = prompt[-1]["content"].split()
        try:
            for i, w in enumerate(words):
                if i == self.interrupt_at:
                    os.kill(os.getpid(), signal.SIGINT)
                last = i == len(words) - 1
                finish = ("error" if self.hurt else "stop") if last else None
                yield Chunk(0, (Piece(i, w.encode(), w + " "),), (), finish, self.hurt if last else None, Timings(5, 0, i + 1, 0.5, 1.0))
        finally:
            self.closed += 1


def talk_to(model, *lines):
    """Types the lines; an exception among them is raised in place of a line."""
    typed = iter([*lines, EOFError()])

    def ask():
        line = next(typed)
        if isinstance(line, BaseException):
            raise line
        return line
    talk = Talk(model.sampling)
    assert Console(model, talk, ask).run() == 0
    return talk


def test_a_conversation_grows_and_answers_go_to_stdout(capsys):
    talk = talk_to(Parrot(), "hello there", "", "again")
    out = capsys.readouterr()
    assert out.out == "hello there \nagain \n"
    assert "[2 tokens, 2.0 tok/s, first after 0.50 s; prompt 5 tokens]" in out.err
    assert [m["content"] for m in talk.messages] == ["hello there", "hello there ", "again", "again "]


def test_ctrl_c_stops_the_answer_and_not_the_program(capsys):
    model = Parrot(interrupt_at=2)
    talk = talk_to(model, "one two three four", KeyboardInterrupt(), "/stats")
    out = capsys.readouterr()
    assert out.out == "one two \n" and "stopped" in out.err and "(Ctrl-D leaves)" in out.err
    assert model.closed == 1 and talk.messages[-1]["content"] == "one two "
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_just_before_an_answer_stops_it_and_just_before_a_prompt_does_nothing(capsys):
    model, typed = Parrot(), iter(["one two", "three four"])

    def ask():
        line = next(typed, None)
        os.kill(os.getpid(), signal.SIGINT)
        if line is None:
            raise EOFError
        return line
    talk = Talk(model.sampling)
    assert Console(model, talk, ask).run() == 0
    assert capsys.readouterr().err.count("stopped") == 2 and model.closed == 2
    assert [m["content"] for m in talk.messages] == ["one two", "", "three four", ""]


def test_a_second_ctrl_c_in_one_answer_leaves():
    class Deaf(Parrot):
        def stream(self, prompt, sampling=None):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            yield from super().stream(prompt, sampling)
    with pytest.raises(KeyboardInterrupt):
        talk_to(Deaf(), "one two")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_commands_do_what_they_say(capsys, tmp_path):
    model = Parrot()
    kept = tmp_path / "täglich.json"
    talk = talk_to(model, "/system be kind", "a b", "/regen", f"/save {kept}", "/reset", f"/load {kept}", "/set temperature 0.5", "/set seed 3", "/regen", "/stats", "/help", "/exit", "never said")
    assert talk.system == "be kind" and len(model.asked) == 3
    assert model.asked[0][0] == model.asked[1][0] == [{"role": "system", "content": "be kind"}, {"role": "user", "content": "a b"}]
    assert model.asked[2][1].temperature == 0.5 and model.asked[2][1].seed == 4
    assert [m["role"] for m in json.loads(kept.read_text())["messages"]] == ["system", "user", "assistant"]
    err = capsys.readouterr().err
    assert "parrot: 3 answers" in err and HELP in err


@pytest.mark.parametrize("line, words", [("/sytem x", "nearest: /system"), ("/xyzzy", "/help lists"), ("/save", "needs a file"), ("/load /nowhere/x.json", "No such file"), ("/save /nowhere/x.json", "No such file"),
                                         ("/set temprature 1", "nearest: temperature"), ("/set top_k many", "top_k cannot be 'many'"), ("/regen", "nothing to answer")])
def test_a_wrong_command_is_one_line_and_changes_nothing(capsys, line, words):
    talk = talk_to(Parrot(), line)
    assert words in capsys.readouterr().err and talk.messages == [] and talk.sampling == Sampling()


@pytest.mark.parametrize("text", ["{", "[]", '{"messages": [{"role": 1}]}', '{"messages": 3}'])
def test_a_file_that_is_no_conversation_is_refused(capsys, tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    assert talk_to(Parrot(), "keep", f"/load {tmp_path / 'x.json'}").messages[0]["content"] == "keep"
    assert "not a kept conversation" in capsys.readouterr().err


def test_a_refused_message_leaves_the_conversation_as_it_was(capsys):
    talk = talk_to(Parrot(hurt=ContextExceeded("the prompt has 99 tokens, the context holds 64", "shorten it")), "far too long")
    assert talk.messages == [] and "error: the prompt has 99 tokens" in capsys.readouterr().err


def test_a_failed_answer_says_why(capsys):
    talk_to(Parrot(hurt="NaN in layer 3"), "hi")
    assert "error: NaN in layer 3" in capsys.readouterr().err


def test_long_messages_are_typed_over_several_lines():
    model = Parrot()
    talk_to(model, "a\\", "b", '"""c', "d", '"""')
    assert [asked[-1]["content"] for asked, _ in model.asked] == ["a\nb", "c\nd"]


def test_an_answer_cannot_drive_the_terminal():
    assert safe("a\x1b[2J\x07b\r\n\tc\x9b") == "a\ufffd[2J\ufffdb\ufffd\n\tc\ufffd"


def test_one_answer_goes_to_stdout_alone(capsys):
    assert once(Parrot(), Talk(Sampling()), "x y") == 0
    out = capsys.readouterr()
    assert out.out == "x y \n" and "tok/s" in out.err
    assert once(Parrot(hurt="bad"), Talk(Sampling()), "x y") == 1
    assert once(Parrot(interrupt_at=1), Talk(Sampling()), "x y z") == 130


def test_values_are_read_as_their_kind():
    assert [read_value("temperature", "1"), read_value("top_k", "5"), read_value("ignore_eos", "on"), read_value("seed", "none")] == [1.0, 5, True, None]
    with pytest.raises(BadRequest, match="seed"):
        read_value("seed", "x")


def test_a_history_that_cannot_be_kept_is_said(capsys, tmp_path):
    (tmp_path / "file").touch()
    from prompt_toolkit.application import create_app_session
    from prompt_toolkit.input import DummyInput
    from prompt_toolkit.output import DummyOutput
    with create_app_session(input=DummyInput(), output=DummyOutput()):
        terminal(tmp_path / "file" / "history")
        terminal(tmp_path / "state" / "history")
    assert "no history is kept" in capsys.readouterr().err
    assert (tmp_path / "state" / "history").stat().st_mode & 0o777 == 0o600


def test_keys_edit_a_message_on_a_terminal(tmp_path):
    from prompt_toolkit.application import create_app_session
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        ask = terminal(tmp_path / "history")
        keys.send_text("one\x1b\rtwo\r")
        assert ask() == "one\ntwo"
        keys.send_text("\x04")
        with pytest.raises(EOFError):
            ask()
    assert "+one" in (tmp_path / "history").read_text()

"""The door answers at once, turns faults into one line and a code, and names what was asked wrongly."""
import codecs
import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from hetero import cli, report
from hetero.errors import BadCheckpoint, BadOption, BadRequest
from hetero.request import Sampling
from hetero.text.reply import Answer, Chunk, Timings
from hetero.text.stream import Piece
from hetero.weights.source import EMBEDDED


def test_help_and_version_load_nothing_heavy():
    code = "import sys; from hetero.cli import parser; parser().format_help(); print([m for m in ('torch', 'numpy', 'numba', 'transformers', 'jinja2') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
    with pytest.raises(SystemExit) as left:
        cli.main(["--version"])
    assert left.value.code == 0


@pytest.mark.parametrize("fault, code, words", [
    (BadOption("--ctx: no", "say yes"), 2, "error: --ctx: no\n\nhint: say yes"), (BadRequest("prompt too long", "cut it"), 2, "prompt too long"), (BadCheckpoint("x: cut", "again"), 1, "error: x: cut"),
    (KeyboardInterrupt(), 130, "stopped"), (BrokenPipeError(), 141, ""), (ZeroDivisionError("oh"), 1, "error: ZeroDivisionError: oh")])
def test_faults_become_one_line_and_a_code(monkeypatch, capsys, fault, code, words):
    def fail(args):
        raise fault
    monkeypatch.setattr(cli, "run_doctor", fail)
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    assert cli.main(["doctor"]) == code
    err = capsys.readouterr().err
    assert words in err and "Traceback" not in err
    if isinstance(fault, ZeroDivisionError):
        cli.main(["doctor", "--debug"])
        assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("port", ["99999", "-1", "http"])
def test_a_port_that_is_none_is_said_so_before_anything_loads(port, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["serve", "--port", port])
    assert f"{port} is no port: a number from 0 to 65535" in capsys.readouterr().err


def test_a_first_start_says_once_that_it_compiles(monkeypatch, capsys):
    watching = []
    monkeypatch.setattr(report, "watch_compiles", watching.append)
    report.announce_compiles()
    watching[0]("cpu_kernels.linear.job")
    watching[0]("cpu_kernels.routed.job")
    assert capsys.readouterr().err == "compiling the kernels for this CPU: at the first start only, for about half a minute\n"


def test_no_command_is_help_and_asked_wrongly(capsys):
    assert cli.main([]) == 2 and "doctor" in capsys.readouterr().err
    with pytest.raises(SystemExit) as left:
        cli.main(["docter"])
    assert left.value.code == 2


def test_doctor_prints_json(monkeypatch, capsys, tmp_path):
    from hetero import doctor
    monkeypatch.setattr(doctor, "kernels", list)
    assert cli.main(["doctor", "--json", "--cache-dir", str(tmp_path)]) in (0, 1)
    assert {r["section"] for r in json.loads(capsys.readouterr().out)["rows"]} >= {"cpu", "gpu"}


class Fake:
    """A model that says its prompt back."""
    name, sampling, template = "fake", Sampling(temperature=0.3), object()
    source = SimpleNamespace(embedded=False)

    def __init__(self):
        self.asked, self.closed = [], False

    def stream(self, prompt, sampling=None):
        self.asked.append((prompt, sampling))
        text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        yield Chunk(0, (Piece(1, text.encode(), text),), (), "stop", None, Timings(3, 0, 1, 0.1, 0.1))

    def generate(self, prompt, sampling=None):
        self.asked.append((prompt, sampling))
        return [Answer(text="é", token_ids=[1, 2], finish_reason="stop", seed=9, timings=Timings(3, 1, 2, 0.5, 1.0))]

    def close(self):
        self.closed = True


@pytest.fixture
def fake(monkeypatch):
    made = Fake()
    monkeypatch.setattr(cli, "open_model", lambda name, options: made)
    return made


def test_generate_prints_the_answer_or_json(fake, capsys, monkeypatch):
    assert cli.main(["generate", "Once", "--stop", "a", "--stop", "b", "--top-k", "4"]) == 0
    assert capsys.readouterr().out == "Once\n" and fake.closed
    assert fake.asked[0] == ("Once", Sampling(temperature=0.3, top_k=4, stop=("a", "b")))
    monkeypatch.setattr(sys, "stdin", io.StringIO("piped"))
    assert cli.main(["generate", "--json", "--chat", "--ignore-eos"]) == 0
    assert fake.asked[1] == ([{"role": "user", "content": "piped"}], Sampling(temperature=0.3, ignore_eos=True))
    found = json.loads(capsys.readouterr().out)
    assert found | {"timings": 0} == {"text": "é", "token_ids": [1, 2], "finish_reason": "stop", "seed": 9, "timings": 0}
    assert found["timings"]["decode_tok_s"] == 2.0 and found["timings"]["cached_tokens"] == 1


def test_chat_answers_once_when_it_is_given_words(fake, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("from the pipe\n"))
    assert cli.main(["chat", "--prompt", "Say it:", "--system", "be kind"]) == 0
    out = capsys.readouterr()
    assert out.out == "Say it:\n\nfrom the pipe\n" and "fake" in out.err and "tok/s" in out.err
    assert fake.asked[0][0][0] == {"role": "system", "content": "be kind"}
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert cli.main(["chat"]) == 2 and "stdin is empty" in capsys.readouterr().err
    fake.template = None
    assert cli.main(["chat", "-p", "x"]) == 2 and "no chat template" in capsys.readouterr().err


def test_wrong_options_are_one_line(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("x"))
    for args, words in ((["chat", "--ctx", "3x"], "--ctx"), (["generate", "x", "--config", "nowhere"], "nowhere"), (["generate", ""], "no prompt"), (["cache", "rm"], "needs a name"),
                        (["cache", "list", "x"], "takes no names"), (["cache", "prune", "--keep", "lots"], "--keep 'lots'")):
        assert cli.main(args) == 2
        assert words in capsys.readouterr().err


def test_plan_tells_what_would_fit(capsys, tmp_path, monkeypatch):
    from hetero.memory import machine
    from hetero.memory.cost import Machine
    monkeypatch.setattr(machine, "this_machine", lambda *a: Machine(cores=4, ram_bytes=32 << 30, dram_bytes_s=4e10, cpu_flops=1e12))
    assert cli.main(["plan", "--json", "--cache-dir", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["family"] and found["total_params"] == pytest.approx(29.96e6, rel=0.01)
    assert {"vram_bytes", "ram_bytes", "peak_load_ram_bytes", "active_params", "decode_tok_s", "prefill_tok_s", "layers"} <= found.keys()
    config = json.loads((EMBEDDED / "config.json").read_text()) | {"num_experts": 4096, "moe_intermediate_size": 8192, "hidden_size": 8192}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert cli.main(["plan", str(tmp_path), "--config-only", "--ram", "8G"]) == 1
    assert "does not fit" in capsys.readouterr().out
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "nonsense", "architectures": ["FooForCausalLM"]}))
    assert cli.main(["plan", str(tmp_path), "--config-only"]) == 1 and "Foo" in capsys.readouterr().err


@pytest.mark.parametrize("quant, want", [
    ({}, "bf16"), ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"), ({"quant_method": "gptq", "bits": 8}, "int8_g64z"),
    ({"quant_method": "gptq", "bits": 8, "sym": True}, "int8_g64"), ({"quant_method": "gptq", "bits": 4, "desc_act": True}, "int4_g64z:ordered"), ({"quant_method": "awq", "bits": 4}, "int4_g64z"),
    ({"quant_method": "mxfp4"}, "mxfp4"), ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"), ({"quant_algo": "FP8", "quant_method": "modelopt"}, "fp8")])
def test_a_config_s_word_for_its_weights(quant, want):
    from hetero.forecast import arriving
    assert arriving({"quantization_config": quant} if quant else {}) == want


def test_the_embedded_model_s_config_says_int8():
    from hetero.forecast import arriving
    assert arriving(json.loads((EMBEDDED / "config.json").read_text())) == "int8_g32"


def test_cache_lists_and_removes(capsys, tmp_path):
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "abcdef.packed").write_bytes(b"torn")
    assert cli.main(["cache", "list", "--cache-dir", str(tmp_path)]) == 0
    assert "(torn)" in (out := capsys.readouterr().out) and "1 packed models" in out
    assert cli.main(["cache", "rm", "zzzz", "--cache-dir", str(tmp_path)]) == 2 and "zzzz" in capsys.readouterr().err
    assert cli.main(["cache", "prune", "--json", "--cache-dir", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)[0]["whole"] is False
    assert not list((tmp_path / "packed").iterdir())


def test_a_bar_is_drawn_on_terminals_only(monkeypatch):
    for tty in (False, True):
        err = io.StringIO()
        err.isatty = lambda tty=tty: tty
        monkeypatch.setattr(sys, "stderr", err)
        bar = cli.Bar()
        bar("packing", 1 << 20, 4 << 20)
        bar("packing", 4 << 20, 4 << 20)
        bar.clear()
        assert ("packing [######                  ] 1 of 4 MiB" in err.getvalue()) == tty and err.getvalue().endswith("\r" if tty else "")


class Terminal:
    """A program under a pseudo-terminal of its own. All that it wrote is kept; what was waited for is behind the cursor, so the next wait starts there."""

    def __init__(self, args, env):
        self.end, other = pty.openpty()
        takes = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
        self.program = subprocess.Popen([sys.executable, "-c", takes, *args], stdin=other, stdout=other, stderr=other, env=env, start_new_session=True)
        os.close(other)
        self.raw, self.cursor = b"", 0

    def until(self, pattern, seconds=600):
        """Reads on to a match of this pattern: what came before it and the match itself."""
        end = time.monotonic() + seconds
        while not (found := re.compile(pattern).search(self.text(), self.cursor)):
            assert time.monotonic() < end, f"no {pattern!r} in {self.text()[self.cursor:]!r} after {self.text()[:self.cursor]!r}"
            if select.select([self.end], [], [], 1)[0]:
                try:
                    self.raw += os.read(self.end, 65536)
                except OSError:             # Linux: the program closed its side
                    pytest.fail(f"it left with {self.program.wait(60)} before {pattern!r}: {self.text()!r}")
        before, self.cursor = self.text()[self.cursor:found.end()], found.end()
        return before

    def text(self):
        """What can be decoded so far; a character that is cut is not there yet."""
        return codecs.getincrementaldecoder("utf-8")("replace").decode(self.raw)

    def type(self, line):
        """Waits for the prompt (there the editor asks for bracketed paste), enters a line and waits until the editor let go of the terminal."""
        self.until(r"\x1b\[\?2004h")
        os.write(self.end, line.encode() + b"\r")
        self.until(r"\x1b\[\?2004l")

    def close(self):
        if self.program.poll() is None:
            self.program.kill()
            self.program.wait()
        os.close(self.end)


@pytest.mark.slow
def test_a_person_talks_to_the_embedded_model_on_a_terminal(tmp_path):
    """The whole program under a real pseudo-terminal: an answer, Ctrl-C in the middle of one, another answer, statistics, and out."""
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
    terminal = Terminal(["-m", "hetero", "chat", "--temperature", "0", "--max-tokens", "24"], env)
    told = r"\[(\d+) tokens, [\d.]+ tok/s[^\]]*\]"
    try:
        terminal.until("Ctrl-D leaves")
        terminal.type("Why is the sky blue?")
        assert "light" in terminal.until(told)
        terminal.type("/set max_tokens 900")
        terminal.until("max_tokens=900")
        terminal.type("/set ignore_eos on")
        terminal.until("ignore_eos=True")
        terminal.type("Write a long story about a dragon.")
        terminal.until(r"\w+ \w+ \w+ ")
        os.write(terminal.end, b"\x03")
        stopped = re.search(told + " stopped", terminal.until(told + r"[^\n]*\n"))
        assert stopped and 3 <= int(stopped[1]) < 900
        terminal.type("/set max_tokens 8")
        terminal.until("max_tokens=8")
        terminal.type("What is rain?")
        assert "[8 tokens" in terminal.until(told)
        terminal.type("/stats")
        assert "3 answers" in terminal.until("context now")
        terminal.type("/exit")
        assert terminal.program.wait(60) == 0
    finally:
        terminal.close()
    assert "+Why is the sky blue?" in (tmp_path / "hetero" / "history").read_text()

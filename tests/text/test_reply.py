"""An answer is the sum of its chunks, and its text, tokens and log-probabilities are the same tokens."""
import pytest

from hetero.errors import BadCheckpoint
from hetero.request import Output, Sampling, TokenLogprob
from hetero.text.reply import Reply, Timings, sampling_defaults, watcher


def outputs(ids, finish="stop", each=1):
    groups = [ids[i:i + each] for i in range(0, len(ids), each)]
    return [Output("r", 0, tuple(g), tuple(TokenLogprob(t, -0.5) for t in g), finish=finish if i == len(groups) - 1 else None, prompt_tokens=7, seed=3) for i, g in enumerate(groups)]


@pytest.fixture(scope="module")
def bytes_tok(make_tok):
    return make_tok(specials=["<|end|>"], words=["DEF"], ends=["<|end|>"])


@pytest.mark.parametrize("each", [1, 2, 5])
@pytest.mark.parametrize("stop", [(), ("c😀",), ("e",), ("bc",)])
def test_chunks_sum_to_the_answer(bytes_tok, each, stop):
    ids = [*"abc😀de".encode(), 256 + 1]
    reply = Reply(bytes_tok, Sampling(stop=stop, logprobs=0))
    chunks = []
    for output in outputs(ids, each=each):
        chunks.append(reply.add(output))
        assert len(chunks[-1].pieces) == len(chunks[-1].logprobs)
        assert [p.token for p in chunks[-1].pieces] == [p.token for p in chunks[-1].logprobs]
        if reply._stream.stopped:
            break
    if not reply._stream.stopped:
        assert chunks[-1].finish == "stop"
    answer = reply.answer
    assert "".join(c.text for c in chunks) == answer.text == b"".join(p.data for p in answer.pieces).decode()
    assert answer.text == {(): "abc😀de", ("c😀",): "ab", ("e",): "abc😀d", ("bc",): "a"}[stop][: len(answer.text)]
    assert answer.token_ids == ids[: len(answer.token_ids)]


def test_ends_are_hidden_unless_they_are_ignored(bytes_tok):
    end = bytes_tok.id_of("<|end|>")
    for ignore in (False, True):
        reply = Reply(bytes_tok, Sampling(ignore_eos=ignore, stop_ids=(98,)))
        for output in outputs([97, end, 98]):
            reply.add(output)
        assert reply.answer.text == ("ab" if ignore else "a")
        assert reply.answer.timings.tokens == 3 and reply.answer.seed == 3 and reply.answer.timings.prompt_tokens == 7


def test_the_engine_gets_a_watcher_only_for_stop_strings(bytes_tok):
    assert watcher(bytes_tok, Sampling()) is None
    assert [watcher(bytes_tok, Sampling(stop=("b",))).see(i) for i in b"a"] == [False]


def test_rates_need_something_measured():
    assert Timings().as_dict()["decode_tok_s"] == 0.0
    assert Timings(10, 4, 5, 2.0, 4.0).decode_tok_s == 2.0 and Timings(10, 4, 5, 2.0, 4.0).prefill_tok_s == 3.0


@pytest.mark.parametrize("generation, want", [
    ({}, Sampling()), ({"temperature": 0.6, "top_k": None, "top_p": 1, "foo": [1]}, Sampling(temperature=0.6)),
    ({"do_sample": False, "temperature": 0.6}, Sampling(temperature=0.0)), ({"do_sample": True, "top_k": 20, "min_p": 0.1}, Sampling(top_k=20, min_p=0.1))])
def test_defaults_of_a_model_are_neutral_where_it_says_nothing(generation, want):
    found, sources = sampling_defaults(generation)
    assert found == want and sources["n"] == "default"
    assert (sources["temperature"] == "generation_config.json") == (want.temperature != 1.0)


@pytest.mark.parametrize("generation", [{"temperature": "hot"}, {"top_p": 1.5}, {"top_k": -3}, {"temperature": True}, {"temperature": float("nan")}])
def test_defaults_that_cannot_be_meant_are_refused(generation):
    with pytest.raises(BadCheckpoint, match=next(iter(generation))):
        sampling_defaults(generation)

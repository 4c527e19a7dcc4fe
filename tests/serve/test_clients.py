"""The clients people use, over loopback: what they add up is what was said."""
import json

import pytest

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

TOOLS = [{"type": "function", "function": {"name": "get", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]
CALL = '<tool_call>{"name": "get", "arguments": {"city": "Zürich"}}</tool_call>'
HI = [{"role": "user", "content": "hi"}]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def oai(stage):
    with openai.OpenAI(base_url=f"{stage.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def ant(stage):
    with anthropic.Anthropic(base_url=stage.url, api_key="none", max_retries=0) as client:
        yield client


def test_openai_chats_whole_and_streamed(stage, oai):
    assert oai.models.list().data[0].id == "demo"
    r = oai.chat.completions.create(model="demo", messages=HI, logprobs=True, top_logprobs=1)
    assert r.choices[0].message.content == "Hello there." and r.usage.completion_tokens == 4 and len(r.choices[0].logprobs.content) == 4
    with oai.chat.completions.stream(model="demo", messages=HI, stream_options={"include_usage": True}) as s:
        final = s.get_final_completion()
    assert final.choices[0].message.content == "Hello there." and final.usage.total_tokens == r.usage.total_tokens


def test_openai_tools_and_errors(stage, oai):
    stage.says = f"So. {CALL}{CALL}"
    with oai.chat.completions.stream(model="demo", messages=HI, tools=TOOLS) as s:
        message = s.get_final_completion().choices[0].message
    assert [json.loads(c.function.arguments) for c in message.tool_calls] == [{"city": "Zürich"}] * 2
    again = [*HI, message.model_dump(exclude_none=True), *({"role": "tool", "tool_call_id": c.id, "content": "sunny"} for c in message.tool_calls)]
    stage.says = "It is sunny."
    for m in again:
        for c in m.get("tool_calls", ()):
            c["function"] = {k: c["function"][k] for k in ("name", "arguments")}
    assert oai.chat.completions.create(model="demo", messages=again, tools=TOOLS).choices[0].message.content == "It is sunny."
    with pytest.raises(openai.BadRequestError) as caught:
        oai.chat.completions.create(model="demo", messages=HI, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        oai.chat.completions.create(model="other", messages=HI)


def test_openai_completions_and_responses(stage, oai):
    r = oai.completions.create(model="demo", prompt="Once", max_tokens=3, echo=True, logprobs=1)
    assert r.choices[0].text == "OnceHello there."
    assert "".join(c.choices[0].text for c in oai.completions.create(model="demo", prompt="Once", max_tokens=2, stream=True))
    whole = oai.responses.create(model="demo", input="hi", instructions="be kind")
    assert whole.output_text == "Hello there." and whole.status == "completed" and whole.usage.output_tokens == 4
    stage.says = CALL
    tool = {"type": "function", "name": "get", "parameters": TOOLS[0]["function"]["parameters"], "strict": True}
    with oai.responses.stream(model="demo", input=[{"role": "user", "content": "hi"}], tools=[tool]) as s:
        kinds = [e.type for e in s]
        final = s.get_final_response()
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed" and "response.function_call_arguments.delta" in kinds
    call = final.output[0]
    assert call.name == "get" and json.loads(call.arguments) == {"city": "Zürich"}
    stage.says = "Sunny."
    back = oai.responses.create(model="demo", tools=[tool], input=[{"role": "user", "content": "hi"}, {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments},
                                                                   {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}])
    assert back.output_text == "Sunny."
    with oai.responses.stream(model="demo", input="hi") as s:
        assert "".join(e.delta for e in s if e.type == "response.output_text.delta") == "Sunny."
    with pytest.raises(openai.BadRequestError):
        oai.responses.create(model="demo", input="hi", previous_response_id="resp_1")


def test_anthropic_messages_whole_and_streamed(stage, ant):
    r = ant.messages.create(model="demo", max_tokens=50, messages=HI, system="be kind")
    assert r.content[0].text == "Hello there." and r.stop_reason == "end_turn" and r.usage.output_tokens == 4
    with ant.messages.stream(model="demo", max_tokens=50, messages=HI) as s:
        assert "".join(s.text_stream) == "Hello there."
    assert ant.messages.create(model="demo", max_tokens=2, messages=HI).stop_reason == "max_tokens"
    stopped = ant.messages.create(model="demo", max_tokens=50, messages=HI, stop_sequences=["there"])
    assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == ("stop_sequence", "there", "Hello ")
    assert ant.messages.count_tokens(model="demo", messages=HI).input_tokens == r.usage.input_tokens + r.usage.cache_read_input_tokens - ant.messages.count_tokens(
        model="demo", messages=HI, system="be kind").input_tokens + ant.messages.count_tokens(model="demo", messages=HI).input_tokens
    ant.messages.create(model="demo", max_tokens=5, messages=[*HI, {"role": "assistant", "content": "Sure, "}])
    assert stage.tok.decode(stage.asked[-1].prompt, True).endswith("assistant\nSure, ")


def test_anthropic_tools(stage, ant):
    stage.says = f"So. {CALL}{CALL}"
    tools = [{"name": "get", "input_schema": TOOLS[0]["function"]["parameters"]}]
    with ant.messages.stream(model="demo", max_tokens=200, messages=HI, tools=tools) as s:
        r = s.get_final_message()
    assert [b.type for b in r.content] == ["text", "tool_use", "tool_use"] and r.content[1].input == {"city": "Zürich"} and r.stop_reason == "tool_use"
    assert ant.messages.create(model="demo", max_tokens=200, messages=HI, tools=tools).content[2].input == {"city": "Zürich"}
    stage.says = "Sunny."
    results = [{"type": "tool_result", "tool_use_id": b.id, "content": [{"type": "text", "text": "sun"}]} for b in r.content[1:]]
    back = ant.messages.create(model="demo", max_tokens=50, tools=tools, messages=[*HI, {"role": "assistant", "content": [b.model_dump(include={"type", "text", "id", "name", "input"}) for b in r.content]},
                                                                                   {"role": "user", "content": results}])
    assert back.content[0].text == "Sunny."
    with pytest.raises(anthropic.BadRequestError):
        ant.messages.create(model="demo", max_tokens=50, messages=[{"role": "user", "content": [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}]}])
    with pytest.raises(anthropic.BadRequestError):
        ant.messages.create(model="demo", max_tokens=0, messages=HI)


@pytest.mark.slow
def test_langchain_chats_streams_and_calls(stage):
    chat = pytest.importorskip("langchain_openai").ChatOpenAI(base_url=f"{stage.url}/v1", api_key="none", model="demo", max_retries=0)
    assert chat.invoke("hi").content == "Hello there."
    assert "".join(c.content for c in chat.stream("hi")) == "Hello there."
    stage.says = CALL
    assert chat.bind_tools(TOOLS).invoke("hi").tool_calls[0]["args"] == {"city": "Zürich"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_litellm_chats_and_streams(stage):
    litellm = pytest.importorskip("litellm")
    asked = {"model": "openai/demo", "api_base": f"{stage.url}/v1", "api_key": "none", "messages": HI}
    assert litellm.completion(**asked).choices[0].message.content == "Hello there."
    assert "".join(c.choices[0].delta.content or "" for c in litellm.completion(**asked, stream=True)) == "Hello there."
    stage.says = CALL
    assert json.loads(litellm.completion(**asked, tools=TOOLS).choices[0].message.tool_calls[0].function.arguments) == {"city": "Zürich"}

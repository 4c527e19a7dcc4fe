"""A client's request to a job: the prompt in ids, sampling, constraints, each checked against the model; knows no HTTP and no engine.

Everything here may take a while (templates, tokenizing, compiling) and is called off the event loop.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from hetero.engine.admission import validate
from hetero.errors import BadRequest
from hetero.request import Mask, Request, Sampling
from hetero.text import formats, grammar, parse, template, tokenizer
from hetero.text.calls import Calls
from hetero.text.formats import Format, Harmony
from hetero.text.parse import Parser
from hetero.text.reply import Reply, watcher
from hetero.text.template import Prompt, Template
from hetero.text.tokenizer import Tokenizer
from hetero.wire.records import Info, Job
from hetero.wire.schema import MAX_STOP_CHARS, ChatRequest, Message, ResponseFormat, Sampled, Tool

FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "min_tokens",
          "ignore_eos", "n")


class Checks(Protocol):
    """What refuses a grammar that cannot be enforced, named by the field it is from."""

    def check(self, grammar: str, param: str = "response_format") -> None: ...
    def close(self) -> None: ...


@dataclass
class Texts:
    """The model's text side, in the server's own process."""

    info: Info
    tokenizer: Tokenizer
    template: Template | None
    format: Format
    vocabulary: grammar.Vocabulary
    checker: Checks
    merge: frozenset[str] = frozenset()      # opt-in repairs of conversations: "system", "consecutive"


def read_texts(info: Info, format_name: str = "auto", template_file: Path | None = None, merge: frozenset[str] = frozenset()) -> Texts:
    """From the model's folder. Raises BadCheckpoint or BadOption."""
    if info.files:
        config, model, generation = (json.loads(info.files.get(n, "{}")) for n in ("tokenizer_config.json", "config.json", "generation_config.json"))
        tok = tokenizer.from_json(info.files.get("tokenizer.json", ""), config, model, generation, info.name)
        named = {"default": config["chat_template"]} if config.get("chat_template") else {}
        if template_file is not None:
            made = template.read(Path(info.folder), tok, template_file)
        else:
            made = template.try_out(named, info.name, tok) if named else None
    else:
        tok = tokenizer.read(Path(info.folder))
        made = template.read(Path(info.folder), tok, template_file)
    form = formats.named(format_name) if format_name != "auto" else formats.detect(made.text if made else "")
    vocabulary = grammar.Vocabulary(tok, info.vocab)
    return Texts(info, tok, made, form, vocabulary, grammar.Checker(vocabulary, seconds=2.0), merge)


@dataclass
class Prepared:
    """A job with what turns its outputs into an answer."""

    job: Job
    texts: Texts
    prompt: Prompt
    strip: bool = True
    tools: list[dict[str, Any]] | None = None
    logprobs: bool = False

    def reply(self, index: int) -> Reply:
        return Reply(self.texts.tokenizer, self.job.sampling, index, self.strip)

    def parser(self) -> Parser:
        return parse.parser(self.texts.tokenizer, self.texts.format, self.prompt.text, self.tools)


def request_of(job: Job, mask: Mask | None, tok: Tokenizer) -> Request:
    """The job as the engine takes it."""
    return Request(job.id, job.prompt, job.sampling, job.priority, mask, watcher(tok, job.sampling), job.cache_prompt, job.progress)


def mask_of(job: Job, vocabulary: grammar.Vocabulary) -> Mask | None:
    """What holds the job to its grammar, None when it has none."""
    if job.grammar is None:
        return None
    mask: Mask = vocabulary.mask(job.grammar)
    return grammar.AfterReasoning(mask, vocabulary.tokenizer, vocabulary.size, job.after, job.may_open) if job.after else mask


def serves(name: str | None, names: Sequence[str], model: str) -> bool:
    """Whether a body that says `name` means the model that is called `names` and was opened as `model`: it may also say the last part of a path."""
    known = {*names, model, Path(names[0]).name}
    return not name or name in known or Path(name).name in known


def new_id(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(12)}"


def sampling_of(r: Sampled, info: Info, max_tokens: int | None) -> Sampling:
    """The model's defaults with what the client says. Raises BadRequest naming the field."""
    found: dict[str, Any] = {name: value for name in FIELDS if (value := getattr(r, name)) is not None}
    stop = [r.stop] if isinstance(r.stop, str) else r.stop or []
    if any(not s or len(s) > MAX_STOP_CHARS for s in stop):
        raise BadRequest(f"stop must be texts of 1 to {MAX_STOP_CHARS} characters", param="stop")
    bias = []
    for key, value in (r.logit_bias or {}).items():
        if not key.isascii() or not key.isdigit() or not int(key) < info.vocab:
            raise BadRequest(f"logit_bias has {key[:40]!r}, but token ids go from 0 to {info.vocab - 1}", param="logit_bias")
        bias.append((int(key), value))
    return replace(info.sampling, **found, stop=tuple(stop), stop_ids=tuple(r.stop_token_ids or ()), logit_bias=tuple(bias), max_tokens=max_tokens)


def checked(job: Job, info: Info) -> Job:
    """The job, after the engine's own checks: what is wrong is known before anything waits."""
    validate(Request(job.id, job.prompt, job.sampling, job.priority), info.vocab, info.context, info.limits)
    return job


def plain_messages(messages: list[Message], merge: frozenset[str]) -> list[dict[str, Any]]:
    """Messages as templates take them; opt-in repairs: system messages joined in front, consecutive ones of a role joined."""
    plain = [m.model_dump(exclude_none=True) for m in messages]
    for m in plain:
        m["role"] = {"developer": "system", "function": "tool"}.get(m["role"], m["role"])
        if m["role"] == "assistant" and not m.get("tool_calls"):
            m.pop("tool_calls", None)
            if "content" not in m and not m.get("reasoning_content"):
                m["content"] = ""
    if "system" in merge and (systems := [m for m in plain if m["role"] == "system"]):
        text = "\n\n".join(template.plain_content(m.get("content"), "system") for m in systems)
        plain = [{"role": "system", "content": text}, *(m for m in plain if m["role"] != "system")]
    if "consecutive" in merge:
        joined: list[dict[str, Any]] = []
        for m in plain:
            if joined and joined[-1]["role"] == m["role"] and m["role"] in ("user", "system"):
                texts = [template.plain_content(x.get("content"), m["role"]) for x in (joined[-1], m)]
                joined[-1] = {**joined[-1], "content": "\n\n".join(texts)}
            else:
                joined.append(m)
        plain = joined
    return plain


def tools_of(tools: list[Tool] | None) -> list[dict[str, Any]] | None:
    """Tools as templates take them, a missing schema as that of an object without fields; names must be unique."""
    if not tools:
        return None
    names = [t.function.name for t in tools]
    if len(set(names)) < len(names):
        raise BadRequest("two tools have the same name", "give each tool its own name", "tools")
    return [{"type": "function", "function": {**t.function.model_dump(exclude_none=True, include={"name", "description"}),
                                              "parameters": t.function.parameters or {"type": "object", "properties": {}}}} for t in tools]


def render(t: Texts, messages: list[Message], tools: list[dict[str, Any]] | None = None, names: Mapping[str, Any] | None = None,
           generation: bool | None = None, continue_final: bool | None = None) -> Prompt:
    """A conversation through the template. Raises BadRequest."""
    if t.template is None:
        raise BadRequest(f"{t.info.name} has no chat template", "use /v1/completions, or start the server with --chat-template", "messages")
    if generation and continue_final:
        raise BadRequest("add_generation_prompt and continue_final_message exclude each other", "send one of them", "continue_final_message")
    return t.template.prompt(plain_messages(messages, t.merge), tools, bool(continue_final), dict(names or {}))


@dataclass
class Constraint:
    """What an answer must look like, and from where on."""

    grammar: str | None = None
    after: str = ""
    may_open: int | None = None


def constraint(t: Texts, form: ResponseFormat | None) -> str | None:
    """The grammar of a response_format. Raises BadRequest for what is missing or cannot be enforced."""
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        made = grammar.any_object()
    elif form.type == "json_schema":
        if form.json_schema is None:
            raise BadRequest("response_format of type json_schema needs json_schema", param="response_format")
        made = grammar.from_schema(form.json_schema.schema_)
    elif form.type == "regex":
        made = grammar.from_regex(form.pattern or "", "response_format")
    elif form.type == "choice":
        made = grammar.from_choice(form.choices or [], "response_format")
    else:
        made = grammar.from_lark(form.grammar or "", "response_format")
    t.checker.check(made, "response_format")
    return made


def placed(t: Texts, made: str | None, prompt: str) -> Constraint:
    """Where a constraint begins: after reasoning that the prompt opened, or that the answer may open; with channels in the final one."""
    if made is None:
        return Constraint()
    if isinstance(t.format.calls, Harmony):
        return Constraint(made, "<|channel|>final<|message|>")
    think = t.format.think
    if think and parse.opens_thinking(t.format, prompt, t.tokenizer):
        return Constraint(made, think[1])
    opening = t.tokenizer.id_of(think[0]) if think and t.template and think[0] in t.template.text else None
    return Constraint(made, think[1] if think and opening is not None else "", opening)


def must(t: Texts, r: ChatRequest, tools: list[dict[str, Any]] | None, named: list[dict[str, Any]], prompt: str) -> Constraint:
    """What the answer must look like: calls that are required, else the response_format, else calls that are strict if there are any at all."""
    form, many, strict = r.response_format, r.parallel_tool_calls is not False, {x.function.name for x in r.tools or () if x.function.strict}
    harmony = isinstance(t.format.calls, Harmony)
    if tools and (named or r.tool_choice == "required"):
        made = Calls(t.tokenizer, t.format, named or tools).required(many and not named)
    elif tools and form is not None and form.type in ("json_schema", "json_object") and not harmony:
        constraint(t, form)
        schema = form.json_schema.schema_ if form.json_schema else {"type": "object"}
        made = Calls(t.tokenizer, t.format, tools, strict).required(many, {} if schema is True else schema)  # type: ignore[arg-type]
    elif tools and (form is None or form.type == "text") and (strict or not many):
        if harmony and r.continue_final_message:
            raise BadRequest("strict tools cannot be held to in a message that is continued", "leave one of the two out", "continue_final_message")
        made = Calls(t.tokenizer, t.format, tools, strict).offered(many)
        harmony = harmony or t.format.ends_thinking      # reasoning is part of that grammar
    else:
        return placed(t, constraint(t, form), prompt)
    t.checker.check(made, "tools")
    return Constraint(made) if harmony else placed(t, made, prompt)


def chat(r: ChatRequest, t: Texts) -> Prepared:
    """A chat request to its job. Raises BadRequest."""
    tools, choice, named = tools_of(r.tools), r.tool_choice, list[dict[str, Any]]()
    if choice == "required" and not tools:
        raise BadRequest("tool_choice is required, but there are no tools", "send tools", "tool_choice")
    if not isinstance(choice, str | None):
        named = [x for x in tools or [] if x["function"]["name"] == choice.function.name]
        if not named:
            raise BadRequest(f"tool_choice names {choice.function.name!r}, which is no tool", "name one of tools", "tool_choice")
    if choice == "none":
        tools = None
    prompt = render(t, r.messages, tools, r.chat_template_kwargs, r.add_generation_prompt, r.continue_final_message)
    where = must(t, r, tools, named, prompt.text)
    most = r.max_completion_tokens if r.max_completion_tokens is not None else r.max_tokens
    sampling = sampling_of(r, t.info, most)
    if r.logprobs:
        sampling = replace(sampling, logprobs=r.top_logprobs or 0)
    elif r.top_logprobs:
        raise BadRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    job = Job(new_id("chatcmpl"), prompt.ids, sampling, where.grammar, where.after, where.may_open, r.cache_prompt is not False, r.priority or 0,
              progress_of(r))
    return Prepared(checked(job, t.info), t, prompt, not r.continue_final_message, tools, bool(r.logprobs))


def progress_of(r: Sampled) -> bool:
    """Whether the client wants to hear of its prompt. Raises BadRequest for what only a stream can give."""
    for name, value in (("stream_options", r.stream_options is not None), ("return_progress", r.return_progress)):
        if value and not r.stream:
            raise BadRequest(f"{name} needs stream: true", param=name)
    return bool(r.return_progress)


def completions(r: Any, t: Texts) -> list[Prepared]:
    """A completions request to one job per prompt. Raises BadRequest."""
    if r.suffix:
        raise BadRequest("suffix is not supported", "leave it out", "suffix")
    if r.best_of is not None and r.best_of != (r.n or 1):
        raise BadRequest("best_of is not supported", "use n", "best_of")
    prompts = [r.prompt] if isinstance(r.prompt, str) or isinstance(r.prompt[0], int) else r.prompt
    made = constraint(t, r.response_format)
    most = 16 if r.max_tokens is None else 1 if r.max_tokens == 0 and r.echo else r.max_tokens      # 0 with echo: the prompt alone is wanted
    sampling = sampling_of(r, t.info, most)
    if r.logprobs is not None:
        sampling = replace(sampling, logprobs=r.logprobs, prompt_logprobs=r.logprobs if r.echo else None)
    found = []
    for i, p in enumerate(prompts):
        ids = tuple(t.tokenizer.encode_prompt(p)) if isinstance(p, str) else tuple(p)
        text = p if isinstance(p, str) else t.tokenizer.decode([i for i in ids if 0 <= i < t.info.vocab])
        job = Job(new_id("cmpl"), ids, sampling, made, "", None, r.cache_prompt is not False, r.priority or 0, progress_of(r))
        try:
            found.append(Prepared(checked(job, t.info), t, Prompt(text, ids), False, None, r.logprobs is not None))
        except BadRequest as e:
            raise type(e)(f"prompt.{i}: {e.message}", e.hint, e.param) if e.param == "prompt" and len(prompts) > 1 else e from None
    return found

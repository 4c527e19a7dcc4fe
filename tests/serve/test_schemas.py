"""Answers under random JSON schemas validate, and a fuzzer that reads our own description of the API finds no fault of ours."""
import json
import os
import random

import pytest

jsonschema = pytest.importorskip("jsonschema")
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "15"))         # scripts/fuzz_api asks for more


def random_schema(rng, depth=0):
    """A schema of what people write: objects, arrays, unions, enums, patterns, formats, bounds, references."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "pattern", "format", "union"] + ["object", "array", "tree"] * (2 if depth < 2 else 0)
    kind = rng.choice(kinds)
    if kind == "object":
        names = rng.sample(["a", "b c", "é", "type", "x_y"], rng.randint(1, 3))
        return {"type": "object", "properties": {n: random_schema(rng, depth + 1) for n in names}, "required": rng.sample(names, rng.randint(0, len(names))), "additionalProperties": False}
    if kind == "array":
        return {"type": "array", "items": random_schema(rng, depth + 1), "minItems": rng.randint(0, 2), "maxItems": 3}
    if kind == "tree":
        return {"type": "object", "properties": {"v": {"type": "integer", "minimum": 0, "maximum": 9}, "c": {"type": "array", "items": {"$ref": "#/$defs/t"}, "maxItems": 2}}, "required": ["v"],
                "additionalProperties": False, "$defs": {"t": {"type": "object", "properties": {"v": {"enum": [1, 2]}}, "required": ["v"], "additionalProperties": False}}} if depth == 0 else {"type": "null"}
    if kind == "union":
        return {"anyOf": [random_schema(rng, depth + 2), {"type": rng.choice(["null", "boolean"])}]}
    return {"string": {"type": "string", "maxLength": rng.randint(1, 8)}, "integer": {"type": "integer", "minimum": -5, "maximum": 300}, "number": {"type": "number", "minimum": 0, "maximum": 9},
            "boolean": {"type": "boolean"}, "null": {"type": "null"}, "enum": {"enum": ["x", 3, None, "é\"", True]}, "pattern": {"type": "string", "pattern": r"^[A-Z]{2}-\d{1,3}$"},
            "format": {"type": "string", "format": rng.choice(["date", "uuid", "ipv4", "time"])}}[kind]


@pytest.mark.parametrize("part", range(4))
def test_answers_under_random_schemas_validate(stage, part):
    """50 each: a model that prefers to close what is open, so that most answers end; every one that ends must validate, and none may end in white space."""
    closing = [i for i in range(stage.tok.size) if stage.tok.bytes_of(i)[:1] in (b'"', b"}", b"]", b",", b":")]

    def says(request):
        def logits(request, index, said):
            row = [0.0] * stage.tok.size
            for i in closing:
                row[i] = 4.0
            row[2] = 8.0
            return row
        return logits
    stage.says, done = says, 0
    for n in range(50):
        rng = random.Random(part * 1000 + n)
        schema = random_schema(rng)
        form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}}
        r = stage.chat(response_format=form, max_tokens=200, seed=n, temperature=1.0)
        assert r.status_code == 200, (schema, r.text)
        choice = r.json()["choices"][0]
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["message"]["content"]), schema)
            done += 1
        else:
            assert choice["message"]["content"].strip() and not choice["message"]["content"].endswith("   "), choice
    assert done >= 40


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_a_fuzzer_that_reads_our_description_finds_no_fault(stage, mode):
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis import GenerationMode

    schema = schemathesis.openapi.from_dict(stage.http.get("/openapi.json").json())
    schema.config.update(base_url=stage.url)
    def attack(op):
        documented = {405, *(int(code) for code in op.definition.raw["responses"])}

        @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate], database=None)
        @given(case=op.as_strategy(generation_mode=GenerationMode(mode)))
        def run(case):
            if isinstance(case.body, dict) and isinstance(case.body.get("max_tokens"), (int, type(None))):
                case.body["max_tokens"] = min(case.body.get("max_tokens") or 4, 4)
            r = case.call(timeout=60)
            assert r.status_code < 500 and r.status_code in documented, (case.method, case.path, case.body, r.status_code, r.text)
        run()
    for operation in schema.get_all_operations():
        op = operation.ok()
        if mode == "positive" or "requestBody" in op.definition.raw:
            attack(op)
    stage.until_idle(20)

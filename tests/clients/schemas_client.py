"""Asks a cluster for JSON of many drawn schemas, through OpenAI's client, and validates each answer that ended by itself.

Arguments: base URL, number of schemas. Temperature 1; half of the answers are streamed; prompts are prefilled remotely and locally.
"""

import json
import random
import sys
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import openai

MODEL = "smollm2-135m-instruct"
TOKENS_MAX = 300
# Fewer mean that models do not come to the end of their forms.
ENDED_MIN = 0.9


def scalar(draw):
    low, digits = draw.randint(-50, 50), draw.randint(1, 3)
    return draw.choice(
        [
            {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 200)},
            {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 10},
            {"type": "integer", "multipleOf": draw.randint(2, 9), "minimum": 0, "maximum": 500},
            {"type": "number", "minimum": low / 10, "maximum": low / 10 + 3.5},
            {"type": "string", "maxLength": draw.randint(1, 12)},
            {"type": "string", "minLength": 2, "maxLength": 9},
            {"type": "string", "pattern": f"^[A-Z]{{2}}-[0-9]{{{digits}}}$"},
            {"type": "string", "pattern": "^(north|south)(east|west)?$"},
            {"type": "string", "format": "date"},
            {"enum": draw.sample(["red", "green", "blue", 7, None, True, 2.5, "päivä", 'a"b'], 3)},
            {"const": draw.choice(["fixed", 42, False])},
            {"type": "boolean"},
            {"type": "null"},
            {"type": ["integer", "boolean"], "minimum": 0, "maximum": 9},
        ]
    )


def schema(draw, depth):
    kind = draw.choice(["scalar", "object", "array", "anyOf"]) if depth else "scalar"
    if kind == "object":
        names = draw.sample(["id", "name", "age", "size", "tags", "kind", "ort", "größe"], draw.randint(1, 3))
        required = [name for name in names if draw.random() < 0.7]
        properties = {name: schema(draw, depth - 1) for name in names}
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if kind == "array":
        least = draw.randint(0, 2)
        return {"type": "array", "items": schema(draw, depth - 1), "minItems": least, "maxItems": least + 2}
    if kind == "anyOf":
        return {"anyOf": [schema(draw, depth - 1) for _ in range(2)]}
    return scalar(draw)


def drawn(seed):
    """The schema of a seed: every tenth is recursive."""
    draw = random.Random(seed)
    if seed % 10:
        return {"type": "object", "properties": {"value": schema(draw, 2)}, "required": ["value"], "additionalProperties": False}
    child = {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}
    node = {"type": "object", "properties": {"leaf": scalar(draw), "children": child}, "required": ["leaf"], "additionalProperties": False}
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"}


def ask(client, seed):
    wanted = drawn(seed)
    response = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Invent one short example as JSON."}],
        response_format={"type": "json_schema", "json_schema": {"name": "drawn", "strict": True, "schema": wanted}},
        temperature=1,
        seed=seed,
        max_tokens=TOKENS_MAX,
        stream=seed % 2 == 0,
        extra_body={"prefill_policy": "remote" if seed % 3 else "local"},
    )
    if seed % 2 == 0:
        choices = [choice for chunk in response for choice in chunk.choices]
        text = "".join(choice.delta.content or "" for choice in choices)
        reason = choices[-1].finish_reason
    else:
        text, reason = response.choices[0].message.content, response.choices[0].finish_reason
    if reason != "stop":
        assert reason == "length", reason
        return False
    try:
        jsonschema.validate(json.loads(text), wanted, cls=jsonschema.Draft202012Validator)
    except (json.JSONDecodeError, jsonschema.ValidationError) as error:
        raise AssertionError(f"seed {seed}: {text!r} is not of {json.dumps(wanted)}") from error
    return True


def main():
    url, count = sys.argv[1], int(sys.argv[2])
    client = openai.OpenAI(base_url=url, api_key="unused", max_retries=0, timeout=300)
    with ThreadPoolExecutor(8) as threads:
        ended = list(threads.map(lambda seed: ask(client, seed), range(count)))
    print(f"{count} schemas: {sum(ended)} answers ended and are valid")
    assert sum(ended) >= ENDED_MIN * count, "too few ended"


main()

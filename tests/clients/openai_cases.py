"""Every field of chats and completions, whole and streamed, through OpenAI's own Python client. Arguments: base URL, e.g.
http://127.0.0.1:8000/v1.

A case is an API, its fields, and what must be true of the answer. It is asked for whole and as a stream, and both must be the same answer.
A field that the API's document has must be in a case.
"""

import json
import re
import sys

import openai
import requests

MODEL = "smollm2-135m-instruct"
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
COUNT = [{"role": "user", "content": "Count from one to twenty."}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
OTHER = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}}
CASES = []
# What the client has as arguments of its own; all other fields go into `extra_body`.
BOTH = {
    "model", "temperature", "top_p", "n", "max_tokens", "stop", "seed", "logprobs", "logit_bias", "presence_penalty", "frequency_penalty", "user",
    "stream_options",
}  # fmt: skip
OWN = {
    "chat": BOTH | {
        "messages", "max_completion_tokens", "top_logprobs", "response_format", "tools", "tool_choice", "parallel_tool_calls", "metadata", "store",
        "service_tier", "function_call", "modalities", "reasoning_effort",
    },
    "completions": BOTH | {"prompt", "best_of", "echo", "suffix"},
}  # fmt: skip


def chat(check=None, **fields):
    CASES.append(("chat", {"messages": FRANCE, "max_tokens": 8, "temperature": 0} | fields, check))


def plain(check=None, **fields):
    CASES.append(("completions", {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0} | fields, check))


def refused(api, param, **fields):
    """`param` is what the error must name."""
    first = {"messages": FRANCE} if api == "chat" else {"prompt": "Hi"}
    CASES.append((api, first | {"max_tokens": 4} | fields, param))


class Answer:
    """What both modes have in common."""

    def __init__(self, api, choices, usage):
        self.api, self.choices, self.usage = api, choices, usage
        self.texts = [choice["text"] for choice in choices]
        self.text = self.texts[0]
        self.reason = choices[0]["finish_reason"]
        self.calls = choices[0]["calls"]
        self.logprobs = choices[0]["logprobs"]

    def same(self, other):
        # What is cached differs: the second was asked after the first.
        counts = [{name: count for name, count in of.usage.items() if name != "prompt_tokens_details"} for of in (self, other)]
        return self.choices == other.choices and counts[0] == counts[1]


def of_choice(api, choice, text, calls, logprobs, ids):
    return {
        "text": text or "",
        "finish_reason": choice.finish_reason,
        "calls": [(call["name"], json.loads(call["arguments"])) for call in calls],
        "logprobs": logprobs,
        "ids": ids,
        "api": api,
    }


def listed(api, logprobs):
    """Log-probabilities as a list of one entry for each token."""
    if logprobs is None:
        return []
    if api == "chat":
        return [entry.model_dump() for entry in logprobs.content or []]
    lists = (logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs or [None] * len(logprobs.tokens), logprobs.text_offset)
    return [list(entry) for entry in zip(*lists, strict=True)]


def whole(client, api, arguments):
    answer = client(**arguments)
    choices = []
    for choice in sorted(answer.choices, key=lambda choice: choice.index):
        ids = getattr(choice, "token_ids", None)
        if api == "chat":
            calls = [{"name": call.function.name, "arguments": call.function.arguments} for call in choice.message.tool_calls or []]
            choices.append(of_choice(api, choice, choice.message.content, calls, listed(api, choice.logprobs), ids))
        else:
            choices.append(of_choice(api, choice, choice.text, [], listed(api, choice.logprobs), ids))
    return Answer(api, choices, answer.usage.model_dump())


def streamed(client, api, arguments):
    options = {"include_usage": True} | arguments.pop("stream_options", {})
    texts, calls, logprobs, ids, last, usage = {}, {}, {}, {}, {}, None
    for chunk in client(stream=True, stream_options=options, **arguments):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            at = choice.index
            part = (choice.delta.content if api == "chat" else choice.text) or ""
            texts[at] = texts.get(at, "") + part
            logprobs.setdefault(at, []).extend(listed(api, choice.logprobs))
            if getattr(choice, "token_ids", None) is not None:
                ids.setdefault(at, []).extend(choice.token_ids)
            for call in (choice.delta.tool_calls or []) if api == "chat" else []:
                known = calls.setdefault(at, {}).setdefault(call.index, {"name": "", "arguments": ""})
                known["name"] += call.function.name or ""
                known["arguments"] += call.function.arguments or ""
            if choice.finish_reason:
                last[at] = choice
    choices = []
    for at in sorted(last):
        of = [calls.get(at, {})[call] for call in sorted(calls.get(at, {}))]
        choices.append(of_choice(api, last[at], texts.get(at), of, logprobs.get(at, []), ids.get(at)))
    return Answer(api, choices, usage.model_dump())


def ask(client, case, mode):
    api, fields, _ = case
    create = client.chat.completions.create if api == "chat" else client.completions.create
    known = {name: value for name, value in fields.items() if name in OWN[api]}
    extra = {name: value for name, value in fields.items() if name not in OWN[api]}
    arguments = {"model": MODEL} | known | ({"extra_body": extra} if extra else {})
    if mode is whole:
        arguments.pop("stream_options", None)
    return mode(create, api, arguments)


def tokens(base, text):
    answer = requests.post(base.removesuffix("/v1") + "/tokenize", json={"model": MODEL, "prompt": text}, timeout=60)
    answer.raise_for_status()
    return answer.json()["tokens"]


def paris(answer):
    return "Paris" in answer.text


def ends_by_length(answer):
    return answer.reason == "length" and answer.usage["completion_tokens"] == 8


def is_json(answer):
    return isinstance(json.loads(answer.text), dict)


def is_person(answer):
    person = json.loads(answer.text)
    return set(person) == {"name", "age"} and 0 <= person["age"] <= 99


def differ(count):
    return lambda answer: len(answer.texts) == count and len(set(answer.texts)) > 1


def calls_weather(answer):
    [(name, arguments)] = answer.calls
    return name == "get_weather" and set(arguments) == {"city"} and answer.reason == "tool_calls"


def fill(base):
    """The cases; those that bar or allow tokens ask the server for their ids."""
    one, paris_id, space_one = tokens(base, "1")[-1], tokens(base, " Paris")[-1], tokens(base, " one")[-1]
    warm = {"temperature": 1, "seed": 3, "max_tokens": 16}

    chat(paris)
    chat(ends_by_length, messages=COUNT)
    chat(lambda a: a.usage["completion_tokens"] == 5, messages=COUNT, max_tokens=None, max_completion_tokens=5)
    chat(lambda a: a.reason == "stop", max_tokens=60)
    for role in ("system", "developer"):
        chat(lambda a: a.usage["prompt_tokens"] == 26, messages=[{"role": role, "content": "Answer in one word."}, *FRANCE])
    history = [*FRANCE, {"role": "assistant", "content": "Paris."}, {"role": "user", "content": "And of Spain?"}]
    chat(lambda a: a.usage["prompt_tokens"] > 37, messages=history)
    parts = [{"type": "text", "text": "What is the capital"}, {"type": "text", "text": " of France?"}]
    chat(paris, messages=[{"role": "user", "content": parts}])
    named = [{"role": "user", "name": "ann", "content": FRANCE[0]["content"]}]
    chat(paris, messages=named)
    called = [
        *FRANCE,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]  # fmt: skip
    chat(messages=called, tools=[TOOL])
    chat(lambda a: a.usage["completion_tokens"] >= 6, messages=FRANCE, min_tokens=6)
    chat(lambda a: a.reason == "stop" and a.text == "", messages=COUNT, stop=["1"], allowed_token_ids=[one])
    chat(lambda a: a.reason == "stop" and "," not in a.text, messages=COUNT, max_tokens=40, stop=",")
    chat(lambda a: a.reason == "stop", messages=COUNT, max_tokens=40, stop=["\n\n", ",", "."])
    chat(lambda a: a.reason == "stop", messages=COUNT, max_tokens=40, stop_token_ids=[tokens(base, ",")[-1]])
    chat(lambda a: set(a.text) == {"1"}, allowed_token_ids=[one])
    chat(lambda a: set(a.text) == {"1"}, logit_bias={str(one): 100})
    chat(lambda a: "Paris" not in a.text, logit_bias={str(paris_id): -100})
    chat(lambda a: "Paris" not in a.text, bad_words=["Paris"])
    chat(ends_by_length, ignore_eos=True)
    chat(lambda a: a.usage["completion_tokens"] == 60, ignore_eos=True, max_tokens=60)
    for field, value in [
        ("top_p", 0.5), ("top_k", 5), ("min_p", 0.2), ("typical_p", 0.5), ("presence_penalty", 1.0), ("frequency_penalty", 1.0),
        ("repetition_penalty", 1.2), ("repeat_penalty", 1.2),
    ]:  # fmt: skip
        chat(lambda a: a.text != "", **(warm | {field: value}))
        plain(lambda a: a.text != "", **(warm | {field: value}))
    chat(lambda a: a.text != "", **(warm | {"top_k": 1}))
    chat(differ(3), n=3, **warm)
    chat(lambda a: len(set(a.texts)) == 1, n=2)
    chat(lambda a: len(a.logprobs) == 8 and all(entry["top_logprobs"] == [] for entry in a.logprobs), messages=COUNT, logprobs=True)
    chat(lambda a: all(len(entry["top_logprobs"]) == 5 for entry in a.logprobs), messages=COUNT, logprobs=True, top_logprobs=5)
    chat(lambda a: all(entry["top_logprobs"][0]["token"] == entry["token"] for entry in a.logprobs), logprobs=True, top_logprobs=1)
    chat(lambda a: all(len(choice["logprobs"]) > 0 for choice in a.choices), logprobs=True, n=2, **warm)
    chat(is_json, response_format={"type": "json_object"}, max_tokens=200, **{"temperature": 1, "seed": 11})
    strict = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
    loose = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    chat(paris, response_format={"type": "text"})
    person = {"max_tokens": 60, "temperature": 1, "seed": 4}
    chat(is_person, response_format=strict, **person)
    chat(is_person, response_format=loose, **person)
    chat(is_person, guided_json=PERSON, **person)
    chat(is_person, guided_json=json.dumps(PERSON), **person)
    chat(is_person, structured_outputs={"json": PERSON}, **person)
    chat(lambda a: all(json.loads(text).keys() == {"name", "age"} for text in a.texts), response_format=strict, n=2, **person)
    chat(lambda a: re.fullmatch(r"[0-9]{3}-[0-9]{2}", a.text), guided_regex="[0-9]{3}-[0-9]{2}", max_tokens=20)
    chat(lambda a: re.fullmatch(r"[ab]{4}", a.text), structured_outputs={"regex": "[ab]{4}"}, max_tokens=20)
    chat(lambda a: a.text in ("London", "Berlin"), guided_choice=["London", "Berlin"], max_tokens=20)
    chat(lambda a: a.text in ("x1", "x2"), structured_outputs={"choice": ["x1", "x2"]}, max_tokens=20)
    grammar = 'start: "yes" | "no"'
    chat(lambda a: a.text in ("yes", "no"), guided_grammar=grammar, max_tokens=20)
    chat(lambda a: a.text in ("yes", "no"), structured_outputs={"grammar": grammar}, max_tokens=20)
    chat(lambda a: a.text in ("yes", "no") and len(a.logprobs) > 0, guided_grammar=grammar, guided_decoding_backend="auto", logprobs=True)
    call = {"max_tokens": 60, "tools": [TOOL], "parallel_tool_calls": False}
    chat(calls_weather, tool_choice="required", **call)
    chat(calls_weather, tool_choice={"type": "function", "function": {"name": "get_weather"}}, **(call | {"tools": [TOOL, OTHER]}))
    chat(lambda a: a.calls[0][0] == "get_weather", tool_choice="required", max_tokens=60, tools=[TOOL], parallel_tool_calls=True)
    chat(lambda a: not a.calls, tool_choice="none", **call)
    chat(tool_choice="auto", **call)
    chat(lambda a: {name for name, _ in a.calls} <= {"get_weather", "get_time"}, tool_choice="required", **(call | {"tools": [TOOL, OTHER]}))
    chat(calls_weather, tool_choice="required", function_call="auto", **call)
    begun = [*FRANCE, {"role": "assistant", "content": "The capital of France is"}]
    chat(paris, messages=begun, continue_final_message=True, add_generation_prompt=False)
    chat(lambda a: a.usage["prompt_tokens"] < 37, add_generation_prompt=False)
    chat(lambda a: a.usage["prompt_tokens"] == 20, truncate_prompt_tokens=20)
    chat(paris, truncate_prompt_tokens=-1)
    for policy in ("auto", "remote", "local"):
        chat(paris, prefill_policy=policy)
    chat(paris, priority=0)
    chat(lambda a: a.usage["prompt_tokens_details"]["cached_tokens"] == 0, cache={"off": True})
    chat(paris, cache_salt="a salt of this case")
    chat(paris, chat_template_kwargs={"custom": 1})
    chat(lambda a: len(a.choices[0]["ids"]) == 8, messages=COUNT, return_token_ids=True)
    chat(paris, stream_options={"include_usage": True, "continuous_usage_stats": True})
    chat(paris, stream_options={"include_obfuscation": False})
    ignored = {"user": "ann", "store": False, "metadata": {"a": "b"}, "service_tier": "auto", "safety_identifier": "s", "prompt_cache_key": "k", "prompt_cache_retention": "in_memory"}  # fmt: skip
    chat(paris, **ignored)
    neutral = {"use_beam_search": False, "length_penalty": 1.0, "skip_special_tokens": True, "include_stop_str_in_output": False, "logits_processors": [], "guided_whitespace_pattern": None}  # fmt: skip
    chat(paris, **neutral)
    chat(paris, modalities=["text"])
    chat(paris, a_field_of_another_server=1)
    chat(lambda a: a.text != "", **warm)
    chat(lambda a: len(a.texts) == 2 and all(choice["calls"] for choice in a.choices), n=2, tool_choice="required", **(call | {"temperature": 1, "seed": 5}))
    uncached = lambda a: a.usage["prompt_tokens_details"]["cached_tokens"] == 0
    chat(uncached, prompt_logprobs=2)
    chat(lambda a: a.text == "" and a.usage["completion_tokens"] == 0, prompt_logprobs=0, max_tokens=0)
    chat(paris, reasoning_effort="low")
    plain(lambda a: a.text.startswith("The capital of France is"), echo=True)
    plain(lambda a: a.text == "The capital of France is" and a.reason == "length", echo=True, max_tokens=0)
    plain(lambda a: a.logprobs[0][:3] == ["The", None, None] and a.logprobs[-1][1] < 0, echo=True, max_tokens=0, logprobs=2)
    plain(lambda a: all(entry[2][entry[0]] == entry[1] for entry in a.logprobs[1:]), prompt="Purple seventeen", echo=True, max_tokens=0, logprobs=1)
    plain(lambda a: all(entry[2][entry[0]] == entry[1] for entry in a.logprobs), logprobs=1, **warm)
    plain(lambda a: all(text.startswith(first) for text, first in zip(a.texts, ["One,", "Red,"])), prompt=["One,", "Red,"], echo=True, logprobs=0)
    plain(uncached, prompt_logprobs=1)
    chat(lambda a: len(a.choices[0]["ids"]) == len(a.logprobs), return_token_ids=True, logprobs=True, top_logprobs=2, n=2, **warm)
    chat(lambda a: a.reason == "stop" and a.text == "The capital of ", stop=["France"], logprobs=True)
    chat(lambda a: a.text != "", messages=COUNT, temperature=2, seed=2**63, top_p=0.9, top_k=40, min_p=0.05)
    chat(lambda a: a.text != "", messages=COUNT, **(warm | {"presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 1.1}))

    plain(paris)
    plain(ends_by_length, ignore_eos=True)
    plain(lambda a: a.usage["prompt_tokens"] == len(tokens(base, "Water boils at")), prompt="Water boils at")
    plain(paris, prompt=tokens(base, "The capital of France is"))
    plain(lambda a: len(a.texts) == 2 and "Paris" in a.texts[0], prompt=["The capital of France is", "One, two, three,"])
    plain(lambda a: len(a.texts) == 2, prompt=[tokens(base, "One, two,"), tokens(base, "Red, green,")])
    plain(lambda a: len(a.texts) == 4, prompt=["One,", "Red,"], n=2, **warm)
    plain(differ(3), n=3, **warm)
    plain(lambda a: len(a.texts) == 2, best_of=3, n=2, **warm)
    plain(lambda a: [entry[0] for entry in a.logprobs] != [] and all(entry[2] == {entry[0]: entry[1]} for entry in a.logprobs), logprobs=0)
    plain(lambda a: all(len(entry[2]) == 5 for entry in a.logprobs), logprobs=5)
    plain(lambda a: a.logprobs[0][3] == 0 and [e[3] for e in a.logprobs] == sorted(e[3] for e in a.logprobs), logprobs=1)
    plain(lambda a: "Paris" in a.text and a.reason == "stop", max_tokens=30, stop=["."])
    plain(lambda a: set(a.text) == {"1"}, allowed_token_ids=[one])
    plain(lambda a: "one" not in a.text, prompt="Count: one, one, one,", logit_bias={str(space_one): -100}, bad_words=["one"])
    plain(lambda a: len(a.choices[0]["ids"]) == 8, ignore_eos=True, return_token_ids=True)
    plain(lambda a: re.fullmatch("[0-9]{4}", a.text), guided_regex="[0-9]{4}")
    plain(is_person, guided_json=PERSON, **person)
    plain(is_person, response_format=strict, **person)
    plain(is_person, structured_outputs={"json": PERSON}, **person)
    plain(lambda a: a.text in ("red", "blue"), guided_choice=["red", "blue"])
    plain(lambda a: a.text in ("yes", "no"), guided_grammar=grammar, guided_decoding_backend="auto")
    plain(lambda a: a.text in ("yes", "no"), structured_outputs={"grammar": grammar})
    plain(lambda a: a.usage["prompt_tokens"] == 3, prompt="One two three four five six seven eight", truncate_prompt_tokens=3)
    plain(paris, suffix="", add_special_tokens=True)
    plain(paris, **neutral)
    plain(paris, **ignored)
    plain(lambda a: a.usage["completion_tokens"] >= 4, min_tokens=4)
    for policy in ("remote", "local"):
        plain(paris, prefill_policy=policy)
    plain(paris, cache={"off": True}, cache_salt="another", priority=0)

    for api in ("chat", "completions"):
        for param, value in [
            ("temperature", -1), ("temperature", 3), ("top_p", 0), ("top_p", 1.5), ("top_k", -2), ("min_p", 2), ("typical_p", 0),
            ("presence_penalty", 3), ("frequency_penalty", -3), ("repetition_penalty", 0), ("repeat_penalty", -1), ("max_tokens", 0), ("max_tokens", 10**6),
            ("n", 0), ("n", 10**4), ("min_tokens", 10**6), ("stop", ["a"] * 200), ("stop_token_ids", [10**6]), ("allowed_token_ids", [10**6]),
            ("logit_bias", {"5": 200}), ("logit_bias", {"x": 1}), ("bad_words", [""]), ("seed", "a"), ("priority", 10**6), ("prefill_policy", "both"),
            ("guided_regex", "("), ("guided_choice", []), ("guided_grammar", "start: nothing"), ("guided_json", {"type": "nothing"}),
            ("response_format", {"type": "xml"}), ("structured_outputs", {"json": {}, "regex": "a"}), ("truncate_prompt_tokens", 0),
            ("use_beam_search", True), ("length_penalty", 2), ("skip_special_tokens", False), ("include_stop_str_in_output", True),
            ("cache", {"mode": "off"}), ("model", "no-such-model"),
        ]:  # fmt: skip
            refused(api, param, **{param: value})
    refused("chat", "max_completion_tokens", max_completion_tokens=0)
    refused("chat", "messages", messages=[])
    refused("chat", "messages", messages=[{"role": "nobody", "content": "x"}])
    refused("chat", "messages", messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])
    refused("chat", "top_logprobs", logprobs=True, top_logprobs=50)
    refused("chat", "top_logprobs", top_logprobs=2)
    refused("chat", "tool_choice", tools=[TOOL], tool_choice={"type": "function", "function": {"name": "nobody"}})
    refused("chat", "tool_choice", tool_choice="required")
    refused("chat", "tools", tools=[{"type": "function"}])
    refused("chat", "modalities", modalities=["audio"])
    refused("completions", "prompt", prompt="")
    refused("completions", "prompt", prompt=[10**6])
    refused("completions", "logprobs", logprobs=50)
    refused("completions", "best_of", n=3, best_of=2)
    refused("completions", "suffix", suffix="end")
    refused("completions", "echo", echo="yes")
    refused("chat", "prompt_logprobs", prompt_logprobs=50)
    refused("chat", "reasoning_effort", reasoning_effort=1)


def check_refusal(client, case, mode):
    try:
        ask(client, case, mode)
    except openai.APIStatusError as error:
        body = error.body or {}
        assert error.status_code in (400, 404), (case, error)
        # One of a list is named with its place.
        assert re.split(r"[.\[]", body.get("param") or "")[0] == case[2], (case, body)
        assert body.get("message") and body.get("type"), (case, body)
        return
    raise AssertionError(f"not refused: {case}")


def check_fields(base):
    """Every field of the document is in a case. Those that have no meaning here are refused."""
    document = requests.get(base.removesuffix("/v1") + "/openapi.json", timeout=60).json()
    for api, path in [("chat", "/v1/chat/completions"), ("completions", "/v1/completions")]:
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        while "$ref" in schema:
            schema = document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
        used = {name for of, fields, _ in CASES if of == api for name in fields} | {"model", "stream", "stream_options"}
        for name in sorted(set(schema["properties"]) - used):
            said = schema["properties"][name].get("description", "")
            assert said.startswith("Not supported"), (api, name)
            refused(api, name, **{name: {"a": 1}})


def main():
    base = sys.argv[1]
    client = openai.OpenAI(base_url=base, api_key="unused", max_retries=0, timeout=120)
    fill(base)
    check_fields(base)
    for case in CASES:
        if isinstance(case[2], str):
            check_refusal(client, case, whole)
            check_refusal(client, case, streamed)
            continue
        one = ask(client, case, whole)
        # Which answer is the best is known at its end, and prompts are not scored in streams.
        other = one if {"best_of", "prompt_logprobs"} & set(case[1]) else ask(client, case, streamed)
        assert one.same(other), (case[:2], one.choices, other.choices, one.usage, other.usage)
        assert case[2] is None or case[2](one), (case[:2], one.choices, one.usage)
    answered = sum(not isinstance(case[2], str) for case in CASES)
    assert answered >= 128 and len(CASES) - answered >= 100, (answered, len(CASES))
    print(f"{answered} cases answered and {len(CASES) - answered} refused, each whole and streamed")


main()

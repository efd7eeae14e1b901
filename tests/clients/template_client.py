"""Compares prompts of a cluster with transformers', and answers with tools whole and streamed. Arguments: the cluster's address, e.g.
http://127.0.0.1:8000, and the folder of its model, named like its template in `templates.py`.

Each conversation is drawn by its number. All are compared that transformers renders, until COMPARED are; what it refuses, Baton may refuse
or render. What else may differ: `shows_tools` in `templates.py`; `thinking`, which templates call `reasoning_content`, and arguments as
texts, for templates that take only those, since Baton passes on what the template takes.
"""

import collections
import concurrent.futures
import json
import os
import pathlib
import random
import sys
import time

sys.dont_write_bytecode = True
# Of templates that print the date: the cluster's is UTC.
os.environ["TZ"] = "UTC"
time.tzset()

import jinja2.meta  # noqa: E402
import requests  # noqa: E402
import transformers  # noqa: E402
from templates import TEMPLATES  # noqa: E402

COMPARED, DRAWN_MAX = 100, 2000
# Conversations of each choice of a tool that are answered, and answers with calls that each choice must have.
ANSWERED, WITH_CALLS_MIN = 20, {"auto": 3, "required": 10, "named": 15}
AT_ONCE, TIMEOUT_S, TOKENS_MAX = 4, 60, 96
SHOWN_MAX = 3
WORDS = [
    "hello", "weather", "Zürich", "日本", "😀", "e\u0301", "<b>bold</b>", "a&b", "it's", '"q"', "\\n", "{x}", "{{ y }}", "{% if z %}",
    "line\nbreak", " tab\t", "100%", "null", "", "<tool_call>", "</tool_call>x", "<think>no</think>", "[TOOL_CALLS]", "[INST]", "<|im_end|>",
    "<|eot_id|>", "<|end|>", "<｜Assistant｜>", "</s>", "<end_of_turn>", "\u2028", "\x7f",
]  # fmt: skip
KINDS = [
    {"type": "string", "description": "A <b>text</b> of \"letters\"", "maxLength": 8},
    {"type": "integer", "minimum": 0, "maximum": 99},
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    {"enum": ["a", "b</tool_call>", 'c"}}', None]},
    {"type": "object", "properties": {"é": {"type": "null"}}, "required": ["é"], "additionalProperties": False},
    {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[a-z]{2,4}$"}], "default": None},
]


class Draw(random.Random):
    def text(self, words=6):
        return " ".join(self.choice(WORDS) for _ in range(self.randint(1, words)))

    def value(self, depth=2):
        plain = [
            lambda: self.randint(-(10**6), 10**6), lambda: self.choice([0.5, 1.0, -2.25, 1e10, 1e-7, 3.14159]), lambda: self.text(3),
            lambda: True, lambda: False, lambda: None, lambda: 2**53 + 1,
        ]  # fmt: skip
        nested = [
            lambda: [self.value(depth - 1) for _ in range(self.randint(0, 3))],
            lambda: {f"k{at}": self.value(depth - 1) for at in range(self.randint(0, 3))},
            lambda: {"z": 1, "a": {"b": []}},
        ]
        return self.choice(plain + nested if depth else plain)()

    def arguments(self):
        return {f"p{at}": self.value() for at in range(self.randint(0, 3))}

    def tool(self, at):
        properties = {f"p{at}": self.choice(KINDS) for at in range(self.randint(0, 3))}
        parameters = {"type": "object", "properties": properties, "required": list(properties)[:2], "additionalProperties": False}
        return {"type": "function", "function": {"name": f"fn_{at}", "description": self.text(), "parameters": parameters}}

    def calls(self, tools, turn):
        """One call, or several, and their results."""
        calls = [
            {
                "id": f"call{turn:04}{at}",
                "type": "function",
                "function": {"name": self.choice(tools)["function"]["name"], "arguments": self.arguments()},
            }
            for at in range(self.choice([1, 1, 1, 2, 3]))
        ]
        yield {"role": "assistant", "content": self.choice(["", "I look.", None]), "tool_calls": calls}
        for call in calls:
            result = self.choice([self.text(), json.dumps({"r": self.value()}, ensure_ascii=False), "7"])
            yield {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": result}

    def conversation(self):
        messages = [{"role": "system", "content": self.text()}] if self.random() < 0.5 else []
        tools = [self.tool(at) for at in range(self.randint(1, 3))] if self.random() < 0.8 else None
        turns = self.randint(1, 3)
        for turn in range(turns):
            messages.append({"role": "user", "content": "u " + self.text()})
            if tools and self.random() < 0.6:
                messages.extend(self.calls(tools, turn))
            if turn + 1 < turns or self.random() < 0.5:
                answer = {"role": "assistant", "content": "a " + self.text()}
                if self.random() < 0.3:
                    answer["reasoning_content"] = "I think: " + self.text()
                messages.append(answer)
        if messages[-1]["role"] == "assistant" and self.random() < 0.7:
            messages.append({"role": "user", "content": "last " + self.text()})
        return messages, tools, self.random() < 0.85


def with_texts(messages):
    """The messages with arguments as texts, as the API has them."""
    copy = json.loads(json.dumps(messages))
    for call in (call for message in copy for call in message.get("tool_calls", [])):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return copy


class Template:
    def __init__(self, folder):
        self.of = TEMPLATES[folder.name]
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        source = self.tokenizer.chat_template
        names = jinja2.meta.find_undeclared_variables(jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(source))
        assert ("tools" in names) == self.of.shows_tools, f"{folder.name}: shows_tools is not what the template says"
        self.thinks = ".thinking" in source
        call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
        probe = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        # Concatenating an object with text is an error.
        objects, texts = self.rendered(probe, None, False), self.rendered(with_texts(probe), None, False)
        self.takes_texts = isinstance(objects, TypeError) and isinstance(texts, str)

    def rendered(self, messages, tools, asks):
        try:
            return self.tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=asks, tokenize=False)
        except Exception as error:  # noqa: BLE001  # Templates refuse in many ways.
            return error

    def prompt(self, messages, tools, asks):
        """What transformers renders, or its refusal."""
        messages = with_texts(messages) if self.takes_texts else json.loads(json.dumps(messages))
        for message in messages:
            if self.thinks and "reasoning_content" in message:
                message["thinking"] = message["reasoning_content"]
        return self.rendered(messages, tools, asks)


def difference(number, got, wanted):
    at = next((at for at, (a, b) in enumerate(zip(got, wanted)) if a != b), min(len(got), len(wanted)))
    near = slice(max(0, at - 60), at + 60)
    return f"conversation {number} differs at {at}:\n    Baton        {got[near]!r}\n    transformers {wanted[near]!r}"


def compare(address, template, failures):
    """Prompts of the cluster are those of transformers, byte for byte."""
    compared, refused = collections.Counter(), 0
    for number in range(DRAWN_MAX):
        messages, tools, asks = Draw(number).conversation()
        if not template.of.shows_tools:
            tools = None
        wanted = template.prompt(messages, tools, asks)
        body = {"messages": with_texts(messages), "add_generation_prompt": asks} | ({"tools": tools} if tools else {})
        if isinstance(wanted, Exception) and refused >= COMPARED:
            continue
        answer = requests.post(f"{address}/tokenize", json=body, timeout=TIMEOUT_S)
        if isinstance(wanted, Exception):
            refused += 1
            if answer.status_code not in (200, 400):
                failures.append(f"conversation {number}: {answer.status_code} {answer.text}")
            continue
        compared["all"] += 1
        compared["tools"] += tools is not None
        compared["calls"] += any("tool_calls" in message for message in messages)
        compared["system"] += messages[0]["role"] == "system"
        if answer.status_code != 200:
            failures.append(f"conversation {number} is refused: {answer.status_code} {answer.text}")
        else:
            text = requests.post(f"{address}/detokenize", json={"tokens": answer.json()["tokens"]}, timeout=TIMEOUT_S).json()["prompt"]
            # The date may have changed.
            if text.encode() != wanted.encode() and text != (wanted := template.prompt(messages, tools, asks)):
                failures.append(difference(number, text, wanted))
        if compared["all"] == COMPARED:
            break
    assert compared["all"] == COMPARED, f"transformers renders only {compared['all']} of {DRAWN_MAX} conversations"
    return f"{number + 1} drawn, {dict(compared)} compared, {refused} of those that transformers refuses asked for"


def parts(message):
    """Content, reasoning and calls of a whole answer."""
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []]
    return message.get("content") or "", message.get("reasoning_content") or "", calls


def whole(address, body):
    answer = requests.post(f"{address}/v1/chat/completions", json=body, timeout=TIMEOUT_S)
    assert answer.status_code == 200, f"{answer.status_code} {answer.text}"
    (choice,) = answer.json()["choices"]
    return *parts(choice["message"]), choice["finish_reason"]


def streamed(address, body):
    content, reasoning, calls, reason = "", "", {}, None
    with requests.post(f"{address}/v1/chat/completions", json=body | {"stream": True}, timeout=TIMEOUT_S, stream=True) as answer:
        assert answer.status_code == 200, f"{answer.status_code} {answer.text}"
        for line in answer.iter_lines():
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line.removeprefix(b"data: "))
            assert "error" not in chunk, chunk
            for choice in chunk["choices"]:
                delta = choice["delta"]
                content += delta.get("content") or ""
                reasoning += delta.get("reasoning_content") or ""
                for part in delta.get("tool_calls") or []:
                    name, arguments = calls.get(part["index"], ("", ""))
                    function = part["function"]
                    calls[part["index"]] = (name + (function.get("name") or ""), arguments + (function.get("arguments") or ""))
                reason = choice["finish_reason"] or reason
    return content, reasoning, [calls[at] for at in sorted(calls)], reason


def answered(address, model, number, choice):
    """The failures of an answer, and its calls."""
    messages, tools, _ = Draw(number).conversation()
    named = {"type": "function", "function": {"name": tools[-1]["function"]["name"]}}
    body = {
        "model": model, "messages": with_texts(messages), "tools": tools, "tool_choice": named if choice == "named" else choice,
        "temperature": 1, "seed": number, "max_tokens": TOKENS_MAX,
    }  # fmt: skip
    said, failures = f"conversation {number}, tool_choice {choice}", []
    try:
        one, other = whole(address, body), streamed(address, body)
    except (AssertionError, requests.RequestException, json.JSONDecodeError) as error:
        return [f"{said}: {error}"], []
    if one != other:
        failures.append(f"{said} differs:\n    whole    {one}\n    streamed {other}")
    _, _, calls, reason = one
    names = [tool["function"]["name"] for tool in tools][-1 if choice == "named" else 0 :]
    for name, arguments in calls:
        if name not in names:
            failures.append(f"{said}: a call of {name!r}")
        try:
            is_object = isinstance(json.loads(arguments), dict)
        except json.JSONDecodeError:
            is_object = False
        if not is_object:
            failures.append(f"{said}: arguments {arguments!r}")
    if calls and reason != "tool_calls" or choice != "auto" and not calls and reason != "length":
        failures.append(f"{said}: {len(calls)} calls, but the reason {reason!r}")
    return failures, calls


def answer(address, template, failures):
    """Arguments always parse, and streamed and whole answers agree."""
    model = requests.get(f"{address}/v1/models", timeout=TIMEOUT_S).json()["data"][0]["id"]

    def fits(number):
        messages, tools, _ = Draw(number).conversation()
        return tools and messages[-1]["role"] == "user" and not isinstance(template.prompt(messages, tools, True), Exception)

    numbers = [number for number in range(DRAWN_MAX) if fits(number)][:ANSWERED]
    assert len(numbers) == ANSWERED, numbers
    said = []
    for choice, least in WITH_CALLS_MIN.items():
        with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
            all_of = list(pool.map(lambda number: answered(address, model, number, choice), numbers))
        failures += [failure for of, _ in all_of for failure in of]
        with_calls = sum(1 for _, calls in all_of if calls)
        if with_calls < least:
            failures.append(f"tool_choice {choice}: only {with_calls} answers have calls")
        said.append(f"{choice}: {with_calls} of {ANSWERED} with {sum(len(calls) for _, calls in all_of)} calls")
    return ", ".join(said)


def main():
    address, folder = sys.argv[1].removesuffix("/v1"), pathlib.Path(sys.argv[2])
    template, failures = Template(folder), []
    for check in (compare, answer):
        found = []
        print(f"{folder.name}: {check(address, template, found)}, {len(found)} failures", flush=True)
        failures += found[:SHOWN_MAX]
    if failures:
        sys.exit("\n".join(failures))


main()

"""Talks with a cluster through the Responses API of OpenAI's own Python client. Arguments: base URL, e.g. http://127.0.0.1:8000/v1.

Each check is a function; one that fails raises, and the traceback says what came instead.
"""

import json
import sys
import typing

import openai
import pydantic

MODEL = "smollm2-135m-instruct"
FRANCE = "What is the capital of France?"
ASK = {"model": MODEL, "input": FRANCE, "temperature": 0, "max_output_tokens": 24}


def whole(client):
    raw = client.responses.with_raw_response.create(**ASK)
    answer = raw.parse()
    assert answer.object == "response" and answer.status == "completed" and answer.error is None, answer
    assert "Paris" in answer.output_text and [item.type for item in answer.output] == ["message"], answer
    item = answer.output[0]
    assert item.role == "assistant" and item.status == "completed" and item.id.startswith("msg_"), item
    assert item.content[0].type == "output_text" and item.content[0].annotations == [], item
    usage = answer.usage
    assert usage.input_tokens == 37 and usage.total_tokens == usage.input_tokens + usage.output_tokens, usage
    assert usage.output_tokens_details.reasoning_tokens == 0 and usage.input_tokens_details.cached_tokens >= 0, usage
    assert answer.temperature == 0 and answer.max_output_tokens == 24 and answer.store is False, answer
    assert answer.tool_choice == "auto" and answer.parallel_tool_calls is True, answer
    assert answer.previous_response_id is None and answer.created_at > 1_700_000_000, answer
    assert raw.headers["x-request-id"] in answer.id, raw.headers
    return answer


def streams(client):
    text = whole(client).output_text
    for policy in ("remote", "local"):
        events = list(client.responses.create(stream=True, extra_body={"prefill_policy": policy}, **ASK))
        assert [event.sequence_number for event in events] == list(range(len(events))), events
        kinds = [event.type.removeprefix("response.") for event in events]
        deltas = kinds.count("output_text.delta")
        begin = ["created", "in_progress", "output_item.added", "content_part.added"]
        end = ["output_text.done", "content_part.done", "output_item.done", "completed"]
        assert kinds == [*begin, *["output_text.delta"] * deltas, *end] and deltas > 4, kinds
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text, events
        assert events[-4].text == events[-3].part.text == events[-2].item.content[0].text == text, events
        final = events[-1].response
        assert final.output_text == text and final.usage.input_tokens == 37 and final.status == "completed", final
        assert events[0].response.status == "in_progress" and events[0].response.output == [], events[0]
        assert len({event.response.id for event in events if hasattr(event, "response")}) == 1
    with client.responses.stream(**ASK) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == text


def ends(client):
    short = client.responses.create(**{**ASK, "max_output_tokens": 3})
    assert short.status == "incomplete" and short.incomplete_details.reason == "max_output_tokens", short
    assert short.usage.output_tokens == 3 and short.output[0].status == "incomplete", short
    last = list(client.responses.create(stream=True, **{**ASK, "max_output_tokens": 3}))[-1]
    assert last.type == "response.incomplete" and last.response.output_text == short.output_text, last


def turns(client):
    """Items of a conversation, among them the output of a response."""
    first = client.responses.create(**ASK)
    again = [{"role": "user", "content": FRANCE}]
    assert client.responses.create(**{**ASK, "input": again}).output_text == first.output_text
    said = [*again, *first.output, {"role": "user", "content": [{"type": "input_text", "text": "And of Spain?"}]}]
    second = client.responses.create(instructions="Answer in one sentence.", **{**ASK, "input": said})
    assert "Madrid" in second.output_text and second.usage.input_tokens > first.usage.total_tokens, second


def tool(name, **properties):
    parameters = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "name": name, "parameters": parameters, "strict": True}


WEATHER = tool("get_weather", city={"enum": ["Paris", "Rome"]}, days={"type": "integer", "minimum": 1, "maximum": 7})
TIME = tool("get_time", zone={"type": "string", "maxLength": 8})


def tools(client):
    ask = {**ASK, "tools": [WEATHER, TIME], "max_output_tokens": 300, "parallel_tool_calls": False}
    named = {"type": "function", "name": "get_weather"}
    for choice in ("required", named):
        answer = client.responses.create(tool_choice=choice, **ask)
        assert answer.status == "completed" and len(answer.output) == 1, answer
        call = answer.output[0]
        assert call.type == "function_call" and call.call_id.startswith("call_") and call.id != call.call_id, call
        arguments = json.loads(call.arguments)
        if choice == named:
            assert call.name == "get_weather" and arguments["city"] in ("Paris", "Rome"), call
            assert answer.tool_choice.name == "get_weather" and answer.parallel_tool_calls is False, answer
        events = list(client.responses.create(stream=True, tool_choice=choice, **ask))
        kinds = [event.type.removeprefix("response.") for event in events]
        arguments = ["function_call_arguments.delta", "function_call_arguments.done"]
        items = ["output_item.added", *arguments, "output_item.done"]
        assert kinds == ["created", "in_progress", *items, "completed"], kinds
        assert events[4].arguments == events[-1].response.output[0].arguments == call.arguments, events
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}
    said = [{"role": "user", "content": FRANCE}, call, result]
    after = client.responses.create(**{**ask, "input": said, "max_output_tokens": 8})
    before = client.responses.create(**{**ask, "max_output_tokens": 1, "tool_choice": "auto"})
    assert after.usage.input_tokens > before.usage.input_tokens + 30, (before, after)


class Person(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    name: str = pydantic.Field(max_length=20)
    trade: typing.Literal["farmer", "baker"]


def forms(client):
    asked = {"model": MODEL, "input": "Invent a person.", "temperature": 0, "max_output_tokens": 200}
    person = client.responses.parse(text_format=Person, **asked).output_parsed
    assert isinstance(person, Person), person
    with client.responses.stream(text_format=Person, **asked) as stream:
        stream.until_done()
        assert stream.get_final_response().output_parsed == person
    anything = client.responses.create(text={"format": {"type": "json_object"}}, **asked)
    assert anything.status == "incomplete" or isinstance(json.loads(anything.output_text), dict), anything


def refuses(client):
    def check(error, param, code=None, says="", **more):
        try:
            client.responses.create(**{**ASK, **more})
        except error as refused:
            assert (refused.param, refused.code) == (param, code) and says in str(refused), refused
        else:
            raise AssertionError(f"{more} was accepted")

    bad, unsupported = openai.BadRequestError, "unsupported_parameter"
    check(bad, "previous_response_id", unsupported, "not stored", previous_response_id="resp_1")
    check(bad, "conversation", unsupported, "not stored", conversation="conv_1")
    image = [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x", "detail": "auto"}]}]
    check(bad, "input[0].content[0]", unsupported, input=image)
    check(bad, "tools[0].type", unsupported, tools=[{"type": "web_search"}])
    check(bad, "background", unsupported, background=True)
    check(bad, "temperature", says="0 to 2", temperature=3)
    check(bad, "max_output_tokens", "context_length_exceeded", max_output_tokens=100_000)
    check(openai.NotFoundError, "model", "model_not_found", "nobody", model="nobody")
    include = ["reasoning.encrypted_content"]
    settings = {"include": include, "store": False, "metadata": {"a": "b"}, "user": "me", "reasoning": {"effort": "low"}}
    client.responses.create(**{**ASK, "max_output_tokens": 1, **settings})


def main():
    client = openai.OpenAI(base_url=sys.argv[1], api_key="unused", max_retries=0, timeout=120)
    for check in [whole, streams, ends, turns, tools, forms, refuses]:
        check(client)
        print(f"responses, {check.__name__}: ok", flush=True)


if __name__ == "__main__":
    main()

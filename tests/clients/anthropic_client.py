"""Talks with a cluster through Anthropic's own Python client. Arguments: base URL, e.g. http://127.0.0.1:8000.

Each check is a function; one that fails raises, and the traceback says what came instead.
"""

import sys
import typing
import uuid

import anthropic
import httpx
import pydantic

MODEL = "smollm2-135m-instruct"
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
ASK = {"model": MODEL, "messages": FRANCE, "max_tokens": 24, "temperature": 0}
PROMPT = 37
CASES = 0


def case(passed, said):
    """One checked fact."""
    global CASES
    CASES += 1
    assert passed, said


def models(client):
    listed = list(client.models.list())
    case([model.id for model in listed] == [MODEL] and listed[0].type == "model", listed)
    case(listed[0].created_at.year > 2020 and client.models.retrieve(MODEL) == listed[0], listed)


def whole(client):
    raw = client.messages.with_raw_response.create(**ASK)
    message = raw.parse()
    case(message.type == "message" and message.role == "assistant" and message.model, message)
    case([block.type for block in message.content] == ["text"] and "Paris" in message.content[0].text, message)
    case((message.stop_reason, message.stop_sequence) == ("end_turn", None), message)
    usage = message.usage
    read, written = usage.cache_read_input_tokens, usage.cache_creation_input_tokens
    case(usage.input_tokens + read + written == PROMPT and usage.output_tokens > 4, usage)
    case(message._request_id and message._request_id in message.id, message)
    case(raw.headers["x-baton-cache-hit"] == str(100 * read // PROMPT), raw.headers)
    case(message.timings["ttft_us"] > 0 and isinstance(message.seed, int), message)
    return message.content[0].text


def streams(client):
    """Every event of the raw stream, in order, and what the helper makes of it."""
    text = whole(client)
    for policy in ("remote", "local"):
        events = list(client.messages.create(stream=True, extra_body={"prefill_policy": policy}, **ASK))
        kinds = [event.type for event in events]
        deltas = kinds.count("content_block_delta")
        inside = ["content_block_start", *["content_block_delta"] * deltas, "content_block_stop"]
        case(kinds == ["message_start", *inside, "message_delta", "message_stop"] and deltas > 4, kinds)
        case("".join(event.delta.text for event in events[2 : 2 + deltas]) == text, events)
        start, end = events[0].message, events[-2]
        known = start.usage.input_tokens + (start.usage.cache_read_input_tokens or 0)
        case(start.content == [] and start.stop_reason is None and known == PROMPT, start)
        usage = end.usage
        sum_of = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
        case(sum_of == PROMPT and usage.output_tokens >= deltas and end.delta.stop_reason == "end_turn", end)
    with client.messages.stream(**ASK) as stream:
        case("".join(stream.text_stream) == text, text)
        final = stream.get_final_message()
    case(final.content[0].text == text and final.stop_reason == "end_turn", final)
    case(final.usage.output_tokens == whole_tokens(client), final.usage)


def whole_tokens(client):
    return client.messages.create(**ASK).usage.output_tokens


def ends(client):
    short = client.messages.create(**{**ASK, "max_tokens": 3})
    case((short.stop_reason, short.usage.output_tokens) == ("max_tokens", 3), short)
    stopped = client.messages.create(stop_sequences=["nothing like it", "is Par"], **ASK)
    case((stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "is Par"), stopped)
    case(stopped.content[0].text == "The capital of France ", stopped)
    with client.messages.stream(stop_sequences=["is Par"], **ASK) as stream:
        final = stream.get_final_message()
    case((final.stop_sequence, final.content[0].text) == ("is Par", "The capital of France "), final)


def system(client):
    def tokens(**more):
        return client.messages.count_tokens(model=MODEL, messages=FRANCE, **more).input_tokens

    case(tokens() == PROMPT, tokens())
    block = {"type": "text", "text": "Answer with one word.", "cache_control": {"type": "ephemeral"}}
    case(tokens(system="Answer with one word.") == tokens(system=[block]) != PROMPT, tokens(system=[block]))
    answer = client.messages.create(system=[block], **ASK)
    usage = answer.usage
    counted = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    case(counted == tokens(system=[block]), answer)
    tool = {"name": "get_weather", "input_schema": {"type": "object"}}
    case(tokens(tools=[tool]) > PROMPT + 40, tokens(tools=[tool]))
    case(tokens(tools=[tool], tool_choice={"type": "none"}) == PROMPT, "tools that may not be called are not shown")


def turns(client):
    """A conversation in blocks is the conversation in texts."""

    def tokens(messages):
        return client.messages.count_tokens(model=MODEL, messages=messages).input_tokens

    said = [*FRANCE, {"role": "assistant", "content": "Paris."}, {"role": "user", "content": "What is the capital of Spain?"}]
    blocks = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in said]
    case(tokens(said) == tokens(blocks), (tokens(said), tokens(blocks)))
    answer = client.messages.create(**{**ASK, "messages": blocks})
    case("Madrid" in answer.content[0].text, answer)
    two = [FRANCE[0], {"role": "user", "content": "In one word."}]
    case(tokens(two) < tokens(FRANCE) + tokens(two[1:]) - 20, "neighbours of one role are one turn")


def continues(client):
    """An answer that the client has begun goes on as if the model had said it."""
    said = client.messages.create(**ASK)
    whole = said.content[0].text
    begun = {"role": "assistant", "content": whole[: len(whole) // 2].rstrip()}
    rest = client.messages.create(**{**ASK, "messages": [*FRANCE, begun]})
    case(begun["content"] + rest.content[0].text == whole, (begun, rest, whole))
    counted = client.messages.count_tokens(model=MODEL, messages=[*FRANCE, begun]).input_tokens
    case(counted == rest.usage.input_tokens + (rest.usage.cache_read_input_tokens or 0) + (rest.usage.cache_creation_input_tokens or 0), rest)


def caches(client):
    long = [{"role": "user", "content": "One two three four five six seven eight nine ten. " * 30}]
    control = {"type": "ephemeral", "ttl": "1h"}
    ask = {**ASK, "messages": long, "max_tokens": 2, "cache_control": control}

    def usage(salt):
        return client.messages.create(extra_body={"cache_salt": salt}, **ask).usage

    mine = uuid.uuid4().hex
    first = usage(mine)
    case(first.cache_creation_input_tokens > 300 and first.cache_read_input_tokens == 0, first)
    again = usage(mine)
    case(again.cache_read_input_tokens >= first.cache_creation_input_tokens - 16, again)
    case(again.input_tokens + again.cache_read_input_tokens + again.cache_creation_input_tokens > 300, again)
    case(usage(uuid.uuid4().hex).cache_read_input_tokens == 0, "other salts share nothing")
    with client.messages.stream(extra_body={"cache_salt": mine}, **ask) as stream:
        started = next(iter(stream)).message.usage
        case(started.cache_read_input_tokens == again.cache_read_input_tokens, started)
        stream.until_done()


def sampling(client):
    def text(seed):
        drawn = {**ASK, "temperature": 1.0, "top_p": 0.95, "top_k": 50, "extra_body": {"seed": seed}}
        return client.messages.create(**drawn).content[0].text

    case(text(7) == text(7), text(7))
    case(len({text(seed) for seed in range(5)}) > 1, text(0))


def tool(name, **properties):
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"name": name, "description": f"Calls {name}.", "input_schema": schema}


WEATHER = tool("get_weather", city={"enum": ["Paris", "Rome"]}, days={"type": "integer", "minimum": 1, "maximum": 7})
TIME = tool("get_time", zone={"type": "string", "maxLength": 8})


def tools(client):
    """Required calls, streamed or not, and the results in the next turn."""
    ask = {**ASK, "tools": [WEATHER, {**TIME, "cache_control": {"type": "ephemeral"}}], "max_tokens": 300}
    named = {"type": "tool", "name": "get_weather"}
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, named):
        message = client.messages.create(tool_choice=choice, **ask)
        case(message.stop_reason == "tool_use" and len(message.content) == 1, message)
        call = message.content[0]
        case(call.type == "tool_use" and call.id.startswith("toolu_"), call)
        if call.name == "get_weather":
            case(call.input["city"] in ("Paris", "Rome") and 1 <= call.input["days"] <= 7, call)
        else:
            case(choice is not named and call.name == "get_time" and len(call.input["zone"]) <= 8, call)
        pieces = []
        with client.messages.stream(tool_choice=choice, **ask) as stream:
            for event in stream:
                if event.type == "input_json":
                    pieces.append(event.partial_json)
            final = stream.get_final_message()
        streamed = final.content[0]
        case((streamed.name, streamed.input) == (call.name, call.input) and pieces, final)
        case(final.stop_reason == "tool_use", final)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "Rain."}]}
    turns = [*FRANCE, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    after = client.messages.count_tokens(model=MODEL, messages=turns, tools=[WEATHER, TIME]).input_tokens
    before = client.messages.count_tokens(model=MODEL, messages=FRANCE, tools=[WEATHER, TIME]).input_tokens
    case(after > before + 30, (before, after))
    case(client.messages.create(**{**ask, "messages": turns, "max_tokens": 8}).content, "an answer to the result")


class Person(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    name: str = pydantic.Field(max_length=20)
    trade: typing.Literal["farmer", "baker"]


def forms(client):
    schema = Person.model_json_schema()
    asked = {**ASK, "messages": [{"role": "user", "content": "Invent a person."}], "max_tokens": 200}
    form = {"format": {"type": "json_schema", "schema": schema}}
    message = client.messages.create(output_config=form, **asked)
    case(Person.model_validate_json(message.content[0].text), message)
    parsed = client.messages.parse(output_format=Person, **asked)
    case(isinstance(parsed.parsed_output, Person), parsed)


def refuses(client):
    def check(error, kind, says, **more):
        try:
            client.messages.create(**{**ASK, **more})
        except error as refused:
            told = refused.body["error"]
            case(refused.body["type"] == "error" and told["type"] == kind and says in told["message"], refused.body)
            case(refused.request_id, refused)
        else:
            raise AssertionError(f"{more} was accepted")

    bad, invalid = anthropic.BadRequestError, "invalid_request_error"
    image = {"type": "image", "source": {"type": "url", "url": "http://x"}}
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}}
    check(bad, invalid, "not supported", messages=[{"role": "user", "content": [image]}])
    check(bad, invalid, "not supported", messages=[{"role": "user", "content": [document]}])
    check(bad, invalid, "messages[0].role", messages=[{"role": "king", "content": "x"}])
    used = [{"type": "tool_use", "id": "t", "name": "get", "input": {}}]
    check(bad, invalid, "continues", messages=[*FRANCE, {"role": "assistant", "content": used}])
    check(bad, invalid, "tools[0].type", tools=[{"type": "web_search_20250305", "name": "web_search"}])
    check(bad, invalid, "none of the tools", tools=[WEATHER], tool_choice={"type": "tool", "name": "other"})
    check(bad, invalid, "0 to 2", temperature=3)
    check(bad, invalid, "context length", max_tokens=100_000)
    check(anthropic.NotFoundError, "not_found_error", "nobody", model="nobody")
    check(anthropic.RequestTooLargeError, "request_too_large", "limit", system="x" * (17 << 20))
    nothing = httpx.post(f"{str(client.base_url).rstrip('/')}/v1/messages", json={"model": MODEL, "messages": FRANCE})
    case(nothing.status_code == 400 and "max_tokens is required" in nothing.text, nothing.text)
    ignored = {"metadata": {"user_id": "me"}, "service_tier": "auto", "extra_body": {"colour": 1}}
    answer = client.messages.with_raw_response.create(**{**ASK, "max_tokens": 1, **ignored})
    case(answer.headers["x-baton-ignored-fields"] == "colour", answer.headers)


def main():
    client = anthropic.Anthropic(base_url=sys.argv[1], api_key="unused", max_retries=0, timeout=120)
    for check in [models, whole, streams, ends, system, turns, continues, caches, sampling, tools, forms, refuses]:
        check(client)
        print(f"{check.__name__}: ok", flush=True)
    assert CASES >= 40, CASES
    print(f"{CASES} cases")


if __name__ == "__main__":
    main()

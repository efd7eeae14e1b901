"""Talks with a cluster through LiteLLM, as an endpoint of OpenAI's API and as one of Anthropic's. Argument: address, e.g. http://127.0.0.1:8000.

Each check is a function; one that fails raises, and the traceback says what came instead.
"""

import asyncio
import json
import os
import sys

# The prices of models that LiteLLM would download otherwise.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm

# Its advice about every error that a check asks for.
litellm.suppress_debug_info = True
MODEL = "smollm2-135m-instruct"
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
PROMPT = 37
# Prefix of the model's name, and what stands after the address.
OPENAI, TEXT, ANTHROPIC = ("openai", "/v1"), ("text-completion-openai", "/v1"), ("anthropic", "")
CITIES = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"], "additionalProperties": False}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Weather of a city.", "parameters": CITIES}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "trade": {"enum": ["farmer", "baker"]}},
    "required": ["name", "trade"],
    "additionalProperties": False,
}


def settings(address, api, **more):
    name, path = api
    known = {"model": f"{name}/{MODEL}", "api_base": address + path, "api_key": "unused"}
    return {**known, "timeout": 120, "num_retries": 0, "max_retries": 0, "temperature": 0, **more}


def text_of(answer):
    return answer.choices[0].message.content


def chat(address):
    texts = set()
    for api in (OPENAI, ANTHROPIC):
        ask = settings(address, api, messages=FRANCE, max_tokens=24)
        answer = litellm.completion(**ask)
        texts.add(text_of(answer))
        assert "Paris" in text_of(answer) and answer.choices[0].finish_reason == "stop", answer
        usage = answer.usage
        assert usage.prompt_tokens == PROMPT and usage.completion_tokens > 4, usage
        assert usage.total_tokens == PROMPT + usage.completion_tokens, usage
        short = litellm.completion(**{**ask, "max_tokens": 3})
        assert (short.choices[0].finish_reason, short.usage.completion_tokens) == ("length", 3), short
        stopped = litellm.completion(**ask, stop=["is Par"])
        assert text_of(stopped) == "The capital of France ", stopped
        assert text_of(asyncio.run(litellm.acompletion(**ask))) == text_of(answer)
    assert len(texts) == 1, texts


def streams(address):
    for api in (OPENAI, ANTHROPIC):
        ask = settings(address, api, messages=FRANCE, max_tokens=24)
        whole = litellm.completion(**ask)
        for policy in ("remote", "local"):
            more = {"stream_options": {"include_usage": True}, "extra_body": {"prefill_policy": policy}}
            chunks = list(litellm.completion(stream=True, **more, **ask))
            pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
            assert len(pieces) > 4 and "".join(pieces) == text_of(whole), (policy, pieces)
            assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"], chunks
            usage = litellm.stream_chunk_builder(chunks, messages=FRANCE).usage
            counted = (usage.prompt_tokens, usage.completion_tokens)
            assert counted == (PROMPT, whole.usage.completion_tokens), (policy, usage)

    async def streamed(ask):
        chunks = [chunk async for chunk in await litellm.acompletion(stream=True, **ask)]
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    assert asyncio.run(streamed(ask)) == text_of(whole)


def completions(address):
    ask = settings(address, TEXT, prompt="The capital of France is", max_tokens=8)
    answer = litellm.text_completion(logprobs=2, **ask)
    choice = answer.choices[0]
    assert "Paris" in choice.text and choice.finish_reason == "length", answer
    assert answer.usage.prompt_tokens == 5 and answer.usage.completion_tokens == 8, answer
    assert len(choice.logprobs.token_logprobs) == 8 and max(choice.logprobs.token_logprobs) <= 0, choice
    pieces = [chunk.choices[0].text or "" for chunk in litellm.text_completion(stream=True, **ask)]
    assert "".join(pieces) == choice.text, (pieces, choice)


def tools(address):
    calls = []
    for api in (OPENAI, ANTHROPIC):
        ask = settings(address, api, messages=FRANCE, tools=[WEATHER], max_tokens=200)
        answer = litellm.completion(tool_choice=NAMED, **ask)
        (call,) = answer.choices[0].message.tool_calls
        arguments = json.loads(call.function.arguments)
        assert call.function.name == "get_weather" and arguments["city"] in ("Paris", "Rome"), answer
        assert answer.choices[0].finish_reason == "tool_calls" and call.id, answer
        chunks = list(litellm.completion(tool_choice=NAMED, stream=True, **ask))
        (same,) = litellm.stream_chunk_builder(chunks, messages=FRANCE).choices[0].message.tool_calls
        assert same.function == call.function, (same, call)
        forced = litellm.completion(tool_choice="required", **ask).choices[0].message.tool_calls
        assert forced and {c.function.name for c in forced} == {"get_weather"}, forced
        result = {"role": "tool", "tool_call_id": call.id, "content": "Rain."}
        after = litellm.completion(**{**ask, "messages": [*FRANCE, answer.choices[0].message, result], "max_tokens": 8})
        assert after.usage.prompt_tokens > answer.usage.prompt_tokens, (answer, after)
        calls.append((arguments, after.usage.prompt_tokens))
    # Both APIs make the same prompts.
    assert calls[0] == calls[1], calls


def forms(address):
    form = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
    for api in (OPENAI, ANTHROPIC):
        ask = settings(address, api, messages=[{"role": "user", "content": "Invent a person."}], max_tokens=200)
        person = json.loads(text_of(litellm.completion(response_format=form, **ask)))
        assert set(person) == {"name", "trade"} and person["trade"] in ("farmer", "baker"), person


def errors(address):
    def check(error, says, api, **more):
        try:
            litellm.completion(**settings(address, api, messages=FRANCE, **more))
        except error as refused:
            assert says in str(refused), refused
        else:
            raise AssertionError(f"{more} was accepted")

    for api in (OPENAI, ANTHROPIC):
        check(litellm.NotFoundError, "nobody", api, model=f"{api[0]}/nobody")
        check(litellm.BadRequestError, "temperature", api, temperature=5)
    # What LiteLLM's fallbacks to models of longer contexts look for.
    check(litellm.ContextWindowExceededError, "8192 tokens", OPENAI, max_tokens=100_000)


def main():
    address = sys.argv[1]
    for check in (chat, streams, completions, tools, forms, errors):
        check(address)
        print(f"litellm, {check.__name__}: ok", flush=True)


main()

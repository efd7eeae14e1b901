"""Talks with a cluster through OpenAI's own Python client. Arguments: base URL, e.g. http://127.0.0.1:8000/v1.

Each check is a function; one that fails raises, and the traceback says what came instead.
"""

import json
import re
import sys
import typing

import openai
import pydantic

MODEL = "smollm2-135m-instruct"
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0, "model": MODEL}


def models(client):
    listed = [model.id for model in client.models.list()]
    assert MODEL in listed, listed
    assert client.models.retrieve(MODEL).id == MODEL


def chat(client):
    raw = client.chat.completions.with_raw_response.create(messages=FRANCE, **GREEDY)
    answer = raw.parse()
    choice = answer.choices[0]
    assert "Paris" in choice.message.content and choice.message.role == "assistant", answer
    assert choice.finish_reason == "stop" and answer.object == "chat.completion", answer
    usage = answer.usage
    assert usage.prompt_tokens == 37 and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, usage
    assert usage.prompt_tokens_details.cached_tokens == 0 and raw.headers["x-baton-cache-hit"] == "0", raw.headers
    assert raw.headers["x-request-id"] in answer.id, raw.headers


def chat_stream(client):
    whole = client.chat.completions.create(messages=FRANCE, **GREEDY).choices[0].message.content
    for policy in ("remote", "local"):
        chunks = list(
            client.chat.completions.create(
                messages=FRANCE,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"prefill_policy": policy},
                **GREEDY,
            )
        )
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == whole and len(chunks) > 4, (policy, text, whole)
        assert chunks[0].choices[0].delta.role == "assistant", chunks[0]
        assert chunks[-2].choices[0].finish_reason == "stop", chunks[-2]
        assert chunks[-1].choices == [] and chunks[-1].usage.prompt_tokens == 37, chunks[-1]
        assert len({c.id for c in chunks}) == 1 and all(c.object == "chat.completion.chunk" for c in chunks)


def samples(client):
    drawn = {"messages": FRANCE, "model": MODEL, "temperature": 1, "seed": 5, "max_tokens": 12}
    whole = client.chat.completions.create(n=3, **drawn)
    texts = [choice.message.content for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2] and len(set(texts)) == 3, whole
    assert whole.usage.prompt_tokens == 37, whole.usage
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(n=3, stream=True, **drawn):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts, (streamed, texts)
    assert client.chat.completions.create(**drawn).choices[0].message.content == texts[0], texts


def chat_stream_helper(client):
    with client.chat.completions.stream(messages=FRANCE, **GREEDY) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert "Paris" in final.choices[0].message.content, final


def roles_and_parts(client):
    messages = [
        {"role": "developer", "content": "Answer with one word."},
        {"role": "user", "content": [{"type": "text", "text": "The capital of "}, {"type": "text", "text": "France?"}]},
    ]
    answer = client.chat.completions.create(messages=messages, max_completion_tokens=3, **GREEDY)
    assert answer.usage.completion_tokens <= 3 and answer.choices[0].message.content, answer


def chat_logprobs(client):
    answer = client.chat.completions.create(messages=FRANCE, logprobs=True, top_logprobs=3, max_tokens=4, **GREEDY)
    content = answer.choices[0].logprobs.content
    assert len(content) == 4 and answer.choices[0].finish_reason == "length", answer
    for token in content:
        best = token.top_logprobs[0]
        assert len(token.top_logprobs) == 3 and token.logprob <= 0, token
        assert (best.token, best.logprob) == (token.token, token.logprob), token
        assert bytes(token.bytes).decode() == token.token, token
    assert "".join(t.token for t in content) == answer.choices[0].message.content, answer


def completion(client):
    prompt = "The capital of France is"
    whole = client.completions.create(prompt=prompt, max_tokens=8, **GREEDY)
    assert "Paris" in whole.choices[0].text and whole.object == "text_completion", whole
    parts = client.completions.create(prompt=prompt, max_tokens=8, stream=True, **GREEDY)
    assert "".join(c.choices[0].text for c in parts) == whole.choices[0].text
    assert client.completions.create(prompt=prompt, **GREEDY).usage.completion_tokens == 16


def completion_of_tokens(client):
    extra = {"return_token_ids": True}
    first = client.completions.create(prompt="The capital of France is", max_tokens=4, extra_body=extra, **GREEDY)
    ids = first.choices[0].prompt_token_ids
    for prompt in (ids, [ids]):
        again = client.completions.create(prompt=prompt, max_tokens=4, logprobs=2, extra_body=extra, **GREEDY)
        assert again.choices[0].text == first.choices[0].text, (again, first)
        assert again.choices[0].token_ids == first.choices[0].token_ids, (again, first)
    logprobs = again.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == 4 and logprobs.text_offset[0] == 0, logprobs
    assert all(len(top) == 2 for top in logprobs.top_logprobs), logprobs


def echo(client):
    # An answer given back as the end of a prompt has the log-probabilities with which it was generated.
    prompt = "The capital of France is"
    ids = {"return_token_ids": True}
    first = client.completions.create(prompt=prompt, max_tokens=6, logprobs=2, extra_body=ids, **GREEDY)
    choice, whole = first.choices[0], first.choices[0].prompt_token_ids + first.choices[0].token_ids
    head = len(choice.prompt_token_ids)
    for policy in ("remote", "local", "local"):
        extra = {"prefill_policy": policy}
        echoed = client.completions.create(
            prompt=whole, echo=True, max_tokens=0, logprobs=2, extra_body=extra, **GREEDY
        )
        shown, logprobs = echoed.choices[0], echoed.choices[0].logprobs
        assert shown.text == prompt + choice.text and shown.finish_reason == "length", shown
        assert echoed.usage.completion_tokens == 0 and echoed.usage.prompt_tokens == len(whole), echoed.usage
        assert echoed.usage.prompt_tokens_details.cached_tokens == 0, echoed.usage
        assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None, logprobs
        assert logprobs.token_logprobs[head:] == choice.logprobs.token_logprobs, (policy, logprobs, choice)
        assert logprobs.top_logprobs[head:] == choice.logprobs.top_logprobs, (policy, logprobs, choice)
        assert "".join(logprobs.tokens) == shown.text, logprobs
        starts = [sum(map(len, logprobs.tokens[:at])) for at in range(len(whole))]
        assert logprobs.text_offset == starts, logprobs
    drawn = {"model": MODEL, "temperature": 1, "seed": 5, "max_tokens": 4, "n": 2, "echo": True, "logprobs": 1}
    prompts = [prompt, "One, two"]
    full = client.completions.create(prompt=prompts, **drawn).choices
    plain = client.completions.create(prompt=prompts, **{**drawn, "echo": False}).choices
    streamed, logged = [""] * 4, [[] for _ in range(4)]
    for chunk in client.completions.create(prompt=prompts, stream=True, **drawn):
        for part in chunk.choices:
            if not streamed[part.index]:
                assert part.text == prompts[part.index // 2], part
            streamed[part.index] += part.text
            logged[part.index] += part.logprobs.token_logprobs if part.logprobs else []
    for at, (shown, bare) in enumerate(zip(full, plain, strict=True)):
        assert shown.text == prompts[at // 2] + bare.text == streamed[at], (shown, bare, streamed)
        assert shown.logprobs.token_logprobs == logged[at], (shown, logged)
        assert shown.logprobs.token_logprobs[-4:] == bare.logprobs.token_logprobs, (shown, bare)


def prompt_logprobs(client):
    extra = {"prompt_logprobs": 2, "return_token_ids": True}
    text = client.completions.create(prompt="The capital of France is", max_tokens=1, extra_body=extra, **GREEDY)
    chat = client.chat.completions.create(messages=FRANCE, max_tokens=1, extra_body=extra, **GREEDY)
    of_text, of_chat = text.choices[0].prompt_logprobs, chat.prompt_logprobs
    for ids, scored in ((text.choices[0].prompt_token_ids, of_text), (chat.prompt_token_ids, of_chat)):
        assert scored[0] is None and len(scored) == len(ids) == 1 + len(scored[1:]), scored
        for token, entry in zip(ids[1:], scored[1:], strict=True):
            own = entry[str(token)]
            ranks = sorted(one["rank"] for one in entry.values())
            assert ranks[:2] == [1, 2] and len(entry) == 2 + (own["rank"] > 2) and own["logprob"] <= 0, (token, entry)
    assert "".join(entry[str(id)]["decoded_token"] for id, entry in zip(ids[1:], of_chat[1:])).endswith("assistant\n")
    assert chat.usage.prompt_tokens_details.cached_tokens == 0, chat.usage


def several_prompts(client):
    prompts = ["The capital of France is", "One, two, three,", "The capital of France is a city"]
    drawn = {"model": MODEL, "temperature": 1, "seed": 5, "max_tokens": 6}
    alone = [client.completions.create(prompt=prompt, n=2, **drawn) for prompt in prompts]
    texts = [choice.text for answer in alone for choice in answer.choices]
    whole = client.completions.create(prompt=prompts, n=2, extra_body={"return_token_ids": True}, **drawn)
    assert [choice.index for choice in whole.choices] == list(range(6)), whole
    assert [choice.text for choice in whole.choices] == texts, (whole, texts)
    assert whole.usage.prompt_tokens == sum(answer.usage.prompt_tokens for answer in alone), whole.usage
    assert whole.usage.completion_tokens == 36, whole.usage
    ids = [whole.choices[2 * prompt].prompt_token_ids for prompt in range(3)]
    for policy in ("remote", "local"):
        streamed = [""] * 6
        asked = {"prompt": ids, "n": 2, "stream": True, "extra_body": {"prefill_policy": policy}}
        for chunk in client.completions.create(**asked, **drawn):
            for choice in chunk.choices:
                streamed[choice.index] += choice.text
        assert streamed == texts, (policy, streamed, texts)


def best_of(client):
    drawn = {"model": MODEL, "prompt": "One day", "temperature": 1, "seed": 5, "max_tokens": 6}
    every = client.completions.create(n=5, logprobs=0, **drawn)

    def mean(choice):
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    texts = [choice.text for choice in sorted(every.choices, key=mean, reverse=True)]
    best = client.completions.create(n=2, best_of=5, **drawn)
    assert [choice.text for choice in best.choices] == texts[:2], (best, texts)
    assert best.choices[0].logprobs is None and best.usage.completion_tokens == every.usage.completion_tokens, best


def continued(client):
    begun = FRANCE + [{"role": "assistant", "content": "The capital of France is"}]
    whole = client.chat.completions.create(messages=FRANCE, **GREEDY).choices[0].message.content
    rest = client.chat.completions.create(messages=begun, extra_body={"continue_final_message": True}, **GREEDY)
    assert begun[-1]["content"] + rest.choices[0].message.content == whole, (rest, whole)
    bare = client.chat.completions.create(
        messages=FRANCE, max_tokens=1, extra_body={"add_generation_prompt": False}, **GREEDY
    )
    # Without the control token, the two tokens of "assistant" and the line break.
    assert bare.usage.prompt_tokens == 37 - 4, bare.usage


def truncated(client):
    ids = {"return_token_ids": True}
    whole = client.completions.create(prompt="Now, the capital of France is", max_tokens=4, extra_body=ids, **GREEDY)
    kept = whole.choices[0].prompt_token_ids[-5:]
    cut = {"truncate_prompt_tokens": 5, **ids}
    short = client.completions.create(prompt="Now, the capital of France is", max_tokens=4, extra_body=cut, **GREEDY)
    assert short.choices[0].prompt_token_ids == kept and short.usage.prompt_tokens == 5, short
    assert short.choices[0].text == client.completions.create(prompt=kept, max_tokens=4, **GREEDY).choices[0].text


def stops(client):
    for stop in ("Paris", ["nothing like it", "Paris"]):
        answer = client.chat.completions.create(messages=FRANCE, stop=stop, **GREEDY).choices[0]
        assert answer.finish_reason == "stop" and answer.message.content == "The capital of France is ", answer
    parts = client.chat.completions.create(messages=FRANCE, stop="is Par", stream=True, **GREEDY)
    assert "".join(c.choices[0].delta.content or "" for c in parts) == "The capital of France "


def sampling(client):
    def text(seed):
        settings = {"temperature": 1.0, "top_p": 0.95, "presence_penalty": 0.2, "frequency_penalty": 0.1}
        answer = client.chat.completions.create(
            model=MODEL, messages=FRANCE, max_tokens=24, seed=seed, extra_body={"top_k": 50}, **settings
        )
        return answer.choices[0].message.content

    assert text(7) == text(7)
    assert len({text(seed) for seed in range(6)}) > 1


def refuses(client):
    def check(error, create, param=None, code=None, says="", **settings):
        try:
            create(**{"model": MODEL, **settings})
        except error as refused:
            assert (refused.param, refused.code) == (param, code) and says in str(refused), refused
        else:
            raise AssertionError(f"{settings} was accepted")

    chat, completion = client.chat.completions.create, client.completions.create
    bad = openai.BadRequestError
    unsupported = "unsupported_parameter"
    check(bad, chat, "n", says="n must be 1 to 128", messages=FRANCE, n=129)
    check(bad, chat, "temperature", says="0 to 2", messages=FRANCE, temperature=3)
    check(bad, chat, "max_tokens", says="at least 1", messages=FRANCE, max_tokens=0)
    check(bad, chat, "echo", unsupported, messages=FRANCE, extra_body={"echo": True})
    streamed = {"stream": True, "extra_body": {"prompt_logprobs": 1}}
    check(bad, chat, "prompt_logprobs", says="not in streams", messages=FRANCE, **streamed)
    check(bad, chat, "messages", messages=[])
    check(bad, chat, "messages[0].role", messages=[{"role": "king", "content": "x"}])
    image = [{"type": "image_url", "image_url": {"url": "http://x"}}]
    check(bad, chat, "messages[0].content[0]", unsupported, messages=[{"role": "user", "content": image}])
    check(bad, chat, "response_format", unsupported, messages=FRANCE, response_format={"type": "structural_tag"})
    check(bad, chat, "tools[0].type", unsupported, messages=FRANCE, tools=[{"type": "web_search"}])
    tool = {"type": "function", "function": {"name": "f"}}
    other = {"type": "function", "function": {"name": "g"}}
    check(bad, chat, "tool_choice", messages=FRANCE, tools=[tool], tool_choice=other)
    check(bad, completion, "prompt", says="vocabulary", prompt=[1_000_000])
    check(bad, completion, "prompt[1]", says="vocabulary", prompt=[[1], [1_000_000]])
    check(bad, completion, "suffix", unsupported, "fills in the middle", prompt="x", suffix="y")
    check(bad, completion, "max_tokens", "context_length_exceeded", prompt="x", max_tokens=100_000)
    check(openai.NotFoundError, chat, "model", "model_not_found", "nobody", messages=FRANCE, model="nobody")
    # Without effect on tokens, so ignored.
    chat(messages=FRANCE, model=MODEL, max_tokens=1, user="me", metadata={"a": "b"}, store=False, service_tier="auto")


def unknown_fields(client):
    settings = {"messages": FRANCE, "model": MODEL, "max_tokens": 1, "temperature": 0, "extra_body": {"colour": 1, "size": None}}
    answer = client.chat.completions.with_raw_response.create(**settings)
    assert answer.headers["x-baton-ignored-fields"] == "colour, size", answer.headers
    text = answer.parse().choices[0].message.content
    parts = [{"type": "text", "text": FRANCE[0]["content"], "cache_control": {"type": "ephemeral"}}]
    message = {**FRANCE[0], "content": parts, "weight": 1, "refusal": None}
    answer = client.chat.completions.with_raw_response.create(**(settings | {"messages": [message], "extra_body": {}}))
    told = {"messages[].content[].cache_control", "messages[].weight"}
    assert set(answer.headers["x-baton-ignored-fields"].split(", ")) == told, answer.headers
    assert answer.parse().choices[0].message.content == text


def logits(client):
    """What is asked of logits: token 198 is a line break."""
    biased = client.chat.completions.create(messages=FRANCE, max_tokens=4, logit_bias={"198": 100}, **GREEDY)
    assert biased.choices[0].message.content == "\n" * 4, biased
    allowed = {"allowed_token_ids": [198, 28725], "min_tokens": 4, "return_token_ids": True}
    among = client.completions.create(prompt="One", max_tokens=4, extra_body=allowed, **GREEDY)
    assert set(among.choices[0].token_ids) <= {198, 28725}, among


def words(client):
    asked = {"prompt": "The capital of France is", "max_tokens": 8, **GREEDY}
    assert "Paris" in client.completions.create(**asked).choices[0].text
    for policy in ("remote", "local"):
        extra = {"bad_words": ["Paris", "the city"], "typical_p": 0.9, "prefill_policy": policy}
        text = client.completions.create(extra_body=extra, **asked).choices[0].text
        assert "Paris" not in text and "the city" not in text, (policy, text)
    drawn = {"prompt": "Once upon a time", "max_tokens": 12, "model": MODEL, "temperature": 1, "seed": 3}
    typical = [
        client.completions.create(extra_body={"typical_p": 0.3, "prefill_policy": policy}, **drawn).choices[0].text
        for policy in ("remote", "local")
    ]
    assert typical[0] == typical[1] != client.completions.create(**drawn).choices[0].text, typical


class Person(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=1, le=99)
    trade: typing.Literal["farmer", "baker"]


def forms(client):
    """Answers of a form, by each of its spellings."""
    asked = {"messages": [{"role": "user", "content": "Invent a person."}], "model": MODEL, "max_tokens": 200, "seed": 1}
    person = client.chat.completions.parse(response_format=Person, **asked).choices[0].message.parsed
    assert isinstance(person, Person), person
    with client.chat.completions.stream(response_format=Person, **asked) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == person
    several = client.chat.completions.parse(response_format=Person, n=3, **asked)
    people = [choice.message.parsed for choice in several.choices]
    assert people[0] == person and len({str(person) for person in people}) > 1, people
    for extra, matches in [
        ({"guided_choice": ["left", "right"]}, "left|right"),
        ({"guided_regex": "[a-z]{3}-[0-9]+"}, "[a-z]{3}-[0-9]+"),
        ({"guided_json": {"type": "integer", "minimum": 5, "maximum": 7}}, "[567]"),
        ({"guided_grammar": 'start: "a" | "(" start ")"'}, r"\(*a\)*"),
        ({"structured_outputs": {"choice": ["up", "down"]}}, "up|down"),
    ]:
        text = client.chat.completions.create(extra_body=extra, **asked).choices[0].message.content
        assert re.fullmatch(matches, text), (extra, text)
    try:
        client.chat.completions.create(extra_body={"guided_regex": "("}, **asked)
    except openai.BadRequestError as wrong:
        assert wrong.param == "guided_regex", wrong
    else:
        raise AssertionError("an expression that does not compile")


def tool(name, **properties):
    parameters = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


WEATHER = tool("get_weather", city={"enum": ["Paris", "Rome"]}, days={"type": "integer", "minimum": 1, "maximum": 7})
TIME = tool("get_time", zone={"type": "string", "maxLength": 8})


def tools(client):
    """Required calls, streamed or not, and the results in the next turn."""
    ask = {"messages": FRANCE, "tools": [WEATHER, TIME], "model": MODEL, "max_tokens": 300, "seed": 3}

    def checked(calls):
        for call in calls:
            arguments = json.loads(call.function.arguments)
            if call.function.name == "get_weather":
                assert arguments["city"] in ("Paris", "Rome") and 1 <= arguments["days"] <= 7, arguments
            else:
                assert call.function.name == "get_time" and len(arguments["zone"]) <= 8, call
        return [(call.function.name, call.function.arguments) for call in calls]

    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        for policy in ("remote", "local"):
            settings = {"tool_choice": choice, "parallel_tool_calls": False, "extra_body": {"prefill_policy": policy}, **ask}
            whole = client.chat.completions.create(**settings).choices[0]
            assert whole.finish_reason == "tool_calls" and whole.message.content is None, whole
            told = checked(whole.message.tool_calls)
            assert len(told) == 1 and (choice == "required" or told[0][0] == "get_weather"), told
            with client.chat.completions.stream(**settings) as stream:
                streamed = stream.get_final_completion().choices[0]
            assert checked(streamed.message.tool_calls) == told and streamed.finish_reason == "tool_calls", streamed
    several = client.chat.completions.create(tool_choice="required", n=3, **ask)
    for choice in several.choices:
        if choice.finish_reason == "tool_calls":
            checked(choice.message.tool_calls)
    message = whole.message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Rain."}
    turn = [*FRANCE, message.model_dump(exclude_none=True), result]
    after = client.chat.completions.create(messages=turn, tools=[WEATHER, TIME], max_tokens=20, **GREEDY)
    before = client.chat.completions.create(messages=FRANCE, tools=[WEATHER, TIME], max_tokens=1, **GREEDY)
    assert after.usage.prompt_tokens > before.usage.prompt_tokens + 30, after
    plain = client.chat.completions.create(messages=FRANCE, tools=[WEATHER], tool_choice="none", max_tokens=1, **GREEDY)
    assert plain.usage.prompt_tokens == 37, plain.usage


def deadline(client):
    hurried = client.with_options(default_headers={"x-request-timeout": "2s"})
    try:
        hurried.chat.completions.create(
            messages=FRANCE, max_tokens=2000, extra_body={"ignore_eos": True}, **GREEDY
        )
    except openai.APIStatusError as late:
        # Too late, or predicted to be.
        predicted = late.status_code == 429 and "after the deadline" in str(late)
        assert predicted or (late.status_code == 504 and late.code == "deadline_exceeded"), late
    else:
        raise AssertionError("2,000 tokens in 2 s")


def main():
    client = openai.OpenAI(base_url=sys.argv[1], api_key="unused", max_retries=0, timeout=120)
    checks = [models, chat, chat_stream, samples, chat_stream_helper, roles_and_parts, chat_logprobs, completion]
    checks += [completion_of_tokens, echo, prompt_logprobs, several_prompts, best_of, continued, truncated, stops]
    checks += [sampling, refuses, unknown_fields, logits, words, forms, tools, deadline]
    for check in checks:
        check(client)
        print(f"{check.__name__}: ok", flush=True)


if __name__ == "__main__":
    main()

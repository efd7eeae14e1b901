"""Talks with a cluster through LangChain. Argument: base URL."""

import json
import sys
import typing

import openai
import pydantic
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

MODEL = "smollm2-135m-instruct"


class Person(pydantic.BaseModel):
    """A person."""

    model_config = pydantic.ConfigDict(extra="forbid")
    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=1, le=99)
    trade: typing.Literal["farmer", "baker"]


@tool
def weather(city: typing.Literal["Paris", "Rome"], days: int) -> str:
    """Weather of the next days."""
    return f"{days} days of rain in {city}"


def structured(model):
    for method in ("json_schema", "function_calling"):
        for strict in (None, True):
            bound = model.with_structured_output(Person, method=method, strict=strict)
            person = bound.invoke("Invent a person.")
            assert isinstance(person, Person), (method, person)
        # Streamed, the last of the growing values is the whole one.
        *_, last = model.with_structured_output(Person.model_json_schema(), method=method, strict=True).stream("Invent a person.")
        assert Person.model_validate(last), (method, last)
    # This method promises JSON, of any form.
    try:
        bound = model.with_structured_output(Person, method="json_mode", include_raw=True)
        raw = bound.invoke("Invent a person as short JSON.")
        assert isinstance(json.loads(raw["raw"].content), dict), raw
    except openai.LengthFinishReasonError as long:
        assert long.completion.choices[0].message.content.lstrip().startswith("{"), long


def tools(model):
    bound = model.bind_tools([weather], tool_choice="weather")
    asked = [SystemMessage("Be brief."), HumanMessage("Weather in Rome?")]
    answer = bound.invoke(asked)
    (call,) = answer.tool_calls
    assert call["name"] == "weather" and not answer.invalid_tool_calls, answer
    streamed = None
    for chunk in bound.stream(asked):
        streamed = chunk if streamed is None else streamed + chunk
    assert [(c["name"], c["args"]) for c in streamed.tool_calls] == [(call["name"], call["args"])], streamed
    result = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
    after = model.bind_tools([weather]).invoke([*asked, answer, result])
    forced = model.bind_tools([weather], tool_choice="any").invoke(asked)
    assert forced.tool_calls and not forced.invalid_tool_calls, forced
    assert after.usage_metadata["input_tokens"] > answer.usage_metadata["input_tokens"], after


def batches(model):
    texts = [answer.content for answer in model.batch(["Say hello.", "Say goodbye.", "Count to three."])]
    assert len(texts) == 3 and all(texts), texts
    pieces = [chunk.content for chunk in model.stream("Say hello.")]
    assert len(pieces) > 1 and "".join(pieces) == texts[0], pieces


def main():
    settings = {"base_url": sys.argv[1], "api_key": "unused", "max_retries": 0, "timeout": 120, "seed": 1}
    model = ChatOpenAI(model=MODEL, temperature=0, max_tokens=500, **settings)
    for check in (structured, tools, batches):
        check(model)
        print(f"langchain {check.__name__}: ok", flush=True)


main()

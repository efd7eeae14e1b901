"""Calls a cluster that asks for keys through OpenAI's and Anthropic's own Python clients. Arguments: base URL, a key that it knows."""

import sys

import anthropic
import openai


def refused(call, client):
    try:
        call(client)
    except openai.AuthenticationError as error:
        assert error.status_code == 401 and error.code == "invalid_api_key", error
        assert error.type == "invalid_request_error" and error.param is None, error
        assert error.response.headers["www-authenticate"] == "Bearer", error.response.headers
    else:
        raise AssertionError("it was let in")


def main():
    base, key = sys.argv[1:]
    model = openai.OpenAI(base_url=base, api_key=key).models.list().data[0].id

    def complete(client):
        return client.completions.create(model=model, prompt=[5, 6], max_tokens=3, extra_body={"ignore_eos": True})

    def client_of(key):
        return openai.OpenAI(base_url=base, api_key=key, max_retries=0, timeout=60)

    for call in (lambda client: client.models.list(), complete):
        refused(call, client_of("sk-mallory"))
        refused(call, client_of(key + "x"))
    answer = complete(client_of(key))
    assert answer.usage.completion_tokens == 3, answer
    # The other header.
    plain = {"base_url": base.removesuffix("/v1"), "max_retries": 0, "timeout": 60}
    assert [listed.id for listed in anthropic.Anthropic(api_key=key, **plain).models.list()] == [model]
    asked = {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    try:
        anthropic.Anthropic(api_key="sk-mallory", **plain).messages.create(**asked)
    except anthropic.AuthenticationError as error:
        assert error.body["error"]["type"] == "authentication_error" and error.request_id, error.body
    else:
        raise AssertionError("it was let in")
    print("keys: ok")


if __name__ == "__main__":
    main()

"""Calls a cluster that asks for keys through OpenAI's own Python client. Arguments: base URL, a key that it knows."""

import sys

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
    print("keys: ok")


if __name__ == "__main__":
    main()

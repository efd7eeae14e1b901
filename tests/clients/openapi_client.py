"""Asks a cluster what its own OpenAPI document allows, and what it does not, through Schemathesis. Arguments: address, e.g.
http://127.0.0.1:8000, the number of drawn requests of each operation, and Schemathesis' phases: fuzzing draws, coverage takes each limit of
the document in turn.

No answer may be a 5xx, and each has a status, a type of content and a form that the document has. Requests are the same in each run.
Schemathesis loads this file for its hooks too.
"""

import collections
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request

import jsonschema
import schemathesis

MODEL = "smollm2-135m-instruct"
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,response_schema_conformance"
# A stream that does not end.
LEFT_OUT = ("/cluster/events",)
CHAT = {"messages": [{"role": "user", "content": "Say hello."}]}
# Requests that are served, for each operation with a body.
SERVED = {
    "/v1/chat/completions": {**CHAT, "max_tokens": 4},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 4},
    "/v1/responses": {"input": "Say hello.", "max_output_tokens": 4},
    "/v1/messages": {**CHAT, "max_tokens": 4},
    "/v1/messages/count_tokens": CHAT,
    "/tokenize": CHAT,
    "/detokenize": {"tokens": [9906]},
}
# Bodies that are refused, and that the document does not allow: with one field beside what is served.
NEVER = {
    "/v1/chat/completions": {
        "top_p": [5e-324, 0, 1.5], "typical_p": [5e-324], "repetition_penalty": [5e-324], "stop": ["", [""], ["x"] * 17],
        "guided_json": [""], "guided_regex": [""], "guided_choice": [[], [""]], "guided_grammar": [""],
        "response_format": [{}, {"type": "xml"}, {"type": "json_schema"}], "tool_choice": [{}, "any"],
        "tools": [[{}], [{"type": "function"}], [{"type": "function", "function": {"name": "a b"}}]],
        "stream_options": [{}, {"include_usage": True}], "reasoning_effort": ["lots"],
    },
    "/v1/completions": {"prompt": ["", [], [""], [[]], [["x"]]], "stream_options": [{}]},
    "/v1/responses": {"tools": [[{}], [{"type": "function"}]], "tool_choice": [{}]},
    "/v1/messages": {"tools": [[{}], [{"name": "a b"}]], "stop_sequences": [[""]], "tool_choice": [{}]},
}
# Bodies that are served, and that the document allows.
ALWAYS = {
    "/v1/chat/completions": {
        "top_p": [1e-37, 1], "stop": ["x", ["x", "y"], []], "guided_choice": [["a"]], "response_format": [{"type": "text"}],
        "tools": [[], [{"type": "function", "function": {"name": "get"}}]], "tool_choice": ["none", "auto"],
    },
    "/v1/completions": {"prompt": ["x", [5], ["x", "y"], [[5], "x"], [[5], [6]]]},
    "/v1/responses": {"tools": [[{"type": "function", "name": "get"}]]},
    "/v1/messages": {"tools": [[{"name": "get"}]], "tool_choice": [{"type": "none"}]},
}
# Fewest of each operation that must have been served, as a part of the drawn ones: else only refusals would have been tested.
SERVED_MIN = 0.1
# What a small machine generates in a moment; larger numbers below the limits would only take longer.
SMALL = {"max_tokens": 8, "max_completion_tokens": 8, "max_output_tokens": 8, "n": 3, "best_of": 3}
LIMIT = {"n": 128, "best_of": 128}
CONTEXT = 8192


@schemathesis.hook
def before_call(context, case, kwargs):
    """A third of the requests stays as it was drawn. The others become what would be served, with one of the drawn fields."""
    body = case.body
    if not isinstance(body, dict) or case.operation.path not in SERVED:
        return
    draw = random.Random(json.dumps(body, sort_keys=True, default=str))
    if draw.random() < 2 / 3:
        kept = draw.sample(sorted(body), min(1, len(body)))
        case.body = body = {**SERVED[case.operation.path], **{name: body[name] for name in kept}}
        case.headers = {}
    if isinstance(body.get("model"), str):
        body["model"] = MODEL
    for name, small in SMALL.items():
        value = body.get(name)
        if isinstance(value, (int, float)) and small < value <= LIMIT.get(name, CONTEXT):
            body[name] = small
    # Without one the answer could fill the context.
    bound = next((name for name in SMALL if name in SERVED[case.operation.path]), None)
    if bound and body.get(bound) is None:
        body[bound] = SMALL[bound]


def limits(address):
    """The document allows what is served, and not what is refused, where a schema can say it."""
    with urllib.request.urlopen(f"{address}/openapi.json") as answer:
        document = json.load(answer)
    for cases, status in ((ALWAYS, 200), (NEVER, 400)):
        for path, fields in cases.items():
            schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
            allows = jsonschema.Draft202012Validator(schema).is_valid
            for name, values in fields.items():
                for value in values:
                    body = {**SERVED[path], name: value}
                    asked = urllib.request.Request(f"{address}{path}", json.dumps(body).encode(), {"content-type": "application/json"})
                    try:
                        got = urllib.request.urlopen(asked, timeout=60).status
                    except urllib.error.HTTPError as error:
                        got = error.code
                    assert (got, allows(body)) == (status, status == 200), (path, name, value, got, allows(body))


def main():
    address, examples, phases = sys.argv[1:]
    limits(address)
    tool = pathlib.Path(sys.executable).with_name("schemathesis")
    here = pathlib.Path(__file__)
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder, "requests.ndjson")
        command = [tool, "run", f"{address}/openapi.json", "--url", address, "--checks", CHECKS]
        command += [flag for path in LEFT_OUT for flag in ("--exclude-path", path)]
        command += ["--phases", phases, "--max-examples", examples, "--generation-deterministic", "--continue-on-failure"]
        command += ["--request-timeout", "60", "--no-color", "--report", "ndjson", "--report-ndjson-path", report]
        command += ["--output-sanitize", "false", "--output-truncate", "false", "--warnings", "off"]
        hooks = {"SCHEMATHESIS_HOOKS": here.stem, "PYTHONPATH": str(here.parent)}
        ran = subprocess.run(command, env={**os.environ, **hooks}, cwd=folder, stdout=subprocess.PIPE, text=True)
        assert ran.returncode == 0, ran.stdout
        answers = collections.Counter()
        for event in map(json.loads, report.open()):
            for kind, said in event.items():
                if kind == "ScenarioFinished":
                    for sent in said["recorder"]["interactions"].values():
                        answers[said["recorder"]["label"], (sent["response"] or {}).get("status_code")] += 1
    for path in SERVED:
        served = answers[f"POST {path}", 200]
        assert served >= SERVED_MIN * int(examples), (path, served, answers)
    statuses = collections.Counter()
    for (_, status), count in answers.items():
        statuses[status] += count
    print(f"openapi: {sum(statuses.values())} requests, answers {dict(sorted(statuses.items()))}")


if __name__ == "__main__":
    main()

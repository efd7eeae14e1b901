"""Calls a cluster through Triton's own Python client of the KServe protocol. Argument: host:port."""

import json
import queue
import sys
import time

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

MODEL = "smollm2-135m-instruct"
TIMEOUT_S = 120
PROMPT = "The capital of France is"
GREEDY = {"temperature": 0, "max_tokens": 8}


def tensor(name, datatype, values, shape=None):
    array = np.array(values, dtype={"BYTES": np.object_, "BOOL": bool, "INT64": np.int64, "INT32": np.int32}[datatype])
    made = triton.InferInput(name, list(array.shape) if shape is None else shape, datatype)
    made.set_data_from_numpy(array if shape is None else array.reshape(shape))
    return made


def inputs(prompt=PROMPT, stream=None, sampling=GREEDY, excludes=True, shape=None):
    made = [tensor("text_input", "BYTES", [prompt.encode()], shape)]
    if stream is not None:
        made.append(tensor("stream", "BOOL", [stream]))
    if sampling is not None:
        made.append(tensor("sampling_parameters", "BYTES", [json.dumps(sampling).encode()]))
    if excludes is not None:
        made.append(tensor("exclude_input_in_output", "BOOL", [excludes]))
    return made


def text(result):
    return b"".join(result.as_numpy("text_output").flatten()).decode()


def described(client):
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready(MODEL)
    assert not client.is_model_ready("nobody") and not client.is_model_ready(MODEL, "7")
    assert client.get_server_metadata().name == "baton"
    model = client.get_model_metadata(MODEL)
    assert model.name == MODEL and list(model.versions) == ["1"], model
    known = {t.name: (t.datatype, list(t.shape)) for t in [*model.inputs, *model.outputs]}
    assert known["text_input"] == ("BYTES", [1]) and known["text_output"] == ("BYTES", [-1]), known
    refused("nobody", lambda: client.get_model_metadata("nobody"), "StatusCode.NOT_FOUND")
    refused("ModelConfig is not served", lambda: client.get_model_config(MODEL), "StatusCode.UNIMPLEMENTED")


def refused(says, call, *statuses):
    try:
        call()
    except InferenceServerException as error:
        assert says in error.message() and error.status() in statuses, (error.status(), error.message())
    else:
        raise AssertionError(f"it was accepted, without {says!r}")


def whole(client):
    answer = client.infer(MODEL, inputs(), request_id="from-triton", client_timeout=TIMEOUT_S)
    said = text(answer)
    assert "Paris" in said and answer.get_response().id == "from-triton", answer.get_response()
    # As in vLLM's backend: the prompt stands before the answer unless it is excluded.
    assert text(client.infer(MODEL, inputs(excludes=None))) == PROMPT + said
    assert text(client.infer(MODEL, inputs(excludes=False, shape=[1, 1]))) == PROMPT + said
    # Parameters of the request, as numbers and as texts, and in both places.
    for parameters in ({"temperature": 0.0, "max_tokens": 8}, {"temperature": "0", "max_tokens": "8"}):
        assert text(client.infer(MODEL, inputs(sampling=None), parameters=parameters)) == said
    assert text(client.infer(MODEL, inputs(), parameters={"max_tokens": 1})) == said, "the tensor wins"
    # Several prompts, samples and further outputs.
    prompts = [tensor("text_input", "BYTES", [PROMPT.encode(), b"2 + 2 ="]), *inputs(sampling={"n": 2, **GREEDY})[1:]]
    flags = [tensor(name, "BOOL", [True]) for name in ("return_finish_reason", "return_num_input_tokens")]
    answer = client.infer(MODEL, [*prompts, *flags])
    texts = answer.as_numpy("text_output")
    assert texts.shape == (4,) and texts[0] == texts[1] == said.encode() and texts[2] != texts[0], texts
    assert list(answer.as_numpy("finish_reason")) == [b"length"] * 4, answer.get_response()
    assert answer.as_numpy("num_input_tokens")[0] == 5, answer.get_response()
    outputs = [triton.InferRequestedOutput("num_output_tokens")]
    answer = client.infer(MODEL, inputs(), outputs=outputs)
    assert answer.as_numpy("num_output_tokens").tolist() == [8] and answer.as_numpy("text_output") is None
    # Token ids, in two types.
    ids = [504, 3575, 282, 4649, 314]
    for datatype in ("INT64", "INT32"):
        sampling = inputs()[1:2]
        assert "Paris" in text(client.infer(MODEL, [tensor("input_ids", datatype, [ids]), *sampling])), datatype
    form = {"guided_choice": ["Paris", "Rome"], "max_tokens": 8}
    assert text(client.infer(MODEL, inputs(sampling=form))) in ("Paris", "Rome")
    answer = client.infer(MODEL, inputs(sampling={**GREEDY, "early_stopping": True}))
    assert answer.get_response().parameters["x-baton-ignored-fields"].string_param == "early_stopping"


def streams(client):
    """Several requests of one stream, an error among them."""
    expected = text(client.infer(MODEL, inputs()))
    answers = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)), stream_timeout=TIMEOUT_S)
    for number in range(6):
        client.async_stream_infer(MODEL, inputs(stream=number % 2 == 0), request_id=str(number))
    client.async_stream_infer("nobody", inputs(stream=True), request_id="nobody")
    client.async_stream_infer(MODEL, inputs(stream=True), request_id="empty", enable_empty_final_response=True)
    texts, counts, last, errors = {}, {}, set(), []
    while len(last) < 7 or not errors:
        result, error = answers.get(timeout=TIMEOUT_S)
        if error is not None:
            errors.append(error.message())
            continue
        response = result.get_response()
        assert response.id not in last, response
        texts[response.id] = texts.get(response.id, "") + text(result)
        counts[response.id] = counts.get(response.id, 0) + 1
        if response.parameters["triton_final_response"].bool_param:
            last.add(response.id)
    client.stop_stream()
    assert texts == {id: expected for id in ("0", "1", "2", "3", "4", "5", "empty")}, texts
    assert all((counts[id] > 2) == (id not in "135") for id in texts), counts
    assert len(errors) == 1 and "nobody" in errors[0], errors


def cancels(client):
    """A stream that is cancelled ends its requests: the same cluster serves others at once."""
    answers = queue.Queue()
    long = {"max_tokens": 4000, "ignore_eos": True}
    client.start_stream(lambda result, error: answers.put((result, error)))
    for number in range(4):
        client.async_stream_infer(MODEL, inputs(stream=True, sampling=long), request_id=str(number))
    assert answers.get(timeout=TIMEOUT_S)[1] is None
    client.stop_stream(cancel_requests=True)
    begun = time.monotonic()
    assert "Paris" in text(client.infer(MODEL, inputs()))
    assert time.monotonic() - begun < 20, "they go on"
    # The router may know beforehand that it would be late.
    late = ("StatusCode.DEADLINE_EXCEEDED", "StatusCode.RESOURCE_EXHAUSTED")
    refused("", lambda: client.infer(MODEL, inputs(sampling=long), client_timeout=1), *late)
    refused("deadline", lambda: client.infer(MODEL, inputs(sampling=long), timeout=500_000), *late)


def wrong(client):
    def check(says, made, status="StatusCode.INVALID_ARGUMENT", **more):
        refused(says, lambda: client.infer(more.pop("model", MODEL), made, **more), status)

    check("text_input is missing", inputs()[1:])
    check("nobody", inputs(), "StatusCode.NOT_FOUND", model="nobody")
    check("must be BYTES", [tensor("text_input", "INT64", [7])])
    check("no model here has the input \"image\"", [*inputs(), tensor("image", "BYTES", [b"x"])])
    check("no model here has the output", inputs(), outputs=[triton.InferRequestedOutput("logits")])
    check("the shape must be", [tensor("text_input", "BYTES", [b"x"], [1, 1, 1])])
    check("ModelStreamInfer", inputs(stream=True))
    check("temperature", inputs(sampling={"temperature": 9}))
    check("lora_name is not supported", inputs(sampling={"lora_name": "x"}), "StatusCode.UNIMPLEMENTED")
    check("priority is not supported", inputs(), "StatusCode.UNIMPLEMENTED", priority=1)
    check("8192 tokens", [tensor("input_ids", "INT32", [5] * 9000)], "StatusCode.OUT_OF_RANGE")
    # Elements that are cut off, too long by their length, or too many.
    for raw in (b"", b"\x05\0\0", b"\xff\xff\xff\xffx", b"\x01\0\0\0xyz"):
        made = tensor("text_input", "BYTES", [b"x"])
        made._raw_content = raw
        check("text_input: ", [made])


def main():
    with triton.InferenceServerClient(sys.argv[1]) as client:
        for check in (described, whole, streams, cancels, wrong):
            check(client)
            print(f"triton {check.__name__}: ok", flush=True)


if __name__ == "__main__":
    main()

"""Calls a cluster with grpcurl and ghz, which know its services by reflection alone. Arguments: host:port, and the folder of both programs."""

import json
import subprocess
import sys

MODEL = "smollm2-135m-instruct"
CALL = "baton.v1.Inference/Generate"
CALLS, AT_ONCE, TOKENS = 40, 8, 16


def request(**sampling):
    prompt = [{"message": {"role": "user", "content": "What is the capital of France?"}}]
    return json.dumps({"model": MODEL, "prompt": prompt, "sampling": {"temperature": 0, **sampling}})


def run(*command, status=0, **more):
    ran = subprocess.run(command, text=True, capture_output=True, timeout=120, **more)
    assert ran.returncode == status, (command, ran)
    return ran.stdout if status == 0 else ran.stderr


def objects(text):
    """The JSON objects that stand one after the other in a text."""
    decoder, found, text = json.JSONDecoder(), [], text.strip()
    while text:
        one, end = decoder.raw_decode(text)
        found.append(one)
        text = text[end:].lstrip()
    return found


def grpcurl(address, folder):
    tool = [f"{folder}/grpcurl", "-plaintext"]
    listed = run(*tool, address, "list").split()
    assert {"baton.v1.Inference", "baton.v1.Admin", "grpc.health.v1.Health"} <= set(listed), listed
    described = run(*tool, address, "describe", "baton.v1.Inference.Generate")
    assert "returns ( stream .baton.v1.GenerateResponse )" in described, described
    messages = objects(run(*tool, "-d", "@", address, CALL, input=request()))
    assert "Paris" in "".join(message.get("text", "") for message in messages), messages
    last = messages[-1]
    assert last["usage"]["promptTokens"] == 37 and last["finishReason"] == "FINISH_REASON_STOP", last
    assert last["usage"]["completionTokens"] == sum(len(message.get("tokenIds", [])) for message in messages), messages
    assert objects(run(*tool, address, "grpc.health.v1.Health/Check")) == [{"status": "SERVING"}]
    # grpcurl ends with 64 and the code of the status.
    refused = run(*tool, "-d", "@", address, CALL, input=request(temperature=5), status=64 + 3)
    assert "InvalidArgument" in refused and "temperature" in refused, refused


def ghz(address, folder):
    body = request(max_tokens=TOKENS, ignore_eos=True)
    load = ["-n", str(CALLS), "-c", str(AT_ONCE), "--connections", "2", "--timeout", "60s"]
    report = json.loads(run(f"{folder}/ghz", "--insecure", "--call", CALL, "-d", body, *load, "-O", "json", address))
    assert report["statusCodeDistribution"] == {"OK": CALLS} and not report["errorDistribution"], report
    assert report["count"] == CALLS and report["average"] > 0, report


def main():
    for check in (grpcurl, ghz):
        check(*sys.argv[1:])
        print(f"{check.__name__}: ok", flush=True)


main()

"""A generic gRPC client: knows an address, learns everything else by reflection, as grpcurl does. Argument: host:port."""

import sys

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

MODEL = "smollm2-135m-instruct"
TIMEOUT_S = 120


class Service:
    """Calls the methods of a service that is known by its descriptors alone."""

    def __init__(self, channel, pool, name):
        self.channel, self.descriptor = channel, pool.FindServiceByName(name)

    def call(self, method, request, timeout=TIMEOUT_S, metadata=()):
        described = self.descriptor.methods_by_name[method]
        ask, answer = (message_factory.GetMessageClass(t) for t in (described.input_type, described.output_type))
        open_call = self.channel.unary_stream if described.server_streaming else self.channel.unary_unary
        path = f"/{self.descriptor.full_name}/{method}"
        stub = open_call(path, request_serializer=ask.SerializeToString, response_deserializer=answer.FromString)
        return stub(ask(**request), timeout=timeout, metadata=metadata)


def chat(inference):
    prompt = [{"message": {"role": "user", "content": "What is the capital of France?"}}]
    answers = {}
    # The decode worker that took the first one's KV in has two whole blocks of it when the second one comes.
    for policy, cached in (("PREFILL_POLICY_REMOTE", 0), ("PREFILL_POLICY_LOCAL", 32)):
        request = {"model": MODEL, "prompt": prompt, "sampling": {"temperature": 0}, "prefill_policy": policy}
        request["cache_salt"] = "nobody else's"
        call = inference.call("Generate", request, metadata=[("x-request-id", f"from-{policy}")])
        messages = list(call)
        first, last = messages[0], messages[-1]
        answers[policy] = [t for m in messages for t in m.token_ids]
        assert "Paris" in "".join(m.text for m in messages), messages
        assert first.request_id == f"from-{policy}" and len(first.trace_id) == 32 and first.model == MODEL, first
        assert last.finish_reason == 1 and last.usage.prompt_tokens == 37 and last.usage.cached_tokens == cached, last
        assert last.usage.completion_tokens == len(answers[policy]), last
        assert last.timings.ttft_us > 0 and last.timings.prefill_us > 0, last
        transferred = last.timings.transfer_bytes
        # 30 layers of keys and values, 3 heads of 64 dimensions in 2 bytes, a token.
        assert transferred == (37 * 30 * 2 * 3 * 64 * 2 if "REMOTE" in policy else 0), last
    assert len(set(map(tuple, answers.values()))) == 1, answers


def text_and_tokens(inference):
    prompt = [{"text": "The capital of"}, {"tokens": {"ids": [4649]}}, {"text": " is"}]
    messages = list(inference.call("Generate", {"prompt": prompt, "sampling": {"temperature": 0, "max_tokens": 4}}))
    assert "Paris" in "".join(m.text for m in messages) and messages[-1].finish_reason == 2, messages


def errors(inference):
    traces = []

    def check(code, says, timeout=TIMEOUT_S, **request):
        try:
            list(inference.call("Generate", {"prompt": [{"text": "x"}], **request}, timeout=timeout))
        except grpc.RpcError as error:
            assert error.code() == code and says in error.details(), error
            # A deadline of the client's own is told by its library, which knows no metadata.
            if code != grpc.StatusCode.DEADLINE_EXCEEDED:
                named = dict(error.trailing_metadata())
                assert named["x-request-id"] and named["baton-error-kind"], named
                traces.append(named.get("x-trace-id"))
        else:
            raise AssertionError(f"{request} was accepted")

    code = grpc.StatusCode
    check(code.NOT_FOUND, "nobody", model="nobody")
    check(code.INVALID_ARGUMENT, "temperature", sampling={"temperature": 5})
    check(code.INVALID_ARGUMENT, "prompt", prompt=[])
    check(code.OUT_OF_RANGE, "8192 tokens", prompt=[{"tokens": {"ids": [5] * 9000}}])
    check(code.DEADLINE_EXCEEDED, "", timeout=2, sampling={"max_tokens": 4000, "ignore_eos": True})
    # What never became a request, the empty prompt, has no trace.
    assert [len(trace or "") for trace in traces] == [32, 32, 0, 32] and len(set(traces)) == 4, traces


def health(channel, pool):
    status = Service(channel, pool, "grpc.health.v1.Health").call("Check", {"service": "baton.v1.Inference"}).status
    assert status == 1, status


def main():
    with grpc.insecure_channel(sys.argv[1]) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        services = set(database.get_services())
        # What this port serves, and nothing else: workers join over it, operators drain them.
        ours = {s for s in services if s.startswith("baton.")}
        assert ours == {f"baton.v1.{s}" for s in ("Admin", "Inference")} and "grpc.health.v1.Health" in services, services
        assert "inference.GRPCInferenceService" in services, services
        pool = DescriptorPool(database)
        inference = Service(channel, pool, "baton.v1.Inference")
        for check in (chat, text_and_tokens, errors):
            check(inference)
            print(f"{check.__name__}: ok", flush=True)
        health(channel, pool)
        print("health: ok", flush=True)


if __name__ == "__main__":
    main()

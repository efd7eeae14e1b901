"""Talks with a cluster through lm-eval's models of an API. Arguments: base URL, e.g. http://127.0.0.1:8000/v1, and `loglikelihood` or
`generate`.
"""

import json
import sys

import requests
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

MODEL = "smollm2-135m-instruct"
CONTEXTS = ["The capital of France is", "Water boils at", "Once upon a time, there"]
TOKENS = 5
# lm-eval asks for sums of log-probabilities; JSON holds each of them exactly.
CLOSE = 1e-6


def ask(base, path, **body):
    answer = requests.post(base + path, json={"model": MODEL, **body}, timeout=120)
    answer.raise_for_status()
    return answer.json()


class Completions(LocalCompletionsAPI):
    """lm-eval's model, with the server's tokenizer: its own would come from a hub."""

    def tok_encode(self, string, **_):
        if not isinstance(string, str):
            return [self.tok_encode(one) for one in string]
        return ask(self.base_url.removesuffix("/v1/completions"), "/tokenize", prompt=string)["tokens"]


def model(kind, base, path, **more):
    made = kind(model=MODEL, base_url=base + path, tokenizer_backend="none", max_retries=1, timeout=120, **more)
    # What a tokenizer would set: prompts are sent as tokens.
    made.tokenizer, made.tokenized_requests = made, kind is Completions
    return made


def requested(kind, *arguments):
    return [Instance(request_type=kind, doc={}, arguments=one, idx=at) for at, one in enumerate(arguments)]


def loglikelihood(base):
    """A greedy answer, given back as a continuation, has the log-probabilities with which it was generated; another one has less."""
    asked, expected = [], []
    for context in CONTEXTS:
        answer = ask(base, "/completions", prompt=context, max_tokens=TOKENS, temperature=0, ignore_eos=True, logprobs=1)["choices"][0]
        server = base.removesuffix("/v1")
        whole = ask(server, "/tokenize", prompt=context + answer["text"])["tokens"]
        head = ask(server, "/tokenize", prompt=context)["tokens"]
        assert whole[: len(head)] == head and len(whole) == len(head) + TOKENS, "the text is other tokens than were generated"
        asked.append((context, answer["text"]))
        expected.append(sum(answer["logprobs"]["token_logprobs"]))
    for batch in (1, len(CONTEXTS)):
        scored = model(Completions, base, "/completions", batch_size=batch).loglikelihood(requested("loglikelihood", *asked))
        for (score, greedy), sum_of, pair in zip(scored, expected, asked, strict=True):
            assert greedy and abs(score - sum_of) < CLOSE, (batch, pair, score, sum_of)
    worse = [(context, " zebra") for context in CONTEXTS]
    for (score, greedy), sum_of in zip(model(Completions, base, "/completions").loglikelihood(requested("loglikelihood", *worse)), expected):
        assert not greedy and score < sum_of, (score, sum_of)


def generate(base):
    chat = json.dumps([{"role": "user", "content": "What is the capital of France?"}])
    settings = {"until": ["\n\n"], "max_gen_toks": 24, "do_sample": False, "temperature": 0}
    from lm_eval.models.api_models import JsonChatStr

    answers = model(LocalChatCompletion, base, "/chat/completions", num_concurrent=2).generate_until(
        requested("generate_until", (JsonChatStr(chat), dict(settings)), (JsonChatStr(chat), dict(settings)))
    )
    assert len(answers) == 2 and answers[0] == answers[1] and "Paris" in answers[0], answers
    texts = model(Completions, base, "/completions").generate_until(
        requested("generate_until", *[(context, {**settings, "max_gen_toks": TOKENS}) for context in CONTEXTS])
    )
    plain = [ask(base, "/completions", prompt=c, max_tokens=TOKENS, temperature=0, stop=["\n\n"])["choices"][0]["text"] for c in CONTEXTS]
    assert texts == plain, (texts, plain)


def main():
    base, check = sys.argv[1:]
    {"loglikelihood": loglikelihood, "generate": generate}[check](base)
    print(f"lm-eval, {check}: ok", flush=True)


main()

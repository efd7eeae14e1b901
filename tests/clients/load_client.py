"""Puts synthetic load on a cluster with GuideLLM and AIPerf, and reads their reports. Argument: address, e.g. http://127.0.0.1:8000.

Runs in the environment of GuideLLM, beside which that of AIPerf is.
"""

import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile

import transformers

MODEL = "smollm2-135m-instruct"
FETCH = pathlib.Path(__file__).parents[2] / "scripts/fetch-model"
TOOLS = pathlib.Path(sys.prefix).parent
REQUESTS, AT_ONCE, PROMPT, TOKENS = 20, 4, 64, 16
# The chat template adds tokens to the drawn text, whose tokens may also join into others.
TEMPLATE = range(10, 60)


def tokenizer(folder):
    """The model's own, as the folder that both tools read; they would download one."""
    model = pathlib.Path(subprocess.run([sys.executable, FETCH], check=True, stdout=subprocess.PIPE, text=True).stdout.strip())
    transformers.AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name).save_pretrained(folder)
    return folder


def run(*command, **variables):
    ran = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=240, env={**os.environ, **variables})
    assert ran.returncode == 0, ran.stdout


def guidellm(address, tokens, folder):
    report = folder / "guidellm.json"
    sent = ["--backend", f"kind=openai_http,target={address},model={MODEL}", "--tokenizer", f"kind=huggingface_auto,model={tokens}"]
    sent += ["--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={TOKENS}"]
    load = ["--profile", f"kind=concurrent,streams={AT_ONCE}", "--constraint", f"kind=max_requests,count={REQUESTS}"]
    run(TOOLS / "guidellm/bin/guidellm", "run", *sent, *load, "--output", f"kind=json,path={report}", "--disable-console", HF_HUB_OFFLINE="1")
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    metrics = benchmark["metrics"]
    totals = metrics["request_totals"]
    assert totals == {"successful": REQUESTS, "errored": 0, "incomplete": 0, "total": REQUESTS}, totals

    def of(name, count):
        found = metrics[name]["successful"]
        assert found["count"] == count, (name, found)
        return found

    first, between = of("time_to_first_token_ms", REQUESTS), of("inter_token_latency_ms", REQUESTS * (TOKENS - 1))
    assert 0 < first["min"] <= first["max"] and 0 < between["min"] <= between["max"], (first, between)
    prompts, outputs = of("prompt_token_count", REQUESTS), of("output_token_count", REQUESTS)
    assert outputs["min"] == outputs["max"] == TOKENS, outputs
    assert prompts["min"] - PROMPT in TEMPLATE and prompts["max"] - PROMPT in TEMPLATE, prompts
    return first["mean"], between["mean"]


def aiperf(address, tokens, folder):
    sent = ["--model", MODEL, "--url", address, "--endpoint-type", "chat", "--streaming", "--tokenizer", tokens]
    sent += ["--synthetic-input-tokens-mean", str(PROMPT), "--output-tokens-mean", str(TOKENS), "--extra-inputs", "ignore_eos:true"]
    load = ["--concurrency", str(AT_ONCE), "--request-count", str(REQUESTS), "--random-seed", "7", "--use-server-token-count"]
    run(TOOLS / "aiperf/bin/aiperf", "profile", *sent, *load, "--artifact-dir", folder / "aiperf", "--ui", "none")
    report = json.loads((folder / "aiperf/profile_export_aiperf.json").read_text())
    assert report["is_complete"] and not report["was_cancelled"] and report["error_summary"] == [], report
    assert report["request_count"]["avg"] == REQUESTS and report["request_error_rate"]["avg"] == 0, report
    first, between = report["time_to_first_token"], report["inter_token_latency"]
    assert 0 < first["min"] <= first["max"] and 0 < between["min"] <= between["max"], report
    assert math.isclose(report["output_sequence_length"]["min"], TOKENS) and report["total_osl"]["avg"] == REQUESTS * TOKENS, report
    prompts = report["input_sequence_length"]
    assert prompts["min"] - PROMPT in TEMPLATE and prompts["max"] - PROMPT in TEMPLATE, report
    # It reads the metrics of a server that has them at the usual path.
    assert (folder / "aiperf/server_metrics_export.json").exists()
    return first["avg"], between["avg"]


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        tokens = tokenizer(folder / "tokenizer")
        for tool in (guidellm, aiperf):
            first, between = tool(sys.argv[1], tokens, folder)
            print(f"{tool.__name__}: {REQUESTS} requests, TTFT {first:.0f} ms, ITL {between:.1f} ms", flush=True)


main()

//! What people who know other servers try first: `baton serve` with vLLM's flags, a chat in the terminal, and `generate` at the wrong
//! port.

use anyhow::{Context, ensure};
use baton_tests::http::Api;
use baton_tests::processes::{Up, baton, binary, send};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

/// Longest wait for a part of an answer.
const PART_MAX: Duration = Duration::from_secs(120);

#[tokio::test]
async fn vllms_flags_mean_the_same() -> anyhow::Result<()> {
    let flags = [
        "random:vocab=300,context=1024",
        "--served-model-name",
        "ours",
        "theirs",
        "--dtype",
        "float32",
        "--max-model-len",
        "256",
        "--port",
        "0",
        "--grpc-port=0",
        "--prefill-policy=remote",
    ];
    let mut up = Up::spawn_as("serve", &flags, &[])?;
    up.wait_serving()?;
    let api = Api::new(up.openai()?);
    let models = api.get("models").await?.body;
    let of = |field: &str| models["data"].as_array().map(|all| all.iter().map(|m| m[field].to_string()).collect());
    let names: Vec<String> = of("id").context("no list")?;
    ensure!(names == ["\"ours\"", "\"theirs\""], "{models}");
    let lengths: Vec<String> = of("max_model_len").context("no list")?;
    ensure!(lengths == ["256", "256"], "{models}");
    let body = serde_json::json!({"model": "theirs", "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": true});
    let answer = api.post("completions", body).await?;
    ensure!(answer.status == 200 && answer.body["model"] == "ours", "{answer:?}");
    let base = up.openai()?;
    let status: serde_json::Value = reqwest::get(base.replace("/v1", "/cluster")).await?.json().await?;
    for worker in status["workers"].as_array().context("no workers")? {
        let class = worker["class"].as_str().unwrap_or_default();
        ensure!(class.starts_with("f32fma/f32/f32/"), "{worker}");
    }
    up.stop()
}

#[test]
fn a_dtype_has_vllms_names_and_no_others() -> anyhow::Result<()> {
    let dump = |dtype: &str| -> anyhow::Result<(bool, String)> {
        let program = binary("baton-decode-worker")?;
        let output = Command::new(program).args(["--dump-config", "--dtype", dtype]).env_clear().output()?;
        let text = [output.stdout, output.stderr].concat();
        Ok((output.status.success(), String::from_utf8(text)?))
    };
    for (dtype, numerics, format) in [
        ("auto", "auto", "bf16"),
        ("bfloat16", "auto", "bf16"),
        ("half", "f32fma", "f16"),
        ("float16", "f32fma", "f16"),
        ("float", "f32fma", "f32"),
    ] {
        let (_, dumped) = dump(dtype)?;
        for line in
            [format!("numerics = \"{numerics}\""), format!("weights = \"{format}\""), format!("kv = \"{format}\"")]
        {
            ensure!(dumped.contains(&line), "{dtype}: no {line} in {dumped}");
        }
    }
    let (taken, said) = dump("int8")?;
    ensure!(!taken && said.contains("bfloat16"), "{said}");
    Ok(())
}

#[test]
fn a_chat_keeps_its_history() -> anyhow::Result<()> {
    let up = Up::start(&["--kv-cache-bytes=256MiB"])?;
    let server = format!("http://{}", up.grpc()?);

    // Everything but gRPC is told from a router that is not there.
    let http = up.openai()?.replace("/v1", "");
    let output = baton(&["generate", "--server", &http, "hello"])?;
    let said = String::from_utf8(output.stderr)?;
    ensure!(!output.status.success() && said.contains("HTTP port") && said.contains("--server"), "{said}");

    let mut chat = Command::new(binary("baton")?)
        .args(["generate", "--server", &server])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let (mut input, mut errors) = (chat.stdin.take().context("stdin")?, chat.stderr.take().context("stderr")?);
    let mut output = BufReader::new(chat.stdout.take().context("stdout")?);
    // A thread reads what is printed, byte by byte: an answer that is stopped has no end of line before.
    let (told, parts) = mpsc::channel();
    std::thread::spawn(move || {
        loop {
            let part = output.fill_buf().map(|part| String::from_utf8_lossy(part).into_owned()).unwrap_or_default();
            output.consume(part.len());
            if part.is_empty() || told.send(part).is_err() {
                return;
            }
        }
    });
    let mut printed = String::new();
    let mut until = |what: &str| -> anyhow::Result<()> {
        while !printed.contains(what) {
            printed += &parts.recv_timeout(PART_MAX).with_context(|| format!("no {what:?} in {printed:?}"))?;
        }
        printed = printed.split_once(what).map(|(_, rest)| rest.to_owned()).unwrap_or_default();
        Ok(())
    };
    writeln!(input, "What is the capital of France?")?;
    until("Paris.\n")?;
    writeln!(input, "Write a very long story about a lighthouse.")?;
    // Some of it has come.
    until(" ")?;
    send("INT", chat.id())?;
    until("[stopped]\n")?;
    writeln!(input, "What is the capital of France?")?;
    until("Paris")?;
    drop(input);
    ensure!(chat.wait()?.success());
    let mut said = String::new();
    errors.read_to_string(&mut said)?;
    // Of each answer that ended: the tokens of the conversation so far.
    let prompts = said.lines().filter_map(|line| line.split("prefill ").nth(1)?.split(' ').next()?.parse::<u32>().ok());
    let prompts: Vec<u32> = prompts.collect();
    ensure!(prompts.len() == 2 && prompts[0] == 37 && prompts[1] > 80, "{prompts:?} of {said}");
    up.stop()
}

//! `baton up` and `baton generate`, as a newcomer meets them: separate processes, started and stopped in every way.

use anyhow::{Context, ensure};
use baton_node::testing::free_ports;
use baton_tests::http::Api;
use baton_tests::processes::{Up, baton, binary, send, wait_gone};
use serde_json::json;
use std::net::TcpListener;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// Weights that are made in no time.
const RANDOM: &str = "--model=random:vocab=300,context=1024";
/// Longest wait for a first child of `baton up`.
const CHILD_MAX: Duration = Duration::from_secs(60);

/// Token ids of a completion over HTTP.
async fn complete(up: &Up) -> anyhow::Result<Vec<u64>> {
    let body = json!({"prompt": [5, 6, 7, 8], "max_tokens": 8, "temperature": 0, "ignore_eos": true, "return_token_ids": true});
    let answer = Api::new(up.openai()?).post("completions", body).await?;
    ensure!(answer.status == 200 && answer.tokens().len() == 8, "{answer:?}");
    Ok(answer.tokens())
}

#[test]
fn a_newcomer_gets_paris_and_leaves_with_ctrl_c() -> anyhow::Result<()> {
    let [grpc, http] = free_ports("127.0.0.1")?;
    let mut up = Up::spawn(&[&format!("--grpc-port={grpc}"), &format!("--http-port={http}")], &[])?;
    up.wait_serving()?;
    let printed = up.stdout();
    for expected in [format!("http://127.0.0.1:{http}/v1"), "1 prefill and 1 decode".into()] {
        ensure!(printed.contains(&expected), "{expected:?} is not in:\n{printed}");
    }
    // The README's first example, which is long enough for the other worker, and what the README says that it prints.
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let readme = std::fs::read_to_string(root.join("README.md"))?;
    let example =
        readme.lines().find_map(|line| line.strip_prefix("target/release/baton generate ")).context("no example")?;
    let line = format!("'{}' generate --server http://127.0.0.1:{grpc} {example}", binary("baton")?.display());
    let long = Command::new("sh").args(["-c", &line]).current_dir(root).output()?;
    let (answer, timings) = (String::from_utf8(long.stdout)?, String::from_utf8(long.stderr)?);
    ensure!(long.status.success(), "{timings}");
    ensure!(readme.contains(&format!("\n{}\n[queue ", answer.trim())), "the README has another answer than {answer:?}");
    let parts = ["queue ", "prefill 323 tokens in ", "transfer 7.1 MiB in ", " exposed", "TTFT ", "8 tokens at "];
    ends_with_timings(&timings, &parts)?;
    ensure!(parts.iter().all(|part| readme.contains(part)), "the README has other figures than {timings}");
    let line = printed.lines().find(|l| l.contains(" generate ")).context("no line to paste")?;
    let short = Command::new("sh").args(["-c", line]).current_dir("/").output()?;
    let (answer, timings) = (String::from_utf8(short.stdout)?, String::from_utf8(short.stderr)?);
    ensure!(short.status.success() && answer.contains("Paris"), "{answer}{timings}");
    ends_with_timings(&timings, &["queue ", "prefill 37 tokens, 16 cached, in ", "TTFT ", " tokens/s"])?;
    up.stop()
}

fn ends_with_timings(text: &str, parts: &[&str]) -> anyhow::Result<()> {
    let last = text.trim_end().lines().last().unwrap_or_default();
    ensure!(last.starts_with('[') && last.ends_with(']'), "no line of timings at the end of {text:?}");
    for part in parts {
        ensure!(last.contains(part), "{part:?} is not in {last:?}");
    }
    Ok(())
}

#[test]
fn generate_says_what_to_do_without_a_cluster() -> anyhow::Result<()> {
    let [port] = free_ports("127.0.0.1")?;
    let output = baton(&["generate", "--server", &format!("http://127.0.0.1:{port}"), "hello"])?;
    let message = String::from_utf8(output.stderr)?;
    ensure!(!output.status.success() && message.contains("`baton up`") && message.contains("--server"), "{message}");
    Ok(())
}

#[test]
fn what_cannot_start_says_why_and_starts_nothing() -> anyhow::Result<()> {
    let taken = TcpListener::bind("127.0.0.1:0")?;
    let taken = taken.local_addr()?.port();
    let (grpc, http) = (format!("--grpc-port={taken}"), format!("--http-port={taken}"));
    // (flags, variables, what the message says)
    type Case<'a> = (&'a [&'a str], &'a [(&'a str, &'a str)], &'a [&'a str]);
    let folder = tempfile::tempdir()?;
    std::fs::write(folder.path().join("config.json"), r#"{"architectures": ["FalconForCausalLM"]}"#)?;
    let unsupported = format!("--model={}", folder.path().display());
    let cases: [Case<'_>; 15] = [
        (&[&grpc, "--http-port=0"], &[], &["is taken", "--grpc-port"]),
        (&["--grpc-port=0", &http], &[], &["is taken", "--http-port"]),
        (&["--grpc-port=7777", "--http-port=7777"], &[], &["both 7777"]),
        (&["--decode=0"], &[], &["--decode 1"]),
        (&["--prefill=0", "--prefill-policy=remote"], &[], &["--prefill 1"]),
        (&["--model=./nowhere.gguf"], &[], &["./nowhere.gguf", "no such file"]),
        (&[&unsupported], &[], &["FalconForCausalLM"]),
        (&["--model=random:layers=none"], &[], &["layers=none"]),
        (&[RANDOM], &[("BATON_LIMITZ__RUNNING_MAX", "1")], &["BATON_LIMITZ__RUNNING_MAX"]),
        (&[RANDOM, "--kv-cache-bytes=lots"], &[], &["lots"]),
        (&[RANDOM, "--kv-cache-bytes=15TiB"], &[], &["lower --kv-cache-bytes"]),
        (&[RANDOM, "--draft-model=random:layers=1,vocab=301"], &[], &["has other tokens than the model"]),
        (&[RANDOM, "--max-model-len=1000000"], &[], &["lower --max-model-len"]),
        (&["--membership=etcd", "--etcd=http://127.0.0.1:1"], &[], &["cannot ask etcd", "say where it is with --etcd"]),
        (&["--membership=etcd", "--etcd-prefix=ours"], &[], &["--etcd-prefix", "ends in /"]),
    ];
    for (flags, variables, says) in cases {
        let ports = ["--grpc-port=0", "--http-port=0"];
        let named = flags.iter().any(|f| f.contains("-port="));
        let flags: Vec<&str> = flags.iter().copied().chain(ports.into_iter().filter(|_| !named)).collect();
        let mut up = Up::spawn(&flags, variables)?;
        let status = up.wait()?;
        let message = up.stderr();
        ensure!(!status.success(), "{flags:?} started");
        for part in says {
            ensure!(message.contains(part), "{flags:?}: {part:?} is not in:\n{message}");
        }
        if flags[0].starts_with("--model=") && variables.is_empty() {
            // Told once, and not by each worker.
            ensure!(message.lines().filter(|line| line.contains(says[0])).count() == 1, "{flags:?}:\n{message}");
            ensure!(!message.contains("Stopping"), "{flags:?}:\n{message}");
        }
        ensure!(up.children()?.is_empty() && !up.stdout().contains("Baton serves"), "{flags:?} left something");
    }
    Ok(())
}

#[tokio::test]
async fn clients_reach_every_address_of_the_host_and_workers_stay_on_loopback() -> anyhow::Result<()> {
    let mut up = Up::spawn(&["--grpc-port=0", "--http-port=0", RANDOM, "--host=0.0.0.0"], &[])?;
    up.wait_serving()?;
    complete(&up).await?;
    // What is told can be called from here; another address of this host is one of loopback's.
    let base = up.openai()?;
    ensure!(base.starts_with("http://127.0.0.1:"), "{base}");
    let elsewhere = base.replace("127.0.0.1", "127.0.0.9");
    ensure!(Api::new(elsewhere).get("models").await?.status == 200);
    ensure!(up.stdout().lines().any(|line| line.trim().starts_with("others ")), "{}", up.stdout());
    for worker in ["decode-0", "prefill-0"] {
        let elsewhere = up.metrics(worker)?.replace("127.0.0.1", "127.0.0.9");
        ensure!(reqwest::get(&elsewhere).await.is_err(), "{worker} listens at {elsewhere}");
    }
    up.stop()
}

#[test]
fn variables_reach_the_processes_that_know_them() -> anyhow::Result<()> {
    let variables = [("BATON_ENGINE__KV_CACHE_BYTES", "1MiB"), ("BATON_LIMITS__DEADLINE_MS_MAX", "7200000")];
    let mut up = Up::spawn(&["--grpc-port=0", "--http-port=0", RANDOM], &variables)?;
    up.wait_serving()?;
    up.stop()
}

#[tokio::test]
async fn every_shape_serves_and_every_end_is_clean() -> anyhow::Result<()> {
    let mut answers = Vec::new();
    // (flags, children, signal)
    let shapes: [(&[&str], usize, &str); 3] = [
        (&[RANDOM, "--prefill=0"], 2, "TERM"),
        (&[RANDOM, "--prefill=2", "--decode=2", "--prefill-policy=remote"], 5, "INT"),
        (&[RANDOM, "--transport=tcp", "--prefill-policy=remote"], 3, "HUP"),
    ];
    for (flags, expected, signal) in shapes {
        let mut up = Up::start(flags)?;
        let children = up.children()?;
        ensure!(children.len() == expected, "{flags:?} runs {children:?}");
        for _ in 0..4 {
            answers.push(complete(&up).await?);
        }
        up.signal(signal)?;
        let status = up.wait()?;
        ensure!(status.success(), "SIG{signal}: {status}\n{}", up.stderr());
        wait_gone(&children).with_context(|| format!("SIG{signal}"))?;
        up.no_errors()?;
    }
    ensure!(answers.iter().all(|a| *a == answers[0]), "{answers:?}");
    Ok(())
}

#[test]
fn a_killed_up_leaves_no_process() -> anyhow::Result<()> {
    let mut up = Up::start(&[RANDOM])?;
    let children = up.children()?;
    ensure!(children.len() == 3, "{children:?}");
    up.signal("KILL")?;
    up.wait()?;
    wait_gone(&children)?;
    // While it starts, nothing is left either.
    let mut up = Up::spawn(&["--grpc-port=0", "--http-port=0"], &[])?;
    let deadline = Instant::now() + CHILD_MAX;
    while up.children()?.is_empty() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    let children = up.children()?;
    ensure!(!children.is_empty(), "no child was started:\n{}", up.stderr());
    up.signal("KILL")?;
    up.wait()?;
    wait_gone(&children)
}

#[test]
fn the_death_of_a_part_ends_the_cluster_with_a_message() -> anyhow::Result<()> {
    let mut up = Up::start(&[RANDOM])?;
    let children = up.children()?;
    send("KILL", up.child("--instance=decode-0")?)?;
    let status = up.wait()?;
    ensure!(!status.success(), "it ended as if all were well");
    let message = up.stderr();
    ensure!(message.contains("decode-0 ended") && message.contains("signal: 9"), "{message}");
    wait_gone(&children)
}

#[tokio::test]
async fn a_part_that_is_terminated_finishes_what_runs() -> anyhow::Result<()> {
    let tokens = 3000;
    let body = json!({"prompt": [5, 6], "max_tokens": tokens, "ignore_eos": true, "stream": true,
        "stream_options": {"include_usage": true}, "return_token_ids": true});
    for (part, argument) in [("router", "--http-listen="), ("decode-0", "--instance=decode-0")] {
        let model = "--model=random:vocab=300,context=65536,hidden=128,layers=8";
        let mut up = Up::start(&[model, "--kv-cache-bytes=512MiB", "--prefill=0"])?;
        let children = up.children()?;
        let mut stream = Api::new(up.openai()?).open("completions", body.clone(), &[]).await?.error_for_status()?;
        ensure!(stream.chunk().await?.is_some(), "the stream ended before it began");
        send("TERM", up.child(argument)?)?;
        // It drains: what runs goes on to its end.
        let mut text = String::new();
        while let Some(chunk) = stream.chunk().await? {
            text += &String::from_utf8_lossy(&chunk);
        }
        let end = &text[text.len().saturating_sub(600)..];
        ensure!(end.trim_end().ends_with("data: [DONE]"), "{part} cut it off: {end}");
        ensure!(end.contains(&format!("\"completion_tokens\":{tokens}")), "{end}");
        // A part ended, so the rest does.
        let status = up.wait()?;
        ensure!(!status.success() && up.stderr().contains(&format!("{part} ended")), "{status}\n{}", up.stderr());
        wait_gone(&children)?;
        up.no_errors()?;
    }
    Ok(())
}

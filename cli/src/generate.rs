//! `baton generate`: one prompt, the streamed answer, and a line with its timings.

use crate::grpc::{Last, Options, Prompt, Question};
use crate::router::{RouterArgs, explain};
use anyhow::{Context, ensure};
use clap::Args;
use std::io::Write;
use std::time::{Duration, Instant};

/// Arguments of `baton generate`.
#[derive(Args, Debug)]
pub(crate) struct GenerateArgs {
    /// The prompt: one user message of a chat.
    prompt: String,
    #[command(flatten)]
    router: RouterArgs,
    /// Served name of the model; optional if the cluster serves only one.
    #[arg(long, default_value = "")]
    model: String,
    /// System message that precedes the prompt.
    #[arg(long)]
    system: Option<String>,
    /// Continue the prompt as plain text, without a chat template.
    #[arg(long)]
    raw: bool,
    /// Maximum number of tokens to generate. Default: the rest of the context.
    #[arg(long)]
    max_tokens: Option<u32>,
    /// Sampling temperature; 0 is greedy.
    #[arg(long, default_value_t = 0.0)]
    temperature: f32,
    /// Nucleus sampling: keep the most likely tokens whose probabilities add up to this.
    #[arg(long)]
    top_p: Option<f32>,
    /// Keep only the k most likely tokens.
    #[arg(long)]
    top_k: Option<u32>,
    /// Seed of the sampling; random by default.
    #[arg(long)]
    seed: Option<u64>,
    /// Text that ends the answer; may be repeated.
    #[arg(long)]
    stop: Vec<String>,
    /// Check an installation: run the prompt on a prefill worker without any cache, and fail unless its KV moved to a decode worker.
    #[arg(long, conflicts_with = "stop")]
    expect_transfer: bool,
    /// Give up after this many seconds.
    #[arg(long, default_value_t = 600)]
    timeout_s: u64,
}

impl GenerateArgs {
    fn question(&self) -> Question {
        let user = self.prompt.clone();
        Question {
            model: self.model.clone(),
            prompt: if self.raw { Prompt::Text(user) } else { Prompt::Chat { system: self.system.clone(), user } },
            options: Options {
                temperature: self.temperature,
                top_p: self.top_p,
                top_k: self.top_k,
                seed: self.seed,
                max_tokens: self.max_tokens,
                // An answer that ends with its first token needs no decode worker.
                ignore_eos: self.expect_transfer,
                stop: self.stop.clone(),
                remote_uncached: self.expect_transfer,
            },
        }
    }
}

/// Sends the prompt and prints the answer as it arrives.
pub(crate) async fn run(args: GenerateArgs) -> anyhow::Result<()> {
    ensure!(!(args.raw && args.system.is_some()), "--system needs a chat; remove --raw");
    let channel = args.router.connect("start a cluster with `baton up`, or ").await?;
    let sent = Instant::now();
    let mut answer =
        args.question().ask(channel, Duration::from_secs(args.timeout_s)).await.map_err(|s| explain(&s))?;
    let mut first = None;
    let mut last = None;
    while let Some(part) = answer.next().await.map_err(|s| explain(&s))? {
        if part.tokens > 0 {
            first.get_or_insert_with(|| sent.elapsed());
        }
        print!("{}", part.text);
        std::io::stdout().flush()?;
        last = part.last.or(last);
    }
    println!();
    let last = last.context("the answer ended without its last message")?;
    eprintln!("{}", timings_line(&last, first.unwrap_or_default(), sent.elapsed()));
    let bytes = last.transfer_bytes.unwrap_or(0);
    ensure!(
        !args.expect_transfer || bytes > 0,
        "no KV moved from a prefill worker to a decode worker: `baton status` shows which workers are ready"
    );
    if !last.crossed_classes.is_empty() {
        eprintln!(
            "[workers of several numerics classes generated this answer, one after the other: {}]",
            last.crossed_classes.join(", ")
        );
    }
    Ok(())
}

/// One line: queue, prefill, transfer with its exposed part, TTFT as measured here, tokens per second after the first, and the request's
/// id.
fn timings_line(last: &Last, ttft: Duration, total: Duration) -> String {
    let ms = |us: u64| format!("{:.1} ms", us as f64 / 1e3);
    let mut parts = Vec::new();
    parts.extend(last.queue_us.map(|us| format!("queue {}", ms(us))));
    let cached = if last.cached_tokens > 0 { format!(", {} cached,", last.cached_tokens) } else { String::new() };
    parts.extend(last.prefill_us.map(|us| format!("prefill {} tokens{cached} in {}", last.prompt_tokens, ms(us))));
    if let (Some(transfer), Some(bytes)) = (last.transfer_us, last.transfer_bytes) {
        let exposed = last.exposed_us.map(|us| format!(", {} exposed", ms(us))).unwrap_or_default();
        parts.push(format!("transfer {:.1} MiB in {}{exposed}", bytes as f64 / f64::from(1 << 20), ms(transfer)));
    }
    parts.push(format!("TTFT {:.1} ms", ttft.as_secs_f64() * 1e3));
    if last.completion_tokens > 1 {
        let rate = f64::from(last.completion_tokens - 1) / (total - ttft).as_secs_f64().max(1e-6);
        parts.push(format!("{} tokens at {rate:.1} tokens/s", last.completion_tokens));
    }
    // The argument of `baton trace`.
    if !last.request_id.is_empty() {
        parts.push(format!("request {}", last.request_id));
    }
    format!("[{}]", parts.join(" | "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: GenerateArgs,
    }

    #[test]
    fn a_check_of_an_installation_asks_for_what_moves_kv() {
        let options = |line: &[&str]| Line::parse_from([&["generate", "hello"], line].concat()).args.question().options;
        let check = options(&["--expect-transfer", "--max-tokens=8"]);
        assert!(check.remote_uncached && check.ignore_eos);
        let plain = options(&[]);
        assert!(!plain.remote_uncached && !plain.ignore_eos);
    }

    #[test]
    fn timings_are_told_in_one_line() {
        let last = Last {
            request_id: "chat-7".into(),
            prompt_tokens: 42,
            completion_tokens: 11,
            queue_us: Some(200),
            prefill_us: Some(12_300),
            transfer_us: Some(9_000),
            exposed_us: Some(400),
            transfer_bytes: Some(3 << 20),
            ..Last::default()
        };
        let line = |last: &Last| timings_line(last, Duration::from_millis(20), Duration::from_millis(120));
        let expected = "[queue 0.2 ms | prefill 42 tokens in 12.3 ms | transfer 3.0 MiB in 9.0 ms, 0.4 ms exposed | TTFT 20.0 ms | 11 tokens at 100.0 tokens/s | request chat-7]";
        assert_eq!(line(&last), expected);
        let last = Last { cached_tokens: 32, ..last };
        assert_eq!(line(&last), expected.replace("42 tokens in", "42 tokens, 32 cached, in"));
    }
}

//! `baton generate`: one prompt, the streamed answer, and a line with its timings. Without a prompt, a chat.

mod chat;

use crate::grpc::{Last, Message, Options, Prompt, Question};
use crate::router::{RouterArgs, RouterChannel, explain};
use crate::stdout::harmless;
use anyhow::{Context, ensure};
use clap::Args;
use std::io::{IsTerminal as _, Write};
use std::time::{Duration, Instant};

/// Arguments of `baton generate`.
#[derive(Args, Debug)]
pub(crate) struct GenerateArgs {
    /// The prompt: one user message of a chat. Without it, a chat of many turns: Ctrl-C stops an answer, Ctrl-D ends.
    #[arg(required_if_eq_any([("raw", "true"), ("expect_transfer", "true")]))]
    prompt: Option<String>,
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
    fn question(&self, prompt: Prompt) -> Question {
        Question {
            model: self.model.clone(),
            prompt,
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

    /// The messages that come before those of the user.
    fn first_messages(&self) -> Vec<Message> {
        self.system.iter().map(|system| Message { role: "system", content: system.clone() }).collect()
    }

    fn prompt_of(&self, text: String) -> Prompt {
        if self.raw {
            return Prompt::Text(text);
        }
        let mut messages = self.first_messages();
        messages.push(Message { role: "user", content: text });
        Prompt::Chat(messages)
    }
}

/// An answer that was printed.
struct Printed {
    last: Last,
    /// Until its first token.
    ttft: Duration,
    took: Duration,
}

/// Sends the prompt and prints the answer as it arrives; without a prompt, chats.
pub(crate) async fn run(args: GenerateArgs) -> anyhow::Result<()> {
    ensure!(!(args.raw && args.system.is_some()), "--system needs a chat; remove --raw");
    let channel = args.router.connect("start a cluster with `baton up`, or ").await?;
    let Some(prompt) = args.prompt.clone() else { return chat::run(&args, channel).await };
    let mut text = String::new();
    let printed = print(&args, args.prompt_of(prompt), channel, &mut text).await?;
    tell_timings(&printed);
    let bytes = printed.last.transfer_bytes.unwrap_or(0);
    ensure!(
        !args.expect_transfer || bytes > 0,
        "no KV moved from a prefill worker to a decode worker: `baton status` shows which workers are ready"
    );
    Ok(())
}

/// Prints an answer as it arrives; `text` has what has come, also if this future is dropped.
async fn print(
    args: &GenerateArgs,
    prompt: Prompt,
    channel: RouterChannel,
    text: &mut String,
) -> anyhow::Result<Printed> {
    let sent = Instant::now();
    let timeout = Duration::from_secs(args.timeout_s);
    let mut answer = args.question(prompt).ask(channel, timeout).await.map_err(|s| explain(&s))?;
    let (mut first, mut last) = (None, None);
    let is_terminal = std::io::stdout().is_terminal();
    while let Some(part) = answer.next().await.map_err(|s| explain(&s))? {
        if part.tokens > 0 {
            first.get_or_insert_with(|| sent.elapsed());
        }
        print!("{}", if is_terminal { harmless(&part.text) } else { part.text.as_str().into() });
        std::io::stdout().flush()?;
        text.push_str(&part.text);
        last = part.last.or(last);
    }
    println!();
    let last = last.context("the answer ended without its last message")?;
    Ok(Printed { last, ttft: first.unwrap_or_default(), took: sent.elapsed() })
}

fn tell_timings(Printed { last, ttft, took }: &Printed) {
    eprintln!("{}", timings_line(last, *ttft, *took));
    if !last.crossed_classes.is_empty() {
        eprintln!(
            "[workers of several numerics classes generated this answer, one after the other: {}]",
            last.crossed_classes.join(", ")
        );
    }
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
        let options = |line: &[&str]| {
            let args = Line::parse_from([&["generate", "hello"], line].concat()).args;
            args.question(args.prompt_of("hello".into())).options
        };
        let check = options(&["--expect-transfer", "--max-tokens=8"]);
        assert!(check.remote_uncached && check.ignore_eos);
        let plain = options(&[]);
        assert!(!plain.remote_uncached && !plain.ignore_eos);
    }

    #[test]
    fn what_needs_a_prompt_says_so() {
        assert!(Line::try_parse_from(["generate"]).unwrap().args.prompt.is_none());
        for flag in ["--raw", "--expect-transfer"] {
            assert!(Line::try_parse_from(["generate", flag]).is_err(), "{flag}");
            assert!(Line::try_parse_from(["generate", flag, "hello"]).is_ok(), "{flag}");
        }
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

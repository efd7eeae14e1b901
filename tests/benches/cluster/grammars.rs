//! Answers within a JSON schema and without one, eight at a time, in turns on one split cluster.

use crate::statistics::{median, paired_ratio};
use crate::summary::{Figure, Summary, Target};
use crate::up::{Seen, Up, draw};
use baton_proto::v1::{self, PrefillPolicy};
use rand::SeedableRng;
use rand::rngs::StdRng;

const CLIENTS: usize = 8;
const PROMPT_TOKENS: usize = 64;
const OUTPUT_TOKENS: usize = 96;
/// How much later first tokens come differs between rounds by some 50 ms, by how the prompts fall into steps: of 96, the mean is known to 5.
const ROUNDS: usize = 96;
/// How much later the first token may come, in milliseconds.
const FIRST_TOKEN_MS: f64 = 10.0;
/// More entries than an answer has tokens.
const SCHEMA: &str = r#"{
    "type": "array",
    "minItems": 100,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "role": {"enum": ["admin", "editor", "reader"]},
            "mail": {"type": "string", "pattern": "^[a-z]{1,16}@[a-z]{1,12}\\.org$"},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4}
        },
        "required": ["name", "age", "role", "mail", "tags"],
        "additionalProperties": false
    }
}"#;

pub(crate) fn measure(summary: &mut Summary) -> anyhow::Result<()> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(rounds(summary))
}

async fn rounds(summary: &mut Summary) -> anyhow::Result<()> {
    eprintln!("{CLIENTS} answers of {OUTPUT_TOKENS} tokens at once, within a JSON schema and without");
    let up = Up::start(1).await?;
    let schema = v1::Grammar { kind: Some(v1::grammar::Kind::JsonSchema(SCHEMA.into())) };
    let mut random = StdRng::seed_from_u64(5);
    let (mut rates, mut first_ms) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
    for round in 0..=ROUNDS {
        let prompts: Vec<Vec<u32>> = (0..CLIENTS).map(|_| draw(&mut random, PROMPT_TOKENS)).collect();
        for turn in 0..2 {
            let way = (round + turn) % 2;
            // A schema does not go with `ignore_eos`. Its answers are cut off within the array.
            let sampling = v1::Sampling { temperature: Some(1.0), ignore_eos: way == 0, ..Default::default() };
            let request = v1::GenerateRequest {
                sampling: Some(sampling),
                prefill_policy: PrefillPolicy::Remote.into(),
                grammar: (way == 1).then(|| schema.clone()),
                ..Default::default()
            };
            let answers = prompts.iter().map(|prompt| up.ask_as(prompt, OUTPUT_TOKENS, request.clone()));
            let seen = futures::future::try_join_all(answers).await?;
            if round > 0 {
                rates[way].push(rate(&seen));
                first_ms[way].push(median(seen.iter().map(|seen| seen.at_ms[0]).collect()));
            }
        }
    }
    up.stop().await?;
    let [without, within] = rates;
    let of = format!("without a schema, {:.0} tokens/s", median(without.clone()));
    let ratio = paired_ratio(&within, &without);
    let figure = Figure::ratio(median(within), "tokens/s", ratio, of);
    summary.add("grammar_decode_b8", figure, Target::AtLeast(0.95));
    let [without, within] = first_ms;
    let later = median(within.iter().zip(&without).map(|(within, without)| within - without).collect());
    let of = format!("{FIRST_TOKEN_MS} ms that it may come later than without, after {:.0} ms", median(without));
    let figure = Figure::ratio(later, "ms", later / FIRST_TOKEN_MS, of);
    summary.add("grammar_first_token_later", figure, Target::AtMost(1.0));
    Ok(())
}

/// Tokens per second from the last first token to the first last one, while all are answered.
fn rate(seen: &[Seen]) -> f64 {
    let begin = seen.iter().map(|seen| seen.at_ms[0]).fold(0.0, f64::max);
    let end = seen.iter().filter_map(|seen| seen.at_ms.last().copied()).fold(f64::INFINITY, f64::min);
    let tokens = seen.iter().flat_map(|seen| &seen.at_ms).filter(|at| **at > begin && **at <= end).count();
    tokens as f64 / (end - begin) * 1e3
}

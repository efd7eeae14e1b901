//! One process against two: what a decode worker computes by itself, and what it computes from KV that a prefill worker hands over.

use crate::{Where, write};
use anyhow::{Context, ensure};
use baton_tests::http::Api;
use baton_tests::processes::Up;
use baton_tests::scrape;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};
use std::path::Path;

/// Requests at once.
const TOGETHER: usize = 16;

struct Sizes {
    model: &'static str,
    vocab: u32,
    requests: usize,
    outputs: usize,
    longest: usize,
}

const SMALL: Sizes = Sizes {
    model: "random:hidden=512,heads=8,kv_heads=2,head_dim=64,ffn=1024,vocab=1000,context=2048,layers=4,seed=3",
    vocab: 1000,
    requests: 128,
    outputs: 40,
    longest: 900,
};

const TINY: Sizes = Sizes {
    model: "random:hidden=64,heads=4,kv_heads=2,head_dim=16,ffn=128,vocab=300,context=512,layers=2,seed=3",
    vocab: 300,
    requests: 6,
    outputs: 6,
    longest: 150,
};

pub(crate) fn run(on: &Where, out: &Path) -> anyhow::Result<()> {
    let sizes = if on.is_quick() { &TINY } else { &SMALL };
    let mut random = StdRng::seed_from_u64(17);
    let prompts: Vec<Vec<u32>> = (0..sizes.requests)
        .map(|_| {
            let len = random.random_range(1..=sizes.longest);
            (0..len).map(|_| random.random_range(0..sizes.vocab)).collect()
        })
        .collect();
    // Each again with more tokens: the prefill worker gets the blocks that only the decode worker has, where they pay.
    let longer: Vec<Vec<u32>> = prompts.iter().map(|prompt| [&prompt[..], &[1; 40]].concat()).collect();
    let runtime = tokio::runtime::Runtime::new()?;
    let one = runtime.block_on(Served::by(on, sizes, "local", &prompts, &longer))?;
    let two = runtime.block_on(Served::by(on, sizes, "remote", &prompts, &longer))?;
    let mut failed = Vec::new();
    if one.sent != 0.0 || two.sent == 0.0 {
        failed.push(format!("{} bytes of KV were handed over by one process, {} by two", one.sent, two.sent));
    }
    let mut compared = Vec::new();
    for (of, one, two) in [("fresh prompts", &one.fresh, &two.fresh), ("prompts that go on", &one.longer, &two.longer)]
    {
        let rows = one.len() * sizes.outputs;
        let different = one.iter().zip(two).map(|(one, two)| rows_that_differ(one, two)).sum::<usize>();
        println!("clusters: {of}: {different} of {rows} rows differ");
        if different > 0 {
            failed.push(format!("{of}: {different} of {rows} rows differ"));
        }
        compared.push(json!({"of": of, "rows": rows, "different": different}));
    }
    let engine = if on.is_recorded() { "cpu: workers have no recorded GPU" } else { on.device.as_str() };
    let outcome = json!({"workers": engine, "compared": compared, "kv_bytes": two.sent});
    write(on, out, "clusters", outcome, &failed)
}

struct Served {
    /// The choice of each answer.
    fresh: Vec<Value>,
    longer: Vec<Value>,
    /// Bytes of KV that the prefill worker sent.
    sent: f64,
}

impl Served {
    async fn by(
        on: &Where,
        sizes: &Sizes,
        policy: &str,
        prompts: &[Vec<u32>],
        longer: &[Vec<u32>],
    ) -> anyhow::Result<Self> {
        let device = if on.is_recorded() { "cpu" } else { on.device.as_str() };
        let kernels = on.kernels.canonicalize().context("the kernels' folder")?;
        let kernels = kernels.to_str().context("the kernels' folder has no plain name")?;
        let mut variables = vec![("BATON_ENGINE__DEVICE", device)];
        if !on.is_recorded() {
            // Two workers share the GPU.
            variables
                .extend([("BATON_ENGINE__CUDA_KERNELS", kernels), ("BATON_ENGINE__GPU_MEMORY_UTILIZATION", "0.3")]);
        }
        let (model, policy_flag) = (format!("--model={}", sizes.model), format!("--prefill-policy={policy}"));
        let flags = [model.as_str(), policy_flag.as_str()];
        let up = Up::start_with(&flags, &variables)?;
        let api = Api::new(up.openai()?);
        let fresh = answers(&api, sizes, policy, prompts).await?;
        let longer = answers(&api, sizes, policy, longer).await?;
        let sent =
            scrape::sum(&up.metrics("prefill-0")?, "baton_kv_transfer_bytes_total", &["direction=\"sent\""]).await?;
        up.stop()?;
        Ok(Self { fresh, longer, sent })
    }
}

async fn answers(api: &Api, sizes: &Sizes, policy: &str, prompts: &[Vec<u32>]) -> anyhow::Result<Vec<Value>> {
    let mut all = Vec::new();
    for (part, prompts) in prompts.chunks(TOGETHER).enumerate() {
        let requests = prompts.iter().enumerate().map(|(i, prompt)| {
            let seed = part * TOGETHER + i;
            let body = json!({
                "prompt": prompt,
                "max_tokens": sizes.outputs,
                "ignore_eos": true,
                "temperature": if seed.is_multiple_of(2) { 0.0 } else { 1.1 },
                "seed": seed,
                "logprobs": 5,
                "return_token_ids": true,
                "prefill_policy": policy,
            });
            api.post("completions", body)
        });
        for answer in futures::future::try_join_all(requests).await? {
            ensure!(answer.status == 200 && answer.tokens().len() == sizes.outputs, "{answer:?}");
            let choice = answer.body["choices"][0].clone();
            ensure!(choice["logprobs"].is_object(), "no log-probabilities: {choice}");
            all.push(choice);
        }
    }
    Ok(all)
}

/// Tokens of an answer whose log-probabilities, or whose alternatives', are not the same number.
fn rows_that_differ(one: &Value, two: &Value) -> usize {
    let row = |of: &Value, i: usize| {
        let logprobs = &of["logprobs"];
        json!([of["token_ids"][i], logprobs["token_logprobs"][i], logprobs["top_logprobs"][i]])
    };
    let rows = one["token_ids"].as_array().map_or(0, Vec::len);
    (0..rows).filter(|i| row(one, *i) != row(two, *i)).count()
}

//! Two models behind one router: each request finds its own, whatever the other does.

use anyhow::ensure;
use baton_tests::cluster::{Cluster, ClusterSpec, worker};
use baton_tests::http::{Answer, Api};
use baton_tests::logs;
use baton_tests::quiet::until_quiet;
use serde_json::{Value, json};

const SMOL: &str = "smollm2-135m-instruct";
const RANDOM: &str = "random:vocab=300,context=512,seed=5";

#[tokio::test(flavor = "multi_thread")]
async fn each_request_finds_its_model() -> anyhow::Result<()> {
    logs::watch();
    let (mut smol, mut random) = (worker(SMOL), worker(RANDOM));
    smol.model.served_names = vec!["tiny".into()];
    random.model.served_names = vec!["dice".into()];
    let mut spec = ClusterSpec::new(0, 0, &smol);
    spec.prefill = vec![smol.clone(), random.clone()];
    spec.decode = vec![smol, random];
    let cluster = Cluster::start(spec).await?;
    let api = Api::new(cluster.http());

    let models = api.get("models").await?.body;
    let mut names: Vec<&str> =
        models["data"].as_array().into_iter().flatten().filter_map(|m| m["id"].as_str()).collect();
    names.sort_unstable();
    ensure!(names == ["dice", "tiny"], "{models}");

    let question = json!([{"role": "user", "content": "What is the capital of France?"}]);
    let chat = |model: &str, policy: &str| {
        let body = json!({"model": model, "messages": question, "temperature": 0, "prefill_policy": policy});
        api.post("chat/completions", body)
    };
    let roll = |policy: &str| {
        let body = json!({"model": "dice", "messages": question, "temperature": 0, "max_tokens": 12, "ignore_eos": true,
            "return_token_ids": true, "prefill_policy": policy});
        api.post("chat/completions", body)
    };
    // At the same time, on prefill workers and on decode workers.
    let (remote, local, dice, dice_local) =
        tokio::try_join!(chat(SMOL, "remote"), chat("tiny", "local"), roll("remote"), roll("local"))?;
    for answer in [&remote, &local] {
        ensure!(
            answer.status == 200 && answer.text().contains("Paris") && answer.body["model"] == "tiny",
            "{answer:?}"
        );
    }
    ensure!(dice.tokens().len() == 12 && dice.tokens() == dice_local.tokens(), "{dice:?} {dice_local:?}");
    ensure!(dice.body["model"] == "dice", "{dice:?}");
    // Each model lays a chat out by its own template and tokenizer.
    let prompt_tokens = |answer: &Answer| answer.body["usage"]["prompt_tokens"].clone();
    ensure!(prompt_tokens(&remote) == 37 && prompt_tokens(&dice) != 37, "{remote:?} {dice:?}");

    // Errors name what is wrong: no such model, none named among several, a token that only the other model has.
    let refused: [(Value, u16, &str); 3] = [
        (json!({"model": "gpt", "prompt": [1]}), 404, "gpt"),
        (json!({"prompt": [1]}), 400, "model"),
        (json!({"model": "dice", "prompt": [301]}), 400, "vocabulary of 300"),
    ];
    for (body, status, says) in refused {
        let answer = api.post("completions", body.clone()).await?;
        let message = answer.body["error"]["message"].as_str().unwrap_or_default();
        ensure!(answer.status == status && message.contains(says), "{body}: {answer:?}");
    }
    until_quiet(&cluster).await?;
    cluster.stop().await;
    logs::no_errors()
}

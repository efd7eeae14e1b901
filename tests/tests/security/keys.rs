//! API keys on the shipped binaries: OpenAI's Python client and `baton` itself, with a key, a wrong one and none.

use anyhow::ensure;
use baton_tests::processes::{Up, baton_with, python_client};

const RANDOM: &str = "--model=random:vocab=300";
/// SHA-256 of `sk-alice` and of `sk-ops`, as `printf %s sk-alice | sha256sum` prints them.
const KEYS: &str = "\
# alice is a client, ops runs the cluster
099295a3784e1bd368dc348843a7398c1931b6b8ec2504c73e91ed2040bdc46c alice
c391959605db2757d87bf45d5f4c9bda42b68e95dcd157bf4f2473516c2bc9bb ops operator
";

#[test]
fn real_clients_need_a_key() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("keys");
    std::fs::write(&file, KEYS)?;
    let file = file.to_string_lossy().into_owned();
    let variables = [("BATON_AUTH__KEYS_FILE", file.as_str())];
    let mut up = Up::spawn(&["--grpc-port=0", "--http-port=0", RANDOM, "--prefill=0"], &variables)?;
    up.wait_serving()?;
    println!("{}", python_client("openai_keys.py", &[&up.openai()?, "sk-alice"])?);

    let server = format!("http://{}", up.grpc()?);
    let run = |arguments: &[&str], key: &str| -> anyhow::Result<(bool, String)> {
        let output = baton_with(&[arguments, &["--server", &server]].concat(), &[("BATON_API_KEY", key)])?;
        Ok((output.status.success(), String::from_utf8(output.stderr)?))
    };
    let generate = ["generate", "--raw", "--max-tokens=4", "hello"];
    let (served, said) = run(&generate, "sk-alice")?;
    ensure!(served, "{said}");
    for key in ["", "sk-mallory"] {
        let (served, said) = run(&generate, key)?;
        ensure!(!served && said.contains("API key") && said.contains("BATON_API_KEY"), "{key}: {said}");
    }
    let load = ["bench", "--token-ids=10-250", "--requests=3", "--prompt-tokens=20", "--output-tokens=4"];
    for (key, served) in [("sk-alice", true), ("sk-mallory", false)] {
        let (got, said) = run(&load, key)?;
        ensure!(got == served && said.contains("BATON_API_KEY") != served, "{key}: {said}");
    }
    let (drained, said) = run(&["drain", "decode-0"], "sk-alice")?;
    ensure!(!drained && said.contains("operator"), "{said}");
    let (drained, said) = run(&["drain", "decode-0"], "sk-ops")?;
    ensure!(drained, "{said}");
    up.stop()
}

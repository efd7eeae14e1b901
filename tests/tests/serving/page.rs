//! The router's page, driven by a real browser.

use baton_tests::processes::{Up, python_client};
use std::path::Path;

/// SHA-256 of `sk-alice` and of `sk-ops`, as `printf %s sk-alice | sha256sum` prints them.
const KEYS: &str = "\
099295a3784e1bd368dc348843a7398c1931b6b8ec2504c73e91ed2040bdc46c alice
c391959605db2757d87bf45d5f4c9bda42b68e95dcd157bf4f2473516c2bc9bb ops operator
";

fn base(up: &Up) -> anyhow::Result<String> {
    Ok(up.openai()?.trim_end_matches("/v1").to_owned())
}

#[test]
fn the_page_works_in_a_browser() -> anyhow::Result<()> {
    let hostile = "--served-model-name=<img src=x onerror=window.owned=1>";
    let up = Up::start(&["--kv-cache-bytes=256MiB", hostile])?;
    let pictures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/page");
    std::fs::create_dir_all(&pictures)?;
    println!("{}", python_client("page_client.py", &[&base(&up)?, &pictures.to_string_lossy()])?);
    up.stop()
}

#[test]
fn keys_open_what_they_are_for() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("keys");
    std::fs::write(&file, KEYS)?;
    let file = file.to_string_lossy().into_owned();
    let flags = ["--prefill=0", "--kv-cache-bytes=256MiB"];
    let up = Up::start_with(&flags, &[("BATON_AUTH__KEYS_FILE", &file)])?;
    println!("{}", python_client("page_keys.py", &[&base(&up)?, "sk-alice", "sk-ops"])?);
    up.stop()
}

//! TLS on the ports for clients, with a certificate of an authority that is not the cluster's.

use anyhow::{Context, ensure};
use baton_node::testing::certificates::certificates;
use baton_tests::processes::{Up, baton_with};
use std::fs;
use std::process::Command;

const MODEL: &str = "--model=random:vocab=300,context=1024";
const KEY: &str = "k-3f9a";

#[test]
fn clients_trust_the_certificate_show_the_key_and_are_answered() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    certificates(folder.path())?;
    let own = folder.path().join("public");
    fs::create_dir(&own)?;
    fs::copy(folder.path().join("node.pem"), own.join("tls.crt"))?;
    fs::copy(folder.path().join("node.key"), own.join("tls.key"))?;
    fs::copy(folder.path().join("ca.pem"), own.join("ca.crt"))?;
    let authority = folder.path().join("ca.pem").display().to_string();
    let up = Up::start(&[MODEL, &format!("--tls={}", own.display()), &format!("--api-key={KEY}")])?;
    let (grpc, openai) = (up.grpc()?, up.openai()?);
    ensure!(openai.starts_with("https://"), "{openai}");
    let said = up.stdout();
    let trusted = own.join("ca.crt").display().to_string();
    for part in [&format!("--ca {trusted}"), &format!("--cacert {trusted}"), "Bearer $BATON_API_KEY"] {
        ensure!(said.contains(part) && !said.contains(KEY), "{part}: {said}");
    }

    let bearer = format!("authorization: Bearer {KEY}");
    let body = r#"{"prompt": [5, 6, 7], "max_tokens": 2}"#;
    let ask = |trust: &[&str], url: &str, header: &str| {
        let line = ["-sS", "-m", "60", "-o", "-", "-w", "%{http_code} %{http_version}", "-H", header];
        let call = ["-H", "content-type: application/json", "-d", body, url];
        Command::new("curl").args(line).args(trust).args(call).output().context("no curl")
    };
    let url = format!("{openai}/completions");
    let answer = ask(&["--cacert", &authority], &url, &bearer)?;
    let said = String::from_utf8(answer.stdout)?;
    ensure!(said.contains("\"choices\"") && said.ends_with("200 1.1"), "{said}");
    let answer = ask(&["--cacert", &authority], &url, "authorization: Bearer other")?;
    ensure!(String::from_utf8(answer.stdout)?.contains("401"), "another key");
    let strange = ask(&[], &url, &bearer)?;
    ensure!(!strange.status.success() && strange.stdout.starts_with(b"000"), "an authority that curl does not know");
    let clear = ask(&[], &url.replace("https://", "http://"), &bearer)?;
    ensure!(!clear.status.success(), "the key went in the clear, and was answered");

    let generate = |server: &str, flags: &[&str]| {
        let line = ["generate", "--server", server, "--max-tokens", "2", "hello"];
        baton_with(&[&line, flags].concat(), &[("BATON_API_KEY", KEY)])
    };
    let told = |server: &str, flags: &[&str]| anyhow::Ok(String::from_utf8(generate(server, flags)?.stderr)?);
    let (secure, open) = (format!("https://{grpc}"), format!("http://{grpc}"));
    let answer = generate(&secure, &["--ca", &authority])?;
    ensure!(answer.status.success(), "{}", String::from_utf8_lossy(&answer.stderr));
    let error = told(&open, &["--ca", &authority])?;
    ensure!(error.contains("--server https://"), "{error}");
    // What the library says of it depends on which byte came first.
    ensure!(!generate(&open, &[])?.status.success(), "gRPC in the clear was answered");
    let error = told(&secure, &[])?;
    ensure!(error.contains("no router answers") || error.contains("trusts no authority"), "{error}");

    let folder = own.display().to_string();
    fs::remove_file(own.join("tls.key"))?;
    let failed = Up::start(&[MODEL, &format!("--tls={folder}")]).err().context("it starts without its key")?;
    ensure!(format!("{failed:#}").contains("tls.dir, which holds tls.crt and tls.key"), "{failed:#}");
    up.stop()
}

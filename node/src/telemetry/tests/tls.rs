//! Collectors with certificates.

use super::*;
use crate::testing::certificates::certificates;
use std::path::Path;
use tempfile::tempdir;

fn trusting(url: &str, authority: Option<&Path>) -> TelemetryConfig {
    TelemetryConfig { otlp_ca_file: authority.map(Path::to_owned), ..config(Some(url)) }
}

#[tokio::test]
async fn spans_reach_a_collector_whose_authority_is_named_and_no_other() {
    let (folder, strangers) = (tempdir().unwrap(), tempdir().unwrap());
    certificates(folder.path()).unwrap();
    certificates(strangers.path()).unwrap();
    let collector = Collector::start_tls(folder.path()).await.unwrap();
    assert!(collector.url().starts_with("https://"));
    for (authority, exported) in [(strangers, 0), (folder, 1)] {
        let config = trusting(collector.url(), Some(&authority.path().join("ca.pem")));
        let (dispatch, guard) = build("baton-router", &config).unwrap();
        with_default(&dispatch, || drop(info_span!("generate")));
        let (flushed, guard) = flush(guard, WAIT).await;
        assert!(flushed);
        let counters = guard.counters();
        assert_eq!((counters.exported.get(), counters.lost_export_failed.get()), (exported, 1 - exported));
        assert_eq!(collector.spans().len() as u64, exported);
    }
}

#[tokio::test]
async fn what_cannot_be_trusted_is_refused_at_the_start() {
    let folder = tempdir().unwrap();
    let file = |name: &str, text: &str| {
        std::fs::write(folder.path().join(name), text).unwrap();
        folder.path().join(name)
    };
    let start = |authority: Option<&Path>| build("baton", &trusting("https://127.0.0.1:1", authority)).map(|_| ());
    let check = |authority: &Path, expected: &str| {
        let error = start(Some(authority)).unwrap_err();
        let text = error.to_string();
        assert!(text.starts_with("telemetry.otlp_ca_file: ") && text.contains(expected), "{text}");
        assert!(text.contains(authority.to_str().unwrap()), "{text}");
    };
    check(&folder.path().join("none.pem"), "cannot read");
    check(&file("empty.pem", ""), "no certificate");
    check(&file("key.pem", "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"), "no certificate");
    check(&file("junk.pem", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"), "no certificate");
    check(&file("cut.pem", "-----BEGIN CERTIFICATE-----\nAAAA\n"), "cannot read");
    // A collector that does not answer blocks nothing; on a host without authorities the error says what is missing.
    assert!(matches!(start(None), Ok(()) | Err(TelemetryError::Trust(TrustError::None { .. }))));
}

#[test]
fn an_authority_that_nobody_would_ask_is_refused() {
    let check = |url: Option<&str>, problems: usize| {
        let mut at = crate::config::Checker::default();
        let config =
            TelemetryConfig { otlp_url: url.map(String::from), otlp_ca_file: Some("ca.pem".into()), ..config(None) };
        crate::config::Check::check(&config, &mut at);
        let found = at.into_problems();
        assert!(found.len() == problems && found.iter().all(|(key, _)| key == "otlp_ca_file"), "{found:?}");
    };
    check(Some("http://collector:4317"), 1);
    check(Some("https://collector:4317"), 0);
    check(None, 0);
}

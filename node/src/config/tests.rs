//! Layers over defaults, refusals by name and origin, masks.

use super::*;
use crate::DrainConfig;
use crate::grpc::GrpcConfig;
use crate::membership::embedded::{JoinConfig, LeaseConfig};
use crate::telemetry::TelemetryConfig;
use clap::Parser;
use serde::Deserialize;
use std::collections::BTreeMap;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Tree {
    telemetry: TelemetryConfig,
    grpc: GrpcConfig,
    membership: JoinConfig,
    drain: DrainConfig,
    admin: crate::admin::AdminConfig,
    pool: String,
    kv_cache_bytes: ByteSize,
    labels: BTreeMap<String, String>,
    token: Option<Secret>,
}

impl Check for Tree {
    fn check(&self, at: &mut Checker) {
        at.section("telemetry", &self.telemetry)
            .section("grpc", &self.grpc)
            .section("membership", &self.membership)
            .section("drain", &self.drain)
            .section("admin", &self.admin);
    }
}

#[derive(Parser)]
struct Flags {
    #[command(flatten)]
    common: CommonArgs,
    #[arg(long)]
    pool: Option<String>,
    #[arg(long)]
    router: Vec<String>,
}

struct Case {
    dir: tempfile::TempDir,
}

impl Case {
    fn load(&self, file: &str, env: &[(&str, &str)], flags: &[&str]) -> Result<Tree, ConfigError> {
        let path = self.dir.path().join("baton.toml");
        std::fs::write(&path, file).unwrap();
        let flags = Flags::try_parse_from(["baton"].iter().chain(flags)).unwrap();
        let overlay = flags.common.overlay().set("--pool", "pool", &flags.pool).set_list(
            "--router",
            "membership.routers",
            &flags.router,
        );
        let env = env.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
        Layers { file: (!file.is_empty()).then_some(path), env, flags: overlay }.load()
    }
}

fn case() -> Case {
    Case { dir: tempfile::tempdir().unwrap() }
}

#[test]
fn later_layers_win() {
    let case = case();
    assert_eq!(case.load("", &[], &[]).unwrap(), Tree::default());

    let file = "pool = 'from-file'\n[telemetry]\nlog = 'warn'\n";
    let env =
        [("BATON_POOL", "from-env"), ("PATH", "/bin"), ("BATON_TELEMETRY__LOG_FORMAT", ""), ("BATON_API_KEY", "k")];
    let pool = |env: &[(&str, &str)], flags: &[&str]| case.load(file, env, flags).unwrap().pool;
    assert_eq!(pool(&[], &[]), "from-file");
    assert_eq!(pool(&env, &[]), "from-env");
    assert_eq!(pool(&env, &["--pool", "from-flag"]), "from-flag");
    // Other keys keep the values of lower layers.
    let tree = case.load(file, &env, &["--otlp-url", "http://c:4317"]).unwrap();
    assert_eq!((tree.telemetry.log.as_str(), tree.telemetry.otlp_url.as_deref()), ("warn", Some("http://c:4317")));
}

#[test]
fn variables_become_values_of_every_kind() {
    let check = |name: &str, text: &str, expected: fn(&mut Tree)| {
        let mut tree = Tree::default();
        expected(&mut tree);
        assert_eq!(case().load("", &[(name, text)], &[]).unwrap(), tree, "{name}={text}");
    };
    check("BATON_POOL", "17", |t| t.pool = "17".into());
    check("BATON_DRAIN__DRAIN_MS_MAX", "9000", |t| t.drain.drain_ms_max = 9000);
    check("BATON_DRAIN__STOP_WITH_STDIN", "true", |t| t.drain.stop_with_stdin = true);
    check("BATON_TELEMETRY__TRACE_SAMPLE_RATIO", "0.25", |t| t.telemetry.trace_sample_ratio = 0.25);
    check("BATON_GRPC__LISTEN", "127.0.0.1:9", |t| t.grpc.listen = "127.0.0.1:9".parse().unwrap());
    check("BATON_GRPC__MESSAGE_BYTES_MAX", "16MiB", |t| t.grpc.message_bytes_max = ByteSize(16 << 20));
    check("BATON_KV_CACHE_BYTES", "4096", |t| t.kv_cache_bytes = ByteSize(4096));
    check("BATON_MEMBERSHIP__ROUTERS", "http://a:1, http://b:2", |t| {
        t.membership.routers = vec!["http://a:1".into(), "http://b:2".into()]
    });
    check("BATON_LABELS__ZONE", "z1", |t| t.labels = [("zone".into(), "z1".into())].into());
}

#[test]
fn refusals_name_the_key_and_its_origin() {
    let check = |file: &str, env: &[(&str, &str)], flags: &[&str], parts: &[&str]| {
        let error = case().load(file, env, flags).unwrap_err().to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    };
    check("colour = 1", &[], &[], &["unknown key `colour`", "file /", "baton.toml", "known here", "kv_cache_bytes"]);
    check("[telemetry]\notlp = 'x'", &[], &[], &["unknown key `telemetry.otlp`", "otlp_url"]);
    check("", &[("BATON_GRPC__PORT", "1")], &[], &["unknown key `grpc.port`", "environment variable BATON_GRPC__PORT"]);
    check("", &[("BATON_TYPO", "1")], &[], &["unknown key `typo`", "BATON_TYPO"]);
    check("pool = 3", &[], &[], &["bad value of `pool`", "file /"]);
    check("", &[("BATON_GRPC__LISTEN", "here")], &[], &["bad value of `grpc.listen`", "BATON_GRPC__LISTEN"]);
    check("kv_cache_bytes = '2 gigs'", &[], &[], &["bad value of `kv_cache_bytes`", "2GiB"]);
    check("", &[], &["--log-format", "xml"], &["bad value of `telemetry.log_format`", "flag --log-format", "xml"]);
    check(
        "",
        &[],
        &["--drain-ms-max", "9999999999"],
        &["bad value of `drain.drain_ms_max`", "flag --drain-ms-max", "3600000"],
    );
    check("pool = [", &[], &[], &["is not valid TOML", "line 1"]);
    check("", &[("BATON_GRPC", "x"), ("BATON_GRPC__LISTEN", "127.0.0.1:1")], &[], &["one variable sets a section"]);
    check("[grpc]\nadvertise = 'here'", &[], &[], &["grpc.advertise", "host:port"]);
    check("token = '********'", &[], &[], &["bad value of `token`", "mask"]);
    // All values out of range at once.
    check(
        "[membership]\nrouters = []\nconnect_ms_max = 0",
        &[],
        &[],
        &["membership.routers", "membership.connect_ms_max"],
    );

    let missing = Layers { file: Some("/nowhere/baton.toml".into()), ..Default::default() }.load::<Tree>().unwrap_err();
    assert!(missing.to_string().contains("/nowhere/baton.toml"), "{missing}");
}

#[test]
fn the_dump_is_the_configuration_without_its_secrets() {
    let file = "token = 'hunter2'\n[telemetry]\notlp_url = 'https://me:pass@word@c:4317/x?y=a@b'\n";
    let tree = case().load(file, &[("BATON_POOL", "p1")], &[]).unwrap();
    assert_eq!(tree.token.as_ref().unwrap().expose(), "hunter2");
    let text = dump(&tree).unwrap();
    assert!(!text.contains("hunter2") && !text.contains("pass"), "{text}");
    assert!(text.contains("https://********@c:4317/x?y=a@b"), "{text}");
    // Apart from secrets the output loads again, to the same configuration.
    let plain = Tree { token: None, telemetry: TelemetryConfig::default(), ..tree };
    assert_eq!(case().load(&dump(&plain).unwrap(), &[], &[]).unwrap(), plain);
    assert!(
        !format!("{:?}", Tree { token: Some(serde_json::from_str("\"s3\"").unwrap()), ..Tree::default() })
            .contains("s3")
    );
}

#[test]
fn sizes_have_units() {
    for (text, bytes) in [
        ("0", 0),
        ("17", 17),
        ("2GiB", 2 << 30),
        ("512 MiB", 512 << 20),
        ("1kib", 1024),
        ("3MB", 3_000_000),
        ("1TiB", 1 << 40),
        ("5B", 5),
    ] {
        assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        assert_eq!(ByteSize(bytes).to_string().parse(), Ok(ByteSize(bytes)));
    }
    for bad in ["", "GiB", "-1", "1.5GiB", "1XiB", "99999999999TiB", "2GiB2"] {
        assert!(bad.parse::<ByteSize>().is_err(), "{bad}");
    }
    assert_eq!(ByteSize(512 << 20).to_string(), "512MiB");
}

#[test]
fn defaults_are_within_their_ranges() {
    let mut at = Checker::default();
    Tree::default().check(&mut at);
    LeaseConfig::default().check(&mut at);
    assert_eq!(at.into_problems(), []);
}

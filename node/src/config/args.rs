//! Flags of every process, and how flags are merged into the configuration.

use figment::value::Value;
use serde::Serialize;
use std::net::SocketAddr;
use std::path::PathBuf;

/// The flags given, each with the key that it sets.
#[derive(Clone, Debug, Default)]
pub struct Overlay(Vec<(&'static str, &'static str, Value)>);

impl Overlay {
    pub fn new() -> Self {
        Self::default()
    }

    /// Flag `flag` (with its dashes) sets `key` (with dots), if it was given.
    ///
    /// # Panics
    /// If the value has no serde form of strings, numbers, lists and maps, which is a bug of the caller.
    #[must_use]
    pub fn set<T: Serialize>(mut self, flag: &'static str, key: &'static str, value: &Option<T>) -> Self {
        if let Some(value) = value {
            let value =
                Value::serialize(value).unwrap_or_else(|e| panic!("the value of {flag} has no serde form: {e}"));
            self.0.push((flag, key, value));
        }
        self
    }

    /// Like [`Overlay::set`], for a list; an empty one counts as absent.
    #[must_use]
    pub fn set_list<T: Serialize>(self, flag: &'static str, key: &'static str, values: &[T]) -> Self {
        self.set(flag, key, &(!values.is_empty()).then_some(values))
    }

    /// Like [`Overlay::set`], for a switch: sets `true` if it was given.
    #[must_use]
    pub fn set_switch(self, flag: &'static str, key: &'static str, on: bool) -> Self {
        self.set(flag, key, &on.then_some(true))
    }

    pub(super) fn into_entries(self) -> Vec<(&'static str, &'static str, Value)> {
        self.0
    }
}

/// Flags that every process has; flatten them into the binary's own.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct CommonArgs {
    /// TOML file with the configuration (also BATON_CONFIG)
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Print the effective configuration as TOML, secrets masked, and exit
    #[arg(long)]
    pub dump_config: bool,
    /// What to log, e.g. "info,baton_router=debug"
    #[arg(long, value_name = "FILTER")]
    pub log: Option<String>,
    /// Format of log lines: "pretty" or "json"
    #[arg(long, value_name = "FORMAT")]
    pub log_format: Option<String>,
    /// Send traces to this OTLP collector over gRPC, e.g. http://localhost:4317
    #[arg(long, value_name = "URL")]
    pub otlp_url: Option<String>,
    /// Address that serves /metrics and /healthz
    #[arg(long, value_name = "ADDRESS")]
    pub admin_listen: Option<SocketAddr>,
    /// Stop when standard input is closed, which shows that the parent process has ended
    #[arg(long)]
    pub stop_with_stdin: bool,
    /// Where workers register: "embedded" (with the routers) or "etcd"
    #[arg(long, value_name = "BACKEND")]
    pub membership: Option<String>,
    /// Addresses of etcd, http://host:port, separated by commas
    #[arg(long, value_name = "URLS", value_delimiter = ',')]
    pub etcd: Vec<String>,
    /// Prefix of this cluster's keys in etcd; must end in /
    #[arg(long, value_name = "KEY")]
    pub etcd_prefix: Option<String>,
    /// Folder with ca.crt, tls.crt and tls.key, for mutual TLS with the other processes of the cluster
    #[arg(long, value_name = "FOLDER")]
    pub identity: Option<PathBuf>,
    /// Allow addresses that other hosts can reach without --identity. Use this only if the network is closed to everyone else
    #[arg(long)]
    pub insecure: bool,
    /// Longest drain after SIGTERM, in milliseconds
    #[arg(long, value_name = "MS")]
    pub drain_ms_max: Option<u64>,
}

impl CommonArgs {
    /// These flags as an overlay of the sections `telemetry`, `admin`, `membership`, `identity` and `drain`; add the
    /// binary's own with [`Overlay::set`].
    pub fn overlay(&self) -> Overlay {
        Overlay::new()
            .set("--log", "telemetry.log", &self.log)
            .set("--log-format", "telemetry.log_format", &self.log_format)
            .set("--otlp-url", "telemetry.otlp_url", &self.otlp_url)
            .set("--admin-listen", "admin.listen", &self.admin_listen)
            .set("--membership", "membership.backend", &self.membership)
            .set_list("--etcd", "membership.etcd.endpoints", &self.etcd)
            .set("--etcd-prefix", "membership.etcd.prefix", &self.etcd_prefix)
            .set("--identity", "identity.dir", &self.identity)
            .set_switch("--insecure", "identity.insecure", self.insecure)
            .set_switch("--stop-with-stdin", "drain.stop_with_stdin", self.stop_with_stdin)
            .set("--drain-ms-max", "drain.drain_ms_max", &self.drain_ms_max)
    }
}

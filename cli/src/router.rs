//! Connections from the command line to a router: the same address, key and limits for all commands.

use crate::local_cluster;
use anyhow::Context;
use baton_node::environment::{API_KEY_VARIABLE, api_key};
use baton_node::identity::{CA_FILE, CERTIFICATE_FILE, KEY_FILE, Role, client_tls};
use clap::Args;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Code, Request, Status};

/// Default address of a router for clients.
const DEFAULT: &str = "http://127.0.0.1:50051";
/// What the gRPC library says of an answer in plain HTTP.
const NOT_GRPC: [&str; 2] = ["grpc-status header missing", "invalid compression flag"];
/// What it says of an answer in TLS, or of none.
const NOT_CLEAR: [&str; 2] = ["h2 protocol error", "transport error"];
/// Default address of a router for operators.
const DEFAULT_CLUSTER: &str = "127.0.0.1:50052";

/// Where the router is.
#[derive(Args, Clone, Debug)]
pub(crate) struct RouterArgs {
    /// gRPC address of a router. If it requires an API key, set BATON_API_KEY.
    #[arg(long, visible_alias = "router", value_name = "URL", default_value = DEFAULT)]
    server: String,
    /// PEM file of the authorities that may have signed the certificate of an https:// router. Default: those that this host trusts.
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
}

/// Where the router is, and who asks: for what operators alone may ask.
#[derive(Args, Clone, Debug)]
pub(crate) struct OperatorArgs {
    #[command(flatten)]
    router: RouterArgs,
    /// Folder with an operator's ca.crt, tls.crt and tls.key. --server is then the router's cluster port (default 127.0.0.1:50052). Without
    /// BATON_API_KEY, both are found automatically for a cluster that this user started with `baton up`.
    #[arg(long, value_name = "FOLDER")]
    identity: Option<PathBuf>,
}

/// A channel to a router that adds the key to each call.
pub(crate) type RouterChannel = InterceptedService<Channel, Key>;

/// Adds the key to each call, if there is one.
#[derive(Clone, Debug)]
pub(crate) struct Key(Option<MetadataValue<Ascii>>);

impl Interceptor for Key {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(key) = &self.0 {
            request.metadata_mut().insert("authorization", key.clone());
        }
        Ok(request)
    }
}

impl Key {
    fn of_process() -> anyhow::Result<Self> {
        let header = |key: &str| -> anyhow::Result<MetadataValue<Ascii>> {
            let wrong = || format!("{API_KEY_VARIABLE} holds no key: characters that no header can have");
            let mut value: MetadataValue<Ascii> = format!("Bearer {key}").parse().with_context(wrong)?;
            value.set_sensitive(true);
            Ok(value)
        };
        Ok(Self(api_key().map(|key| header(key.expose())).transpose()?))
    }
}

impl RouterArgs {
    /// Connects. `or` is the alternative named in the error if the router does not answer. If a router stops responding, every call ends,
    /// however long calls may otherwise take.
    pub(crate) async fn connect(&self, or: &str) -> anyhow::Result<RouterChannel> {
        let key = Key::of_process()?;
        let address = if self.server.contains("://") { self.server.clone() } else { format!("http://{}", self.server) };
        let secure = address.starts_with("https://");
        anyhow::ensure!(secure || self.ca.is_none(), "--ca is for routers with TLS: say --server https://HOST:PORT");
        let mut endpoint = bounded(Endpoint::from_shared(address)?);
        if secure {
            endpoint = endpoint.tls_config(client_tls(self.ca.as_deref()).context("give --ca")?)?;
        }
        let silence =
            || format!("no router answers at {}: {or}say --server http://HOST:PORT, or https://", self.server);
        let channel = endpoint.connect().await.with_context(silence)?;
        Ok(InterceptedService::new(channel, key))
    }
}

fn bounded(endpoint: Endpoint) -> Endpoint {
    endpoint
        .connect_timeout(Duration::from_secs(5))
        .http2_keep_alive_interval(Duration::from_secs(2))
        .keep_alive_timeout(Duration::from_secs(4))
        .keep_alive_while_idle(true)
}

impl OperatorArgs {
    /// Connects like [`RouterArgs::connect`]. With an operator's certificate it connects to the cluster port, otherwise with a key to the
    /// clients' port.
    pub(crate) async fn connect(&self, or: &str) -> anyhow::Result<RouterChannel> {
        let named = self.identity.clone().map(|folder| (self.cluster_port(), folder));
        // If a key is set, it decides where to connect.
        let found = || api_key().is_none().then(|| local_cluster::find(&self.router.server)).flatten();
        match named.or_else(found) {
            None => self.router.connect(or).await,
            Some((address, folder)) => operate(&address, &folder).await,
        }
    }

    fn cluster_port(&self) -> String {
        let server = if self.router.server == DEFAULT { DEFAULT_CLUSTER } else { self.router.server.as_str() };
        server.rsplit("://").next().unwrap_or(server).to_owned()
    }
}

async fn operate(address: &str, folder: &Path) -> anyhow::Result<RouterChannel> {
    let read = |name: &str| {
        let path = folder.join(name);
        std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))
    };
    let tls = ClientTlsConfig::new()
        .ca_certificate(Certificate::from_pem(read(CA_FILE)?))
        .identity(Identity::from_pem(read(CERTIFICATE_FILE)?, read(KEY_FILE)?))
        .domain_name(Role::Router.dns_name());
    let unusable = || format!("the files of {} cannot be used", folder.display());
    let endpoint = Endpoint::from_shared(format!("https://{address}"))?.tls_config(tls).with_context(unusable)?;
    let silence = || {
        let folder = folder.display();
        format!("no router of the cluster of {folder} answers at {address}: say --server HOST:PORT, its cluster port")
    };
    let channel = bounded(endpoint).connect().await.with_context(silence)?;
    Ok(InterceptedService::new(channel, Key(None)))
}

/// An error that says what a router refused, and what to do about it.
pub(crate) fn explain(status: &Status) -> anyhow::Error {
    let (code, message) = (status.code(), status.message());
    match code {
        Code::Unauthenticated | Code::PermissionDenied => {
            anyhow::anyhow!("{message} ({code:?}); set {API_KEY_VARIABLE} to your key")
        }
        // An HTTP server answered: there was no gRPC in it.
        _ if NOT_GRPC.iter().any(|said| message.contains(said)) => anyhow::anyhow!(
            "this is the HTTP port: --server takes the router's gRPC port (by default {DEFAULT}; `baton up` prints it)"
        ),
        _ if NOT_CLEAR.iter().any(|said| message.contains(said)) => anyhow::anyhow!(
            "{message}: no gRPC in the clear is spoken there; if the router has TLS, say --server https://HOST:PORT"
        ),
        _ => anyhow::anyhow!("{message} ({code:?})"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_key_says_where_keys_come_from() {
        let told = |status: Status| explain(&status).to_string();
        assert!(told(Status::unauthenticated("who are you?")).ends_with("set BATON_API_KEY to your key"));
        assert_eq!(told(Status::not_found("no worker")), "no worker (NotFound)");
        let http = "protocol error: received message with invalid compression flag: 123";
        assert!(told(Status::internal(http)).contains("--server takes the router's gRPC port"));
        assert!(told(Status::unknown("h2 protocol error: http2 error")).contains("--server https://"));
    }
}

//! `baton trace`: where the time of one recent request went, in the terminal or as a page. Needs no collector.

mod html;
mod notes;
mod terminal;
mod waterfall;

use anyhow::Context;
use baton_proto::v1::{self, admin_client::AdminClient};
use clap::Args;
use std::path::PathBuf;
use std::time::Duration;
use tonic::{Code, Status};
use waterfall::Waterfall;

/// Longest wait for a connection.
const CONNECT_MAX: Duration = Duration::from_secs(5);
/// Longest wait for the answer: the router gives workers 2 s.
const ANSWER_MAX: Duration = Duration::from_secs(10);
/// A trace of very many requests is some ten MB.
const ANSWER_BYTES_MAX: usize = 64 << 20;

/// Arguments of `baton trace`.
#[derive(Args, Debug)]
pub(crate) struct TraceArgs {
    /// Id of a recent request (`x-request-id` of its answer), or of its trace (`x-trace-id`).
    id: String,
    /// gRPC address of the router that served it.
    #[arg(long, visible_alias = "router", default_value = "http://127.0.0.1:50051")]
    server: String,
    /// Write a page to this file instead.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

/// Asks the router and draws.
pub(crate) async fn run(args: TraceArgs) -> anyhow::Result<()> {
    let endpoint = tonic::transport::Endpoint::from_shared(args.server.clone())?.connect_timeout(CONNECT_MAX);
    let channel = endpoint
        .timeout(ANSWER_MAX)
        .connect()
        .await
        .with_context(|| format!("no router answers at {}: say --server http://HOST:PORT", args.server))?;
    let mut client = AdminClient::new(channel).max_decoding_message_size(ANSWER_BYTES_MAX);
    let answer = client.trace(v1::TraceRequest { id: args.id.clone() }).await.map_err(explain)?;
    let waterfall = Waterfall::of(answer.into_inner());
    match args.html {
        None => print!("{}", terminal::draw(&waterfall)),
        Some(file) => {
            std::fs::write(&file, html::page(&waterfall))
                .with_context(|| format!("cannot write {}", file.display()))?;
            println!("wrote {}", file.display());
            for silent in &waterfall.silent {
                println!("missing: worker {}", terminal::plain(silent));
            }
        }
    }
    Ok(())
}

fn explain(status: Status) -> anyhow::Error {
    match status.code() {
        Code::NotFound => anyhow::anyhow!("{}", terminal::plain(status.message())),
        Code::Unimplemented => anyhow::anyhow!("this router is older and cannot tell of traces"),
        code => anyhow::anyhow!("{} ({code:?})", terminal::plain(status.message())),
    }
}

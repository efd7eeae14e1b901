//! `baton trace`: where the time of one recent request went, in the terminal or as a page. Needs no collector.

mod html;
mod notes;
mod terminal;
mod waterfall;

use crate::router::{OperatorArgs, explain};
use anyhow::Context;
use baton_proto::v1::{self, admin_client::AdminClient};
use clap::Args;
use std::path::PathBuf;
use std::time::Duration;
use tonic::{Code, Status};
use waterfall::Waterfall;

/// Longest wait for the answer: the router gives workers 2 s.
const ANSWER_MAX: Duration = Duration::from_secs(10);
/// A trace of very many requests is some ten MB.
const ANSWER_BYTES_MAX: usize = 64 << 20;

/// Arguments of `baton trace`.
#[derive(Args, Debug)]
pub(crate) struct TraceArgs {
    /// Id of a recent request (`x-request-id` of its answer), or of its trace (`x-trace-id`).
    id: String,
    /// That served it.
    #[command(flatten)]
    router: OperatorArgs,
    /// Write a page to this file instead.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

/// Asks the router and draws.
pub(crate) async fn run(args: TraceArgs) -> anyhow::Result<()> {
    let channel = args.router.connect("").await?;
    let mut client = AdminClient::new(channel).max_decoding_message_size(ANSWER_BYTES_MAX);
    let mut request = tonic::Request::new(v1::TraceRequest { id: args.id.clone() });
    request.set_timeout(ANSWER_MAX);
    let answer = client.trace(request).await.map_err(refused)?;
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

fn refused(status: Status) -> anyhow::Error {
    match status.code() {
        Code::NotFound => anyhow::anyhow!("{}", terminal::plain(status.message())),
        Code::Unimplemented => anyhow::anyhow!("this router is older and cannot tell of traces"),
        _ => explain(&status),
    }
}

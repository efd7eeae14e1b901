//! `baton trace`: the timings of one recent request, in the terminal or as a page. Needs no collector.

mod html;
mod terminal;

use crate::grpc::Admin;
use crate::router::{OperatorArgs, explain};
use anyhow::Context;
use baton_node::operators::Waterfall;
use clap::Args;
use std::path::PathBuf;
use std::time::Duration;
use tonic::{Code, Status};

/// Longest wait for the answer: the router gives workers 2 s.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// Arguments of `baton trace`.
#[derive(Args, Debug)]
pub(crate) struct TraceArgs {
    /// Id of a recent request (header `x-request-id` of its answer) or of its trace (`x-trace-id`).
    id: String,
    /// The router that served the request.
    #[command(flatten)]
    router: OperatorArgs,
    /// Write an HTML page to this file instead.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

/// Requests the trace from the router and draws it.
pub(crate) async fn run(args: TraceArgs) -> anyhow::Result<()> {
    let channel = args.router.connect("").await?;
    let trace = Admin::new(channel).trace(args.id, ANSWER_MAX).await.map_err(refused)?;
    let waterfall = Waterfall::of(trace);
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
        Code::Unimplemented => anyhow::anyhow!("this router is too old to return traces"),
        _ => explain(&status),
    }
}

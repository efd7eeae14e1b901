//! `baton status`: the state of the cluster, its problems first.

mod table;

use crate::grpc::Admin;
use crate::router::{OperatorArgs, explain};
use crate::stdout;
use anyhow::Context;
use baton_node::operators::ClusterStatus;
use clap::Args;
use std::io::IsTerminal as _;
use std::process::ExitCode;
use std::time::Duration;
use tokio::time::{interval, timeout};

/// How often a watched status is requested.
const EVERY: Duration = Duration::from_secs(1);
/// Longest wait for an answer: a router answers from what it already knows.
const ANSWER_MAX: Duration = Duration::from_secs(5);
/// Moves the cursor to the top left and clears the screen from there on.
const CLEAR: &str = "\x1b[H\x1b[J";

/// Arguments of `baton status`.
#[derive(Args, Debug)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    router: OperatorArgs,
    /// Refresh every second, until Ctrl-C.
    #[arg(long)]
    watch: bool,
    /// Print the status once (the default). The exit code is 0 if there are no problems, else 1.
    #[arg(long, conflicts_with = "watch")]
    once: bool,
    /// Print one JSON object on one line instead of a table.
    #[arg(long)]
    json: bool,
}

/// Shows the status. If it is shown once, the exit code tells whether there is any problem.
pub(crate) async fn run(args: StatusArgs) -> anyhow::Result<ExitCode> {
    let mut admin = Admin::new(args.router.connect("start a cluster with `baton up`, or ").await?);
    if !args.watch {
        let status = ask(&mut admin).await?;
        tell(&shown(&args, &status)?)?;
        return Ok(if status.healthy { ExitCode::SUCCESS } else { ExitCode::FAILURE });
    }
    tokio::select! {
        end = watch(&args, &mut admin) => end,
        interrupt = tokio::signal::ctrl_c() => interrupt.context("cannot wait for Ctrl-C"),
    }?;
    Ok(ExitCode::SUCCESS)
}

async fn ask(admin: &mut Admin) -> anyhow::Result<ClusterStatus> {
    let answer = timeout(ANSWER_MAX, admin.status()).await;
    let answer = answer.with_context(|| format!("the router did not answer within {ANSWER_MAX:?}"))?;
    answer.map_err(|status| match status.code() {
        tonic::Code::Unimplemented if status.message().is_empty() => {
            anyhow::anyhow!("this router is too old to report a status")
        }
        _ => explain(&status),
    })
}

/// Prints one status. `false` if stdout is closed.
fn tell(text: &str) -> anyhow::Result<bool> {
    stdout::tell(text).context("cannot print the status")
}

/// Shows the status repeatedly; a router that does not answer may return.
async fn watch(args: &StatusArgs, admin: &mut Admin) -> anyhow::Result<()> {
    let clear = if std::io::stdout().is_terminal() && !args.json { CLEAR } else { "" };
    let mut ticks = interval(EVERY);
    loop {
        ticks.tick().await;
        let text = match ask(admin).await {
            Ok(status) => shown(args, &status)?,
            Err(error) if args.json => {
                eprintln!("baton: {error:#}");
                continue;
            }
            Err(error) => format!("No status: {error:#}"),
        };
        if !tell(&format!("{clear}{text}"))? {
            return Ok(());
        }
    }
}

fn shown(args: &StatusArgs, status: &ClusterStatus) -> serde_json::Result<String> {
    if args.json { serde_json::to_string(status) } else { Ok(table::of(status)) }
}

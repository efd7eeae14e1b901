//! `baton drain`: takes one worker out of a running cluster, and prints how its running requests end.

use crate::grpc::{Admin, DrainEvent, Drained};
use crate::router::{OperatorArgs, explain};
use anyhow::{Context, bail};
use clap::Args;
use tonic::{Code, Status};

/// Arguments of `baton drain`.
#[derive(Args, Debug)]
pub(crate) struct DrainArgs {
    /// Name of the worker, as in `--instance`; `name@incarnation` if two incarnations of it are registered.
    worker: String,
    #[command(flatten)]
    router: OperatorArgs,
    /// Seconds that running requests have to end; after that they continue on other workers. Default: the worker's `drain.drain_ms_max`.
    #[arg(long, visible_alias = "timeout", value_name = "SECONDS")]
    timeout_s: Option<u64>,
}

/// Drains the worker, prints the decreasing number of running requests, and waits for the end.
pub(crate) async fn run(args: DrainArgs) -> anyhow::Result<()> {
    let channel = args.router.connect("").await?;
    let name = &args.worker;
    let timeout_ms = args.timeout_s.map(|s| s.saturating_mul(1_000));
    let mut drain = Admin::new(channel).drain(name.clone(), timeout_ms).await.map_err(refused)?;
    let mut printed = None;
    let goes_on = || format!("lost the connection to the router; {name} continues to drain");
    while let Some(event) = drain.next().await.map_err(refused).with_context(goes_on)? {
        match event {
            DrainEvent::Drained(drained) => {
                println!("{}", summary(name, drained));
                return Ok(());
            }
            DrainEvent::Running(running) if printed != Some(running) => {
                println!("{name} drains: {} there", requests(running));
                printed = Some(running);
            }
            DrainEvent::Running(_) => {}
        }
    }
    bail!(goes_on())
}

fn refused(status: Status) -> anyhow::Error {
    match status.code() {
        Code::Unimplemented if status.message().is_empty() => {
            anyhow::anyhow!("this router cannot drain workers; end the worker with SIGTERM, which drains it too")
        }
        _ => explain(&status),
    }
}

fn requests(count: u32) -> String {
    if count == 1 { "1 request".into() } else { format!("{count} requests") }
}

fn summary(name: &str, drained: Drained) -> String {
    let Drained { finished, cut_off, deregistered } = drained;
    let ended = format!("{} ended there, {cut_off} cut off to go on elsewhere", requests(finished));
    let left = if deregistered { "" } else { " It could not deregister in time; its lease ends by itself." };
    format!("{name} is drained: {ended}.{left} It takes no work until it is restarted.")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_says_what_became_of_the_requests() {
        let summary =
            |finished, cut_off, deregistered| summary("decode-0", Drained { finished, cut_off, deregistered });
        assert_eq!(
            summary(1, 2, true),
            "decode-0 is drained: 1 request ended there, 2 cut off to go on elsewhere. It takes no work until it is restarted."
        );
        assert!(summary(0, 0, false).contains("0 requests") && summary(0, 0, false).contains("lease"));
    }
}

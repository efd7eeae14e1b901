//! `baton drain`: takes one worker out of a running cluster, and says what becomes of the requests that it runs.

use crate::router::{OperatorArgs, explain};
use anyhow::{Context, bail};
use baton_proto::v1::{self, admin_client::AdminClient};
use clap::Args;
use tonic::{Code, Status};

/// Arguments of `baton drain`.
#[derive(Args, Debug)]
pub(crate) struct DrainArgs {
    /// Name of the worker, as in `--instance`; `name@incarnation` where two starts of it are registered.
    worker: String,
    #[command(flatten)]
    router: OperatorArgs,
    /// Requests that run may end within so many seconds, the others go on elsewhere; the worker's `drain.drain_ms_max` where absent.
    #[arg(long, visible_alias = "timeout", value_name = "SECONDS")]
    timeout_s: Option<u64>,
}

/// Drains the worker, tells how many requests run there as they get fewer, and waits for the end.
pub(crate) async fn run(args: DrainArgs) -> anyhow::Result<()> {
    let channel = args.router.connect("").await?;
    let name = &args.worker;
    let timeout_ms = args.timeout_s.map(|s| s.saturating_mul(1_000));
    let request = v1::DrainWorkerRequest { worker: name.clone(), timeout_ms };
    let mut events = AdminClient::new(channel).drain(request).await.map_err(refused)?.into_inner();
    let mut told = None;
    let goes_on = || format!("lost the router while {name} drained, which goes on there");
    while let Some(event) = events.message().await.map_err(refused).with_context(goes_on)? {
        if let Some(drained) = event.drained {
            println!("{}", summary(name, drained));
            return Ok(());
        }
        if told != Some(event.running) {
            println!("{name} drains: {} there", requests(event.running));
            told = Some(event.running);
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

fn summary(name: &str, drained: v1::Drained) -> String {
    let v1::Drained { finished, cut_off, deregistered } = drained;
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
            |finished, cut_off, deregistered| summary("decode-0", v1::Drained { finished, cut_off, deregistered });
        assert_eq!(
            summary(1, 2, true),
            "decode-0 is drained: 1 request ended there, 2 cut off to go on elsewhere. It takes no work until it is restarted."
        );
        assert!(summary(0, 0, false).contains("0 requests") && summary(0, 0, false).contains("lease"));
    }
}

//! Workers of another version, as processes: the test binary itself acts as a worker whose kernels or protocol differ from this build's.
//! The product binaries have no way to do that.

use crate::service::Service;
use anyhow::Context;
use baton_decode_worker::DecodeRole;
use baton_kernels::mutant::{Mutant, MutantKind};
use baton_kernels::numerics::{KERNEL_REVISION, Numerics};
use baton_prefill_worker::PrefillRole;
use baton_types::{ProtocolRange, Role};
use baton_worker::config::WorkerArgs;
use baton_worker::process::Surroundings;
use clap::Parser;
use serde::{Deserialize, Serialize};
use std::process::Command;

/// The ignored test that runs the worker; it calls [`play`].
const TEST: &str = "skew::role_of_the_other_process";
/// Passes the worker's role to it. Not one of Baton's own variables, which are configuration.
const VARIABLE: &str = "TEST_SKEWED_WORKER";

/// How a worker differs from this build.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum Skew {
    /// Its kernels add in another order, and it reports another revision.
    Revision,
    /// Its kernels add in another order, and it reports this build's revision.
    HiddenRevision,
    /// It supports these versions.
    Protocol(ProtocolRange),
}

impl Skew {
    fn apply(self, around: &mut Surroundings) {
        let other = |says| Some(Mutant::new(MutantKind::OtherRevision { says }, Numerics::Bf16x32));
        match self {
            Self::Revision => around.device = other(KERNEL_REVISION + 1),
            Self::HiddenRevision => around.device = other(KERNEL_REVISION),
            Self::Protocol(versions) => around.protocol = versions,
        }
    }
}

#[derive(Serialize, Deserialize)]
struct Part {
    role: Role,
    skew: Skew,
    flags: Vec<String>,
}

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    worker: WorkerArgs,
}

/// Starts a worker with this difference, with the flags of the product binary.
pub fn start(role: Role, skew: Skew, flags: &[String]) -> anyhow::Result<Service> {
    let flags = ["worker".to_owned(), "--announce".to_owned()].into_iter().chain(flags.iter().cloned()).collect();
    let (part, path) = (serde_json::to_string(&Part { role, skew, flags })?, std::env::current_exe()?);
    Service::launch(&format!("{} worker with {skew:?}", role.name()), move || {
        let mut command = Command::new(&path);
        command.args([TEST, "--exact", "--ignored", "--nocapture"]).env(VARIABLE, &part);
        command
    })
}

/// Runs the worker that [`start`] requests, until it is asked to stop. Does nothing without such a request.
pub fn play() -> anyhow::Result<()> {
    let Ok(part) = std::env::var(VARIABLE) else { return Ok(()) };
    let Part { role, skew, flags } = serde_json::from_str(&part)?;
    println!(); // Ends the line that the test harness has begun: announcements are lines of their own.
    run(role, skew, &flags)
}

/// Runs a worker with this difference until it is asked to stop; `flags` are those of the product binary, after a program name.
pub fn run(role: Role, skew: Skew, flags: &[String]) -> anyhow::Result<()> {
    let Cli { worker } = Cli::try_parse_from(flags).context("flags of a worker")?;
    match role {
        Role::Prefill => baton_worker::run(&worker, |_| PrefillRole, |around| skew.apply(around)),
        Role::Decode => baton_worker::run(&worker, DecodeRole::new, |around| skew.apply(around)),
    }
}

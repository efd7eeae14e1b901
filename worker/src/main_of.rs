//! The main of a worker binary: flags, configuration, telemetry, run, bounded drain.

use crate::check_only::check_only;
use crate::config::{WorkerArgs, WorkerConfig};
use crate::draft_model;
use crate::models::fetch_only;
use crate::process::{RunningWorker, Surroundings, service_name};
use crate::role::WorkerRole;
use baton_node::announce::Announcer;
use baton_node::config::load_or_dump;
use baton_node::{Shutdown, host, telemetry};
use std::process::ExitCode;

/// Runs a worker until it is asked to stop. `role` is constructed inside the runtime.
pub fn main_of<R: WorkerRole>(args: &WorkerArgs, role: impl FnOnce(&WorkerConfig) -> R) -> ExitCode {
    match run(args, role, |_| ()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{}: {error:#}", env!("CARGO_PKG_NAME"));
            ExitCode::FAILURE
        }
    }
}

/// The body of [`main_of`]; `change` lets tests modify the worker's setup.
pub fn run<R: WorkerRole>(
    args: &WorkerArgs,
    role: impl FnOnce(&WorkerConfig) -> R,
    change: impl FnOnce(&mut Surroundings),
) -> anyhow::Result<()> {
    let Some(config) = load_or_dump::<WorkerConfig>(&args.common, args.overlay())? else { return Ok(()) };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let result = runtime.block_on(async {
        let role = role(&config);
        let guard = telemetry::init(service_name(role.role()), &config.telemetry)?;
        host::raise_file_limit();
        host::raise_locked_memory_limit();
        let shutdown = Shutdown::install(&config.drain)?;
        let announcer = Announcer::new(args.announce);
        if args.fetch_only {
            let config = config.of_role(role.role());
            let draft = draft_model::settings(&config.model, &config.engine);
            for model in [Some(config.model), draft].into_iter().flatten() {
                fetch_only(model, announcer, &shutdown).await?;
            }
            return Ok(());
        }
        if args.check_only {
            return check_only(config.of_role(role.role()), announcer, &shutdown).await;
        }
        let mut around = Surroundings::new(guard.tracer());
        around.export = Some(guard.counters());
        around.traces = guard.traces();
        around.announcer = announcer;
        change(&mut around);
        let mut worker = tokio::select! {
            started = RunningWorker::start(config, role, around) => started?,
            // Asked to stop while it loads: there is nothing to drain.
            () = shutdown.requested() => return Ok(()),
        };
        let result = worker.until_stopped(&shutdown).await;
        worker.stop(&shutdown).await;
        tokio::task::spawn_blocking(move || drop(guard)).await?;
        result
    });
    // Weights may still be loading; the process does not wait for that.
    runtime.shutdown_background();
    result
}

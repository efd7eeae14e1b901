//! `--check-only`: whether this worker could serve its model, found out without its weights and without a cluster.

use crate::config::WorkerConfig;
use crate::models::{fetch_default, progress_to};
use crate::{bring_up, draft_model};
use anyhow::{Context, bail};
use baton_node::Shutdown;
use baton_node::announce::{Announcement, Announcer};

/// Checks the configuration of a worker against its models and this machine. Models that are missing are downloaded. If there is someone
/// to announce it to, a refusal is announced in place of an error, so that it is told once.
///
/// # Errors
/// If this worker could not serve its model, or if `shutdown` comes first.
pub(crate) async fn check_only(config: WorkerConfig, announcer: Announcer, shutdown: &Shutdown) -> anyhow::Result<()> {
    let model = config.model.model.clone();
    let check = tokio::task::spawn_blocking(move || {
        let (model, engine) = (&config.model, &config.engine);
        let draft = draft_model::settings(model, engine);
        [Some(model), draft.as_ref()].into_iter().flatten().try_for_each(fetch_default)?;
        bring_up::check(model, engine, &progress_to(announcer))
    });
    let checked = tokio::select! {
        checked = check => checked?.with_context(|| format!("cannot serve model {model}")),
        () = shutdown.requested() => bail!("stopped while it fetches model {model}: run again to resume"),
    };
    match checked {
        Err(error) if announcer.is_enabled() => announcer.say(&Announcement::Refused { reason: format!("{error:#}") }),
        Err(error) => return Err(error),
        Ok(()) => announcer.say(&Announcement::Ready),
    }
    Ok(())
}

//! Progress bars while weights load: one per worker.

use super::child::Child;
use anyhow::{Context, bail};
use baton_node::announce::Announcement;
use futures::future::try_join_all;
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use tokio::time::{Instant, timeout_at};

/// Waits until every worker has announced that it is ready.
pub(super) async fn until_ready(workers: &mut [Child], deadline: Instant) -> anyhow::Result<()> {
    let bars = MultiProgress::new();
    let each = workers.iter_mut().map(|worker| {
        let bar = bars.add(bar(worker.name()));
        async move {
            loop {
                let next = timeout_at(deadline, worker.next())
                    .await
                    .with_context(|| format!("{} is not ready", worker.name()))??;
                match next {
                    Announcement::Progress { what, fraction } => {
                        show(&bar, &what, fraction);
                    }
                    Announcement::Listening { .. } => {}
                    Announcement::Refused { reason } => bail!("{}: {reason}", worker.name()),
                    Announcement::Ready => {
                        bar.finish_and_clear();
                        return anyhow::Ok(());
                    }
                }
            }
        }
    });
    try_join_all(each).await?;
    Ok(())
}

/// A bar for `name`, drawn on stderr and only on a terminal.
pub(super) fn bar(name: &str) -> ProgressBar {
    let style = ProgressStyle::with_template("{prefix:>12} [{bar:30}] {percent:>3}% {msg}");
    ProgressBar::new(1000)
        .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
        .with_prefix(name.to_owned())
}

/// Moves a bar to `fraction`, 0 to 1.
pub(super) fn show(bar: &ProgressBar, what: &str, fraction: f32) {
    bar.set_message(what.to_owned());
    bar.set_position((fraction.clamp(0.0, 1.0) * 1000.0) as u64);
}

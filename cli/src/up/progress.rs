//! Bars while weights load: one a worker.

use super::child::Child;
use anyhow::Context;
use baton_node::announce::Announcement;
use futures::future::try_join_all;
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use tokio::time::{Instant, timeout_at};

/// Waits until every worker announced that it is ready.
pub(super) async fn until_ready(workers: &mut [Child], deadline: Instant) -> anyhow::Result<()> {
    let bars = MultiProgress::new();
    let each = workers.iter_mut().map(|worker| {
        let bar = bars.add(ProgressBar::new(1000).with_style(style()).with_prefix(worker.name().to_owned()));
        async move {
            loop {
                let next = timeout_at(deadline, worker.next()).await.with_context(|| format!("{} is not ready", worker.name()))??;
                match next {
                    Announcement::Progress { what, fraction } => {
                        bar.set_message(what);
                        bar.set_position((fraction.clamp(0.0, 1.0) * 1000.0) as u64);
                    }
                    Announcement::Listening { .. } => {}
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

fn style() -> ProgressStyle {
    ProgressStyle::with_template("{prefix:>12} [{bar:30}] {percent:>3}% {msg}").unwrap_or_else(|_| ProgressStyle::default_bar())
}

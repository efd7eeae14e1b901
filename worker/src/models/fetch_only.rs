//! `--fetch-only`: downloads the model with the worker's own configuration, so that a worker will open the same files.

use super::prefetch;
use crate::settings::ModelSettings;
use anyhow::{Context, bail};
use baton_node::Shutdown;
use baton_node::announce::{Announcement, Announcer};
use std::sync::atomic::{AtomicU32, Ordering};

/// Makes sure that the model is in the cache, or returns why it cannot be. If asked to stop, it keeps the partial download for the next
/// run.
///
/// # Errors
/// If the model cannot be downloaded, or if `shutdown` comes first: then the model is incomplete.
pub(crate) async fn fetch_only(
    settings: ModelSettings,
    announcer: Announcer,
    shutdown: &Shutdown,
) -> anyhow::Result<()> {
    let (model, progress) = (settings.model.clone(), progress_to(announcer));
    let fetch = tokio::task::spawn_blocking(move || prefetch(&settings, &progress));
    tokio::select! {
        fetched = fetch => fetched?.with_context(|| format!("cannot fetch model {model:?}"))?,
        () = shutdown.requested() => bail!("stopped while it fetches model {model:?}: run again to resume"),
    }
    tracing::info!(model, "the model is there");
    Ok(())
}

/// Announces and logs the progress of downloads.
pub(crate) fn progress_to(announcer: Announcer) -> impl Fn(&str, f32) + Send + Sync {
    let printed = PrintedTenths::default();
    move |what, fraction| {
        announcer.say(&Announcement::Progress { what: what.into(), fraction });
        if let Some(percent) = printed.next_line(fraction) {
            tracing::info!(percent, "{what}");
        }
    }
}

/// The last printed tenth: a log cannot overwrite a line.
#[derive(Default)]
struct PrintedTenths(AtomicU32);

impl PrintedTenths {
    /// Percent to print, in whole tenths; `None` if that was already printed.
    fn next_line(&self, fraction: f32) -> Option<u32> {
        // A fraction is 0 to 1, so the cast only cuts off the decimals.
        let tenth = (fraction.clamp(0.0, 1.0) * 10.0) as u32;
        (self.0.swap(tenth, Ordering::Relaxed) != tenth).then_some(tenth * 10)
    }
}

#[cfg(test)]
mod tests {
    use super::super::hub::stand_in::{Hub, MODEL};
    use super::*;
    use baton_node::DrainConfig;
    use std::time::Duration;

    fn settings(hub: &Hub, cache: &std::path::Path) -> ModelSettings {
        let (model, cache_dir) = (MODEL.into(), cache.to_owned());
        ModelSettings { model, cache_dir, hub_endpoint: hub.endpoint(), ..ModelSettings::default() }
    }

    #[tokio::test]
    async fn the_model_lies_where_a_worker_looks_for_it() {
        let (hub, cache) =
            (tokio::task::spawn_blocking(|| Hub::start(|_| ())).await.unwrap(), tempfile::tempdir().unwrap());
        let settings = settings(&hub, cache.path());
        let shutdown = Shutdown::new(&DrainConfig::default());
        fetch_only(settings.clone(), Announcer::default(), &shutdown).await.unwrap();
        let weights = std::fs::read_dir(cache.path().join("hub/org--small"))
            .unwrap()
            .find_map(|folder| std::fs::read(folder.unwrap().path().join("model.safetensors")).ok());
        assert_eq!(weights, Some(hub.weights()));
        // Once the model is downloaded, the worker starts even if the hub is unreachable.
        let away = ModelSettings { hub_endpoint: "http://127.0.0.1:9".into(), ..settings };
        fetch_only(away, Announcer::default(), &shutdown).await.unwrap();
        tokio::task::spawn_blocking(move || drop(hub)).await.unwrap();
    }

    #[tokio::test]
    async fn what_cannot_be_fetched_is_an_error_and_so_is_a_stop() {
        let shutdown = Shutdown::new(&DrainConfig::default());
        let missing = ModelSettings { model: "/no/such/model.gguf".into(), ..ModelSettings::default() };
        let error = fetch_only(missing, Announcer::default(), &shutdown).await.unwrap_err();
        assert!(format!("{error:#}").contains("no such file"), "{error:#}");

        // This address neither answers nor refuses: the connection waits.
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let hub_endpoint = format!("http://{}", silent.local_addr().unwrap());
        let cache = tempfile::tempdir().unwrap();
        let waits = ModelSettings {
            model: MODEL.into(),
            cache_dir: cache.path().to_owned(),
            hub_endpoint,
            ..ModelSettings::default()
        };
        let stopped = shutdown.clone();
        let stop = async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            stopped.request("test");
        };
        let (error, ()) = tokio::join!(fetch_only(waits, Announcer::default(), &shutdown), stop);
        let error = error.unwrap_err().to_string();
        assert!(error.contains(MODEL) && error.contains("run again"), "{error}");
        drop(silent);
    }

    #[test]
    fn progress_is_told_by_tenths() {
        let printed = PrintedTenths::default();
        let news: Vec<_> =
            [0.0, 0.05, 0.1, 0.19, 0.55, 1.0, 1.0, 0.0].map(|f| printed.next_line(f)).into_iter().flatten().collect();
        assert_eq!(news, [10, 50, 100, 0]);
    }
}

//! Starts a router while etcd is unreachable: it uses cached records and workers that it finds, until etcd answers for
//! the first time. A worker is a member only if it answers as the incarnation that its record names.

use super::connection::within_time;
use super::probe::Verdict;
use super::record_cache::{CachedRecords, RecordCache, member};
use super::router::Shared;
use crate::membership::Member;
use futures::StreamExt as _;
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// Workers that are asked concurrently.
const ASKED_MAX: usize = 32;
/// Changes within this time are written together.
const GATHER: Duration = Duration::from_millis(500);

/// Sources of members besides etcd.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OfflineSources {
    /// Folder with the last known records.
    pub cache_dir: Option<PathBuf>,
    /// gRPC addresses of workers, `host:port`; a name stands for all of its addresses.
    pub seeds: Vec<String>,
}

/// Fills the view until etcd has answered. Returns then.
pub(super) async fn add_offline(shared: &Shared, from: &OfflineSources) {
    // etcd is asked first, on every node.
    for _ in 0..shared.config.endpoints.len() {
        shared.missed.notified().await;
    }
    if shared.has_answered() || *from == OfflineSources::default() {
        return;
    }
    tracing::warn!(
        cache_dir = ?from.cache_dir, seeds = ?from.seeds,
        "etcd has not answered since the start; looks for workers that are remembered or found by their addresses"
    );
    let remembered = remembered(shared, from).await;
    let position = remembered.as_ref().map(|remembered| remembered.position);
    let remembered = remembered.map(|remembered| remembered.members).unwrap_or_default();
    while !shared.has_answered() {
        let round = Instant::now();
        let found = find(shared, &from.seeds).await;
        let known = shared.view.borrow().clone();
        let is_new = |member: &&Member| known.get(&member.record.party).is_none();
        let mut parties = BTreeSet::new();
        let candidates: Vec<Member> = remembered.iter().chain(&found).filter(is_new).cloned().collect();
        let candidates = candidates.into_iter().filter(|member| parties.insert(member.record.party.clone()));
        let asked = candidates.map(|member| async {
            let verdict = shared.probe.ask(member.record.clone()).await;
            (member, verdict)
        });
        let mut asked = futures::stream::iter(asked).buffer_unordered(ASKED_MAX);
        while let Some((member, verdict)) = asked.next().await {
            if verdict == Verdict::Alive {
                tracing::info!(instance = %member.record.party, "uses a worker that answers; etcd has not confirmed it yet");
                shared.change(|view| view.add_offline(member, position));
            }
        }
        sleep(Duration::from_millis(shared.config.backoff_ms_max).saturating_sub(round.elapsed())).await;
    }
}

async fn remembered(shared: &Shared, from: &OfflineSources) -> Option<CachedRecords> {
    let cache = RecordCache::new(from.cache_dir.as_ref()?, &shared.config.prefix);
    let members_max = shared.members_max;
    let read = tokio::task::spawn_blocking(move || cache.read(members_max)).await.ok()?;
    read.unwrap_or_else(|error| {
        tracing::warn!(%error, cache_dir = ?from.cache_dir, "cannot read the members that it remembers (membership.cache_dir)");
        None
    })
}

/// Asks each address of every seed for the record of its process.
async fn find(shared: &Shared, seeds: &[String]) -> Vec<Member> {
    let mut addresses = BTreeSet::<SocketAddr>::new();
    for seed in seeds {
        match within_time(shared.config.request_max(), tokio::net::lookup_host(seed)).await {
            Ok(found) => addresses.extend(found.take(shared.members_max)),
            Err(error) => tracing::debug!(seed, %error, "cannot find a seed"),
        }
    }
    let asked = addresses.into_iter().take(shared.members_max).map(|address| shared.probe.record(address));
    let answers = futures::stream::iter(asked).buffer_unordered(ASKED_MAX);
    answers.filter_map(async |record| member(record?, 0)).collect().await
}

/// Keeps the folder up to date with the view, while the view comes from etcd. Returns once the router is closed and its
/// last view is written.
pub(super) async fn keep_cache(shared: &Shared, from: &OfflineSources) {
    let Some(folder) = &from.cache_dir else { return };
    let cache = RecordCache::new(folder, &shared.config.prefix);
    let mut view = shared.view.subscribe();
    let mut written = view.borrow().revision;
    let mut refused = false;
    let mut closed = false;
    while !closed {
        let gathered = async {
            // The sender is in `shared`.
            let _ = view.changed().await;
            sleep(GATHER).await;
        };
        closed = tokio::select! {
            () = gathered => false,
            () = shared.stop.cancelled() => true,
        };
        let Some(position) = shared.confirmed_position() else { continue };
        let known = view.borrow_and_update().clone();
        if known.revision == written {
            continue;
        }
        let remembered = CachedRecords { position, members: known.members.values().cloned().collect() };
        let cache = cache.clone();
        match tokio::task::spawn_blocking(move || cache.write(&remembered)).await {
            Ok(Err(error)) if closed || !std::mem::replace(&mut refused, true) => {
                tracing::warn!(%error, folder = %folder.display(), "cannot remember the members (membership.cache_dir)");
            }
            Ok(Ok(())) => {
                refused = false;
                written = known.revision;
            }
            _ => {}
        }
    }
}

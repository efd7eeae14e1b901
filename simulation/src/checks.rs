//! What must hold once all is quiet.

use crate::client::Ending;
use crate::cluster::Cluster;
use crate::executor::{Time, ms};
use crate::flood;
use crate::invariant::Invariant;
use crate::network::Lane;
use crate::schedule::{ENDS_WITHIN, HEALED, Request};
use crate::worker::SimulatedWorker;
use baton_types::ErrorKind;

/// A deadline is heard at most so late.
const HEARD_WITHIN: Time = ms(20);

/// Looks at everything, and notes what is wrong.
pub(crate) fn quiet(cluster: &Cluster) {
    flood::check(cluster);
    let workers = cluster.workers();
    for (number, (request, end)) in cluster.schedule().requests.iter().zip(cluster.ends.all()).enumerate() {
        ends(cluster, &workers, number, request, end);
    }
    for worker in &workers {
        idle(cluster, worker);
    }
    for (number, router) in cluster.routers().iter().enumerate() {
        if router.requests() > 0 {
            let what = format!("router{number} holds {} requests", router.requests());
            cluster.breaches.add(Invariant::Quiet, what);
        }
    }
    cluster.membership.check(&workers);
    indexes(cluster, &workers);
}

/// A request ended in time, and as it may.
fn ends(cluster: &Cluster, workers: &[SimulatedWorker], number: usize, request: &Request, end: Option<(Time, Ending)>) {
    let wrong = |what: String| cluster.breaches.add(Invariant::EveryEnd, format!("request {number} {what}"));
    let Some((at, end)) = end else { return wrong(format!("never ended: {request:?}")) };
    // A router that stood still ends nothing before it goes on.
    let pauses = Time::from(request.samples) * request.pause;
    let by = request.deadline.max(HEALED) + HEARD_WITHIN + pauses;
    if at > by {
        return wrong(format!("ended at {at} us, after its deadline: {end:?}"));
    }
    // What an unfenced peer may still write is lost to the pool while that peer lives.
    let tokens = request.prompt.len() + request.max_tokens as usize;
    let fits = workers.iter().filter(|worker| worker.decodes()).map(|worker| {
        let counts = worker.engine.pool().counts();
        worker.memory.map.layout().blocks_for(tokens) <= counts.total - counts.quarantined
    });
    let fits: Vec<bool> = fits.collect();
    // No deadline of a client is to be what ends a request once nothing disturbs it.
    let soon = request.at.max(HEALED) + ENDS_WITHIN + pauses;
    // A prefill worker whose writes nothing fences is granted nothing where its blocks are quarantined, for as long as it lives.
    let is_barred = workers.iter().any(|worker| worker.decodes() && !worker.transfer.stats().quarantined.is_empty());
    if at > soon && !fits.contains(&false) && !is_barred {
        return wrong(format!("ended at {at} us, {soon} was time enough: {end:?}"));
    }
    match end {
        Ending::Failed(ErrorKind::Internal) if !cluster.may_break() => wrong("failed for a reason inside".into()),
        Ending::Whole | Ending::Gone => {}
        _ if request.must_succeed && fits.contains(&true) => {
            wrong(format!("came when all was well, and ended: {end:?}"))
        }
        _ => {}
    }
}

/// Nothing is held by a worker that nobody asks anything of.
fn idle(cluster: &Cluster, worker: &SimulatedWorker) {
    let wrong =
        |invariant, what: String| cluster.breaches.add(invariant, format!("{}: {what}", worker.record.party.instance));
    let (counts, load, claimed) = (worker.engine.pool().counts(), worker.engine.load(), worker.claimed());
    let stats = worker.transfer.stats();
    let is_fenced = cluster.schedule().shape.lane != Lane::SharedMemory;
    // The reader of a get that it gave up holds what an owner that lives may still write.
    let given_up = stats.total.readers.iter().any(|(end, _)| *end != "adopted");
    let referenced = if is_fenced || !given_up { counts.referenced } else { 0 };
    if referenced + load.waiting + load.running + claimed.sequences > 0 || claimed.tokens > 0 {
        wrong(Invariant::Quiet, format!("{counts:?}, {load:?}, {claimed:?} when all is quiet"));
    }
    let left = stats.sources + stats.readers + stats.owners + if is_fenced { stats.sinks + stats.tickets } else { 0 };
    if left > 0 || (is_fenced && counts.quarantined > 0) {
        wrong(Invariant::Quiet, format!("handoffs are left when all is quiet: {stats:?}, {counts:?}"));
    }
    let max = cluster.schedule().shape.quarantined_max(worker.memory.map.blocks());
    if let Some((peer, blocks)) = stats.quarantined.iter().find(|(_, blocks)| !is_fenced && **blocks > max) {
        wrong(Invariant::QuarantineBound, format!("{peer} left {blocks} blocks in quarantine, {max} are its bound"));
    }
}

/// Each router knows what its workers have cached.
fn indexes(cluster: &Cluster, workers: &[SimulatedWorker]) {
    let prepared = cluster.prepared.lock().clone();
    for (number, router) in cluster.routers().iter().enumerate() {
        for request in &prepared {
            let known = router.known_of(request);
            for worker in workers {
                let party = worker.party();
                let told = known.iter().find(|(who, _)| who == party).map_or(0, |(_, tokens)| *tokens);
                let has = worker.engine.pool().cached_tokens(request.hashes());
                if told != has {
                    let what =
                        format!("router{number} takes {party} to have {told} tokens of {}, it has {has}", request.id);
                    cluster.breaches.add(Invariant::TrueIndex, what);
                }
            }
        }
    }
}

//! What must hold once all is quiet.

use crate::called;
use crate::client::Ending;
use crate::executor::{Time, ms};
use crate::flood;
use crate::invariant::Invariant;
use crate::network::Lane;
use crate::race;
use crate::schedule::{ENDS_WITHIN, HEALED, Request};
use crate::scheduled::Scheduled;
use crate::worker::SimulatedWorker;
use baton_types::ErrorKind;

/// A deadline is heard at most so late.
const HEARD_WITHIN: Time = ms(20);

/// A router hears at most so late that there is room in a queue again.
const HEARD_AGAIN: Time = ms(100);

/// Looks at everything, and notes what is wrong.
pub(crate) fn quiet(cluster: &Scheduled) {
    flood::check(cluster);
    race::check(cluster);
    called::check(cluster);
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
        if router.prefixes_in_progress() > 0 {
            let what = format!("router{number} takes {} prefixes to be computed", router.prefixes_in_progress());
            cluster.breaches.add(Invariant::Quiet, what);
        }
    }
    cluster.membership.check(&workers);
    indexes(cluster, &workers);
}

/// A request ended in time, and as it may.
fn ends(
    cluster: &Scheduled,
    workers: &[SimulatedWorker],
    number: usize,
    request: &Request,
    end: Option<(Time, Ending)>,
) {
    let wrong = |what: String| cluster.breaches.add(Invariant::EveryEnd, format!("request {number} {what}"));
    let Some((at, end)) = end else { return wrong(format!("never ended: {request:?}")) };
    // A router that stood still ends nothing before it goes on.
    let pauses = Time::from(request.samples) * request.pause;
    let by = request.deadline.max(HEALED) + HEARD_WITHIN + pauses;
    if at > by {
        return wrong(format!("ended at {at} us, after its deadline: {end:?}"));
    }
    // No deadline of a client is to be what ends a request once nothing disturbs it. But beside quarantine, one that does not fit stays
    // first in order until its own deadline, and others wait behind it.
    let since = request.at.max(HEALED);
    let soon = since + ENDS_WITHIN + pauses;
    let ends = cluster.ends.all();
    let open = cluster.schedule().requests.iter().zip(ends);
    let mut open = open.filter(|(other, end)| other.at <= at && end.as_ref().is_none_or(|(end, _)| *end >= since));
    if at > soon && open.all(|(other, _)| workers.iter().all(|worker| fits(worker, other))) {
        return wrong(format!("ended at {at} us, {soon} was time enough: {end:?}"));
    }
    let tokens = request.prompt.len() + request.max_tokens as usize;
    match end {
        Ending::Failed(ErrorKind::Internal, _) if !cluster.may_break() => wrong("failed for a reason inside".into()),
        Ending::Whole | Ending::Gone => {}
        // Queues have bounds, and whoever is there first stays.
        Ending::Failed(ErrorKind::Overloaded, _) if is_crowded(cluster, request, at) => {}
        // What is asked for may be more than the cluster has.
        Ending::Failed(ErrorKind::ContextLengthExceeded, _) if tokens as u32 > cluster.schedule().shape.blocks * 16 => {
        }
        _ if request.must_succeed && workers.iter().any(|worker| worker.decodes() && fits(worker, request)) => {
            wrong(format!("came when all was well, and ended: {end:?}"))
        }
        _ => {}
    }
}

/// Whether a worker's pool has room for a request beside what is in quarantine. What an unfenced peer may still write is lost to the pool
/// while that peer lives.
fn fits(worker: &SimulatedWorker, request: &Request) -> bool {
    let pool = worker.engine.pool();
    // A prefill worker, too, may have to hold both: another attempt prefills what was answered before.
    let tokens = request.prompt.len() + request.max_tokens as usize;
    let blocks = worker.memory.map.layout().blocks_for(tokens);
    // Of states, two at once.
    let needed = [blocks, 2].into_iter().enumerate().take(pool.groups());
    needed
        .map(|(group, blocks)| (pool.counts_of(group), blocks))
        .all(|(of, blocks)| blocks <= of.total - of.quarantined)
}

/// Whether a request that was refused then may have found a queue full, of a router or of a worker, or more claimed than a decode worker
/// takes: whatever was open anywhere may have been there.
fn is_crowded(cluster: &Scheduled, request: &Request, at: Time) -> bool {
    let (schedule, ends) = (cluster.schedule(), cluster.ends.all());
    // Before all repairs one worker may be all that is left, and whoever it refused once does not ask it again.
    let since = if schedule.shape.is_calm || request.at >= HEALED { at } else { request.at };
    let is_open = |(other, end): &(&Request, Option<(Time, Ending)>)| {
        let is_open = end.as_ref().is_none_or(|(end, _)| *end + HEARD_AGAIN >= since);
        other.at <= at && is_open && !std::ptr::eq(*other, request)
    };
    let wants = |request: &Request| request.samples * (request.prompt.len() as u32 + request.max_tokens);
    let (mut samples, mut tokens) = (request.samples as usize, wants(request));
    for (other, _) in schedule.requests.iter().zip(ends).filter(is_open) {
        samples += other.samples as usize;
        tokens += wants(other);
    }
    let shape = &schedule.shape;
    let queued_max = shape.waiting_max.min(shape.admits.0 + shape.admits.1);
    samples > queued_max || tokens > 2 * shape.blocks * 16
}

/// Nothing is held by a worker that nobody asks anything of.
fn idle(cluster: &Scheduled, worker: &SimulatedWorker) {
    let wrong =
        |invariant, what: String| cluster.breaches.add(invariant, format!("{}: {what}", worker.record.party.instance));
    let (counts, load, claimed) = (worker.engine.pool().counts(), worker.engine.load(), worker.claimed());
    let stats = worker.transfer.stats();
    let is_fenced = cluster.schedule().shape.lane != Lane::SharedMemory;
    // What nothing fences stays quarantined while its writer lives.
    let quarantined: usize = stats.quarantined.values().sum();
    let is_held = counts.referenced > 0 || counts.quarantined != quarantined || (is_fenced && quarantined > 0);
    if is_held || load.waiting + load.running + claimed.sequences > 0 || claimed.tokens > 0 || !worker.is_idle() {
        wrong(Invariant::Quiet, format!("{counts:?}, {load:?}, {claimed:?}, {stats:?} when all is quiet"));
    }
    let left = stats.sources + stats.readers + stats.owners;
    let left = left + if is_fenced { stats.sinks + stats.tickets + stats.indexed } else { 0 };
    if left > 0 {
        wrong(Invariant::Quiet, format!("handoffs are left when all is quiet: {stats:?}, {counts:?}"));
    }
    let max = cluster.schedule().shape.quarantined_max(worker.memory.map.blocks(0));
    if let Some((peer, blocks)) = stats.quarantined.iter().find(|(_, blocks)| !is_fenced && **blocks > max) {
        wrong(Invariant::QuarantineBound, format!("{peer} left {blocks} blocks in quarantine, {max} are its bound"));
    }
}

/// Each router knows what its workers have cached.
fn indexes(cluster: &Scheduled, workers: &[SimulatedWorker]) {
    let prompts = cluster.prompts.all();
    for (number, router) in cluster.routers().iter().enumerate() {
        for request in &prompts {
            let known = router.known_of(request);
            for worker in workers {
                let party = worker.party();
                let told = known.iter().find(|(who, _)| who == party).map_or(0, |(_, tokens)| *tokens);
                let has = worker.engine.pool().cached_tokens(request.hashes());
                // A router knows what is cached, and not where states let a hit end.
                let is_true = if worker.memory.has_states() { told >= has } else { told == has };
                if !is_true {
                    let what =
                        format!("router{number} takes {party} to have {told} tokens of {}, it has {has}", request.id);
                    cluster.breaches.add(Invariant::TrueIndex, what);
                }
            }
        }
    }
}

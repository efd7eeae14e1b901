//! At least 40 cancels in each phase, with bystanders, over both transports.

use super::clients::{Ask, Clients, Front, Refused};
use super::support::{
    ANSWER_TOKENS, Bystanders, CHUNK_TOKENS, all_right, config, policy, right_answers, router_in_flight, spec, until,
};
use anyhow::{Context, ensure};
use baton_kv_transfer::HoldPoint;
use baton_proto::v1::PrefillPolicy;
use baton_router::PlacementPolicy;
use baton_tests::cluster::Cluster;
use baton_tests::eventually::eventually;
use baton_tests::gates::{Gates, Phase};
use baton_tests::quiet::until_quiet;
use baton_types::Role;
use baton_worker::process::RunningWorker;
use baton_worker::settings::TransportKind;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinHandle;

/// Victims of each phase.
const VICTIMS: usize = 42;
/// A deadline long enough to reach any phase on a busy machine, short enough to wait for.
const DEADLINE: Duration = Duration::from_secs(40);
/// What a victim asks for; far more than it will get.
const VICTIM_TOKENS: u32 = 200;

/// How a client gives up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// Drops the stream, the connection or the call.
    Leaves,
    /// Its deadline passes.
    Deadline,
}

/// A request that is held in a phase until it is cancelled there.
struct Victim {
    ask: Ask,
    phase: Phase,
    front: Front,
    way: Way,
    call: JoinHandle<anyhow::Result<Vec<u32>>>,
}

impl Victim {
    fn start(n: usize, phase: Phase, clients: &Clients, gates: &Gates) -> Self {
        let policy = match phase {
            Phase::Transfer => PrefillPolicy::Remote,
            // Many wait on decode workers, so that each of these has some.
            Phase::Queue if n / 6 % 2 == 1 => PrefillPolicy::Local,
            _ => policy(n / 6),
        };
        let ask = Ask::new(format!("{phase:?}-{n}"), n / 2, VICTIM_TOKENS, policy);
        let (front, way) = (Front::ALL[n % 3], if n % 6 < 3 { Way::Leaves } else { Way::Deadline });
        hold(gates, &ask, phase, n);
        let (timeout, clients, asked) = ((way == Way::Deadline).then_some(DEADLINE), clients.clone(), ask.clone());
        let call = tokio::spawn(async move { clients.answer(front, &asked, timeout).await });
        Self { ask, phase, front, way, call }
    }

    fn is_there(&self, gates: &Gates) -> bool {
        gates.reached(&self.ask.id, self.phase) && !self.call.is_finished()
    }

    /// Gives up, or waits for the deadline.
    async fn end(self) -> anyhow::Result<()> {
        if self.way == Way::Leaves {
            self.call.abort();
            ensure!(self.call.await.is_err_and(|e| e.is_cancelled()), "{} ended although it was held", self.ask.id);
            return Ok(());
        }
        let error = self.call.await?.err().with_context(|| format!("{} was answered although held", self.ask.id))?;
        let refused = error.downcast::<Refused>().with_context(|| format!("{} over {:?}", self.ask.id, self.front))?;
        ensure!(refused.code == "deadline_exceeded", "{} over {:?}: {refused:?}", self.ask.id, self.front);
        Ok(())
    }
}

/// Holds the request at different points of its phase in turn.
fn hold(gates: &Gates, ask: &Ask, phase: Phase, n: usize) {
    let points = [HoldPoint::Puts, HoldPoint::Commit, HoldPoint::Verify];
    match phase {
        Phase::Queue => gates.hold(ask.id.clone(), phase),
        // Behind the first chunk, where there are several for sure.
        Phase::Prefill => gates.hold_later(ask.id.clone(), phase, u32::from(ask.prompt().len() > 2 * CHUNK_TOKENS)),
        Phase::Transfer => gates.hold_transfer(ask.id.clone(), points[n % points.len()]),
        Phase::Decode => gates.hold_later(ask.id.clone(), phase, (n % 3 * 10) as u32),
    }
}

/// What the workers of one role count of what they hold.
#[derive(Clone, Copy, Debug, Default)]
struct Held {
    waiting: usize,
    running: usize,
    transfers: usize,
    given_up: u64,
}

fn held(worker: &RunningWorker) -> Held {
    let (load, transfer) = (worker.loaded.engine.load(), worker.transfer.stats());
    let ended = transfer.total.sources.iter().chain(&transfer.total.sinks);
    let given_up = ended.filter(|(outcome, _)| **outcome != "adopted").map(|(_, n)| n).sum();
    Held { waiting: load.waiting, running: load.running, transfers: transfer.held, given_up }
}

/// What every worker counts, prefill workers first.
fn all_held(cluster: &Cluster) -> Vec<(Role, Held)> {
    let of = |role: Role, workers: &[RunningWorker]| workers.iter().map(|w| (role, held(w))).collect::<Vec<_>>();
    [of(Role::Prefill, &cluster.prefill), of(Role::Decode, &cluster.decode)].concat()
}

/// Whether the victims are where they should be by the workers' own counters, on every worker.
fn are_counted(all: &[(Role, Held)]) -> bool {
    let sum = |of: fn(&Held) -> usize| all.iter().map(|(_, held)| of(held)).sum::<usize>();
    sum(|h| h.waiting) >= VICTIMS
        && sum(|h| h.transfers) >= VICTIMS
        // Held in prefill or decode: a place in the running batch of either role.
        && sum(|h| h.running) >= 2 * VICTIMS
        && all.iter().all(|(_, held)| held.waiting > 0 && held.running > 0)
}

/// The phases of the victims `n`, in another order than those before, so that no phase has all its turns at one worker.
fn in_another_order(n: usize) -> [(usize, Phase); 4] {
    const COUNT: usize = Phase::ALL.len();
    let mut phases = Phase::ALL;
    phases.rotate_left(n % COUNT);
    phases.map(|phase| (n, phase))
}

async fn cancels_in_every_phase(transport: TransportKind) -> anyhow::Result<()> {
    let mut spec = spec(2, 2, &config(transport, 4096));
    // By the rates that were measured, all of a phase may come to one worker.
    spec.router.placement.policy = PlacementPolicy::RoundRobin;
    let cluster = Cluster::start(spec).await?;
    let clients = Clients::of(&cluster).await?;
    let right = Arc::new(right_answers(&clients, ANSWER_TOKENS).await?);
    let bystanders = Bystanders::start(3, &clients, &right);

    let gates = cluster.gates.clone();
    let victims: Vec<Victim> =
        (0..VICTIMS).flat_map(in_another_order).map(|(n, phase)| Victim::start(n, phase, &clients, &gates)).collect();
    let absent = || {
        let absent =
            victims.iter().filter(|v| !v.is_there(&gates)).map(|v| (v.ask.id.as_str(), v.front, v.call.is_finished()));
        format!("these never came to their phase: {:?}", absent.collect::<Vec<_>>())
    };
    until(absent, || victims.iter().all(|v| v.is_there(&gates))).await?;
    // Threads publish their counters a turn after a gate stopped them.
    until(|| format!("counted: {:#?}", all_held(&cluster)), || are_counted(&all_held(&cluster))).await?;
    for victim in victims {
        victim.end().await?;
    }
    let served = bystanders.stop().await?;
    ensure!(served > 20, "bystanders got {served} answers only while {} requests were held", 4 * VICTIMS);
    until_quiet(&cluster).await?;
    let counted = async || {
        let count = router_in_flight(&cluster).await?;
        ensure!(count == 0, "the router counts {count} requests that ended");
        Ok(())
    };
    eventually(counted).await?;
    let given_up: u64 = cluster.prefill.iter().map(|w| held(w).given_up).sum();
    ensure!(given_up >= VICTIMS as u64, "prefill workers gave {given_up} handoffs up");
    // Whatever was held by ids is gone; the gates stay shut to show it.
    all_right(&clients, "after", 100, &right).await?;
    until_quiet(&cluster).await?;
    cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn cancels_in_every_phase_leak_nothing_over_ucx() -> anyhow::Result<()> {
    cancels_in_every_phase(TransportKind::Ucx).await
}

#[tokio::test(flavor = "multi_thread")]
async fn cancels_in_every_phase_leak_nothing_over_tcp() -> anyhow::Result<()> {
    cancels_in_every_phase(TransportKind::Tcp).await
}

//! Races: floods in which two tenants of different weight ask for as much at once, so that the order in which they are served is that of
//! their turns. Before they come, sequences of a third tenant have all blocks of the decode worker, one after the other. So all of them wait
//! before the first one is served.

use crate::executor::ms;
use crate::flood::{BEGINS, MESSAGES_MAX, request};
use crate::invariant::Invariant;
use crate::random::Random;
use crate::schedule::{Policy, Request, Shape, WEIGHTS};
use crate::scheduled::Scheduled;
use crate::worker::{ServedOffer, SimulatedWorker};
use std::time::{Duration, Instant};

/// Requests of the tenants in a race: as many as each is served until one has none left, and some more.
const RACERS: [(usize, u64); 2] = [(LIGHT, 16), (HEAVY, 44)];
/// Sequences that have all blocks, one after the other, until all racers wait.
const HOLDERS: usize = 5;
const LIGHT: usize = 1;
const HEAVY: usize = 2;
/// How far one tenant may be ahead of the other, in turns of the light one: turns come in batches, of places and chunks.
const LAG_MAX: f64 = 7.0;
/// A worker hears of an offer at most so late, behind all others that came.
const HEARD_WITHIN: Duration = Duration::from_millis(20);

/// A race for turns of the scheduler, which decodes or prefills, or for grants.
pub(crate) fn draw(shape: &mut Shape, vocab: u32, random: &mut Random) -> Vec<Request> {
    let (policy, len, answer) = random.of(&[(Policy::Local, 6, 24), (Policy::Local, 50, 1), (Policy::Remote, 6, 24)]);
    (shape.blocks, shape.prefill_blocks, shape.running_max, shape.watermark_blocks) = (24, 240, 6, 2);
    let all = u64::from(shape.blocks) * 16 - 13;
    let holder =
        |random: &mut Random| Request { priority: 5, ..request(0, Policy::Local, all, 12, BEGINS, vocab, random) };
    let mut requests: Vec<_> = (0..HOLDERS).map(|_| holder(random)).collect();
    let at = BEGINS + 2 * MESSAGES_MAX;
    if policy == Policy::Remote {
        // What is charged for an offer that ends without a grant is given back.
        let gone = request(LIGHT, policy, 90, 1, BEGINS + MESSAGES_MAX, vocab, random);
        requests.push(Request { gone: Some(BEGINS + MESSAGES_MAX + ms(30)), ..gone });
        let urgent = |_| Request { priority: 1, is_in_race: true, ..request(0, policy, len, 2, at, vocab, random) };
        requests.extend((0..3).map(urgent));
    }
    for (tenant, count) in RACERS {
        let racer = |_| {
            let racer = request(tenant, policy, len, answer, at + random.below(ms(5)), vocab, random);
            Request { is_in_race: true, ..racer }
        };
        requests.extend((0..count).map(racer));
    }
    requests
}

/// One of those that waited at once.
struct Racer {
    weight: u32,
    priority: i32,
    since: Instant,
    at: Instant,
}

/// Tenants take turns by weight while both wait: in grants, and in the first tokens of what is prefilled where it decodes. And grants go to
/// the highest priority first.
pub(crate) fn check(cluster: &Scheduled) {
    let Some(turns) = turns(cluster) else { return };
    let wrong = |what| cluster.breaches.add(Invariant::FairShare, what);
    let (urgent, racers): (Vec<_>, Vec<_>) = turns.into_iter().partition(|turn| turn.priority > 0);
    let waits = |urgent: &Racer, at| urgent.since + HEARD_WITHIN < at && at < urgent.at;
    let overtakes = |urgent: &Racer| racers.iter().any(|turn| waits(urgent, turn.at));
    if urgent.iter().any(overtakes) {
        return wrong("an offer of lower priority was granted before one that waited".into());
    }
    let [light, heavy] = [LIGHT, HEAVY].map(|tenant| WEIGHTS[tenant]);
    let of = |weight| racers.iter().filter(move |turn| turn.weight == weight);
    let begins = of(light).map(|turn| turn.since).min().max(of(heavy).map(|turn| turn.since).min());
    let ends = of(light).map(|turn| turn.at).max().min(of(heavy).map(|turn| turn.at).max());
    for turn in racers.iter().filter(|turn| Some(turn.at) < ends) {
        let served = |weight| of(weight).filter(|other| Some(other.at) > begins && other.at <= turn.at).count() as f64;
        let lag = served(light) / f64::from(light) - served(heavy) / f64::from(heavy);
        if lag.abs() > LAG_MAX {
            return wrong(format!("the tenant of weight {light} is {lag} turns ahead of that of weight {heavy}"));
        }
    }
}

/// All turns of a race, if the schedule is one.
fn turns(cluster: &Scheduled) -> Option<Vec<Racer>> {
    let racers = cluster.schedule().requests.iter().enumerate().filter(|(_, request)| request.is_in_race);
    let racers: Vec<_> = racers.collect();
    if racers.first()?.1.policy == Policy::Remote {
        let workers = cluster.workers().into_iter().filter(SimulatedWorker::decodes);
        let turn = |ServedOffer { share, priority, offered_at: since, granted_at: at }| Racer {
            weight: share.weight.get(),
            priority,
            since,
            at,
        };
        let turns: Vec<Racer> = workers.flat_map(|worker| worker.granted()).map(turn).collect();
        cluster.counts.lock().add("race: grants", turns.len() as u64);
        return Some(turns);
    }
    let begins = cluster.ends.begins();
    let turn = |(number, Request { tenant, priority, at, .. }): &(usize, &Request)| {
        let (since, at) = (cluster.executor.instant(at + MESSAGES_MAX), cluster.executor.instant(*begins.get(number)?));
        Some(Racer { weight: WEIGHTS[*tenant], priority: *priority, since, at })
    };
    let turns: Vec<Racer> = racers.iter().filter_map(turn).collect();
    cluster.counts.lock().add("race: first tokens", turns.len() as u64);
    Some(turns)
}

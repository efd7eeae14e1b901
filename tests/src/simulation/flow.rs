//! A request's way through a router: the real placement, recovery and pairing decide, this carries them out.

use super::call::Wanted;
use super::clock::{Time, ms};
use super::event::{Event, Trouble};
use super::invariant::Invariant;
use super::world::World;
use baton_router::PrefillPolicy;
use baton_router::pure::{
    Avoid, Avoided, Circle, Decision, Demand, Failure, FromDecode, Pair, PlacementPolicy, ProbationLimits, Recovery,
    Refusal, Slot, Slowness, Step, Thresholds, Worker, place,
};
use baton_types::{ErrorKind, Party, TokenId};
use futures::FutureExt as _;
use std::collections::VecDeque;
use std::time::Duration;

const THRESHOLDS: Thresholds = Thresholds {
    local_prefill_tokens_max: 12,
    prefill_tokens_per_s_default: 4000.0,
    policy: PlacementPolicy::Cost,
    prefill_doubles_at_tokens: 0.0,
    transfer_bytes_per_s: 1e9,
    pulls: false,
};
const PROBATION: ProbationLimits = ProbationLimits { min: Duration::from_millis(100), max: Duration::from_millis(800) };
/// Load older than this counts as none.
const STALE_MAX: Duration = Duration::from_millis(700);
/// Longest wait for a claim.
const CLAIM_MAX: Time = ms(250);

/// A token as routers are told it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Told {
    pub(super) token: TokenId,
    pub(super) ends: bool,
}

#[derive(Debug)]
pub(super) enum Stage {
    Claiming,
    Local,
    Pair(Box<Pair<Told, Trouble>>),
}

/// One attempt.
#[derive(Debug)]
pub(super) struct Attempt {
    pub(super) number: u32,
    pub(super) decode: Party,
    pub(super) prefill: Option<Party>,
    pub(super) decode_call: usize,
    pub(super) prefill_call: Option<usize>,
    pub(super) stage: Stage,
    /// What the decode worker said and is not to be heard yet.
    pub(super) unheard: VecDeque<FromDecode<Told, Trouble>>,
}

/// A request as its router sees it.
#[derive(Debug)]
pub(super) struct Flow {
    pub(super) recovery: Recovery,
    pub(super) avoided: Avoided,
    pub(super) attempts: u32,
    /// What the last worker said that failed it, and the last that was full.
    pub(super) said: Option<Trouble>,
    pub(super) full: Option<Trouble>,
    pub(super) tokens: Vec<TokenId>,
    pub(super) attempt: Option<Attempt>,
    /// Its place inside the router.
    pub(super) place: Slot,
}

impl World {
    /// A request reaches its router.
    pub(super) fn arrived(&mut self, r: usize, request: usize) {
        let (here, limits) = (self.addr(r), self.shape.retry);
        self.requests[request].router = Some(here);
        let Some(router) = self.router_mut(r) else { return };
        let place = match router.admission.enter(0) {
            Ok(place) => place,
            Err(error) => {
                self.requests[request].ended(self.clock.now(), Some(error.kind));
                return self.counts.add("request ends", "not admitted");
            }
        };
        let flow = Flow {
            recovery: Recovery::new(limits),
            avoided: Avoided::default(),
            attempts: 0,
            said: None,
            full: None,
            tokens: Vec::new(),
            attempt: None,
            place,
        };
        self.clock.post(self.requests[request].deadline, here, Event::Deadline(request));
        if let Some(router) = self.router_mut(r) {
            router.flows.insert(request, flow);
            router.queued.push_back(request);
        }
        self.take_turns(r);
    }

    /// Requests whose turn it is begin, first come first served.
    pub(super) fn take_turns(&mut self, r: usize) {
        while let Some(router) = self.router_mut(r)
            && let Some(request) = router.queued.front().copied()
        {
            let has_turn = match router.flows.get_mut(&request) {
                Some(flow) => flow.place.turn().now_or_never().is_some(),
                None => true,
            };
            if !has_turn {
                return;
            }
            router.queued.pop_front();
            self.try_again(r, request);
        }
    }

    /// Places the request and begins an attempt.
    pub(super) fn try_again(&mut self, r: usize, request: usize) {
        if self.flow(r, request).is_none_or(|flow| flow.attempt.is_some()) {
            return;
        }
        match self.place(r, request) {
            Ok((decode, prefill)) => self.attempt(r, request, decode, prefill),
            Err(refusal) => {
                let retry_after = match refusal {
                    Refusal::Full { retry_after } => Some(retry_after),
                    Refusal::TooLate { first_token, .. } => Some(first_token),
                    _ => None,
                };
                let full = self.left_are_full(r, request, &refusal);
                let trouble = full.unwrap_or(Trouble { kind: refusal.kind(), retry_after });
                self.attempt_failed(r, request, Step::Place, trouble);
            }
        }
    }

    /// What the last full worker said, where what is missing are only workers that the request asks no more.
    fn left_are_full(&self, r: usize, request: usize, refusal: &Refusal) -> Option<Trouble> {
        let now = self.clock.instant(self.clock.now());
        let router = self.router(r)?;
        let flow = router.flows.get(&request)?;
        let ready = router.workers.values().filter(|known| known.load.measured(now, STALE_MAX).is_some());
        let are_full = flow.avoided.excludes_missing(refusal.missing(), ready.map(|known| &*known.record));
        flow.full.filter(|_| are_full)
    }

    fn place(&mut self, r: usize, request: usize) -> Result<(Party, Option<Party>), Refusal> {
        let now = self.clock.instant(self.clock.now());
        let spec = &self.requests[request];
        let (prompt, max, policy, deadline) = (spec.prompt.len(), spec.max_tokens, spec.policy, spec.deadline);
        let left = Duration::from_micros(deadline.saturating_sub(self.clock.now()));
        let mut random = std::mem::take(&mut self.random);
        let mut refusal = Refusal::NoDecodeWorker;
        let mut chosen = None;
        if let Some(router) = self.router(r)
            && let Some(flow) = router.flows.get(&request)
        {
            let sent = flow.tokens.len();
            let demand = Demand {
                prompt_tokens: (prompt + sent) as u64,
                total_tokens: (prompt + max) as u64,
                answer_tokens: max as u64,
                slowness: Slowness::default(),
                longest: Duration::ZERO,
                policy,
                turn: 0,
                time_left: if sent > 0 { Duration::MAX } else { left },
            };
            for circle in Circle::WIDENING {
                let fits = router.workers.iter().filter_map(|(party, known)| {
                    let on_probation = known.probation.lasts(now);
                    let admits = flow.avoided.admits(party, known.record.role, on_probation, circle);
                    let load = known.load.measured(now, STALE_MAX).filter(|_| admits)?;
                    let not_with = flow.avoided.not_with(party, circle);
                    Some((
                        party,
                        Worker { record: known.record.clone(), group: None, load, not_with, cached_tokens: 0 },
                    ))
                });
                let (parties, view): (Vec<_>, Vec<_>) = fits.unzip();
                match place(&view, &demand, &THRESHOLDS, &mut |n| random.below(n)) {
                    Ok(Decision { decode, prefill, reason, .. }) => {
                        let prefill = prefill.map(|p| parties[p].clone());
                        router.workers[parties[decode]].load.placed(0, demand.prompt_tokens);
                        if let Some(prefill) = &prefill {
                            router.workers[prefill].load.placed(demand.prompt_tokens, demand.prompt_tokens);
                        }
                        chosen = Some((parties[decode].clone(), prefill, reason.name(), circle));
                        break;
                    }
                    Err(refused) => refusal = refused,
                }
            }
        }
        self.random = random;
        let (decode, prefill, reason, circle) = chosen.ok_or(refusal)?;
        self.counts.add("placement", reason);
        self.counts.add(
            "placement",
            match circle {
                Circle::Trusted => "trusted",
                Circle::Untried => "untried",
                Circle::DecodersAgain => "decoders again",
                Circle::OtherPairs => "other pairs",
                Circle::All => "all",
            },
        );
        Ok((decode, prefill))
    }

    fn attempt(&mut self, r: usize, request: usize, decode: Party, prefill: Option<Party>) {
        let here = self.addr(r);
        let Some(number) = self.flow_mut(r, request).map(|flow| {
            flow.attempts += 1;
            flow.attempts
        }) else {
            return;
        };
        let call = self.call(r, (request, number), &decode, Wanted::Decode { source: prefill.clone() });
        if let Some(flow) = self.flow_mut(r, request) {
            let (stage, unheard) = (Stage::Claiming, VecDeque::new());
            flow.attempt =
                Some(Attempt { number, decode, prefill, decode_call: call, prefill_call: None, stage, unheard });
        }
        let at = self.clock.now() + CLAIM_MAX;
        self.clock.post(at, here, Event::ClaimLate { request, attempt: number });
    }

    /// The client is sent a token; whether the answer goes on.
    pub(super) fn token(&mut self, r: usize, request: usize, Told { token, ends }: Told) -> bool {
        let Some(flow) = self.flow_mut(r, request) else { return false };
        let at = flow.tokens.len();
        flow.tokens.push(token);
        let spec = &self.requests[request];
        if spec.answer.get(at) != Some(&token) {
            self.fail(
                Invariant::RightAnswer,
                format!("request {request} was sent token {token} at {at}, which is not {:?}", spec.answer.get(at)),
            );
            return false;
        }
        let is_last = ends || at + 1 >= spec.max_tokens;
        if is_last && at + 1 != spec.answer.len() {
            self.fail(Invariant::RightAnswer, format!("the answer of request {request} ends at {at}"));
            return false;
        }
        if is_last {
            let now = self.clock.now();
            if let Some(router) = self.router_mut(r)
                && let Some(attempt) = router.flows.get(&request).and_then(|flow| flow.attempt.as_ref())
            {
                for party in attempt.prefill.iter().chain([&attempt.decode]) {
                    router.workers.get(party).into_iter().for_each(|known| known.probation.served());
                }
            }
            self.requests[request].last_token = Some(now);
            self.request_ends(r, request, None);
        }
        !is_last
    }

    /// What follows a failed attempt is the real recovery's decision.
    pub(super) fn attempt_failed(&mut self, r: usize, request: usize, step: Step, trouble: Trouble) {
        let (now, here) = (self.clock.now(), self.addr(r));
        let (at, deadline) = (self.clock.instant(now), self.clock.instant(self.requests[request].deadline));
        let jitter = self.random.below(1001) as f64 / 1000.0;
        let Some(router) = self.router_mut(r) else { return };
        let Some(flow) = router.flows.get_mut(&request) else { return };
        // What a worker cancelled, no client did.
        let kind = if trouble.kind == ErrorKind::Cancelled { ErrorKind::Unavailable } else { trouble.kind };
        let trouble = Trouble { kind, ..trouble };
        let said = match step {
            Step::Place if kind != ErrorKind::Overloaded => flow.said.unwrap_or(trouble),
            _ => trouble,
        };
        let started = !flow.tokens.is_empty();
        let failure = Failure { step, kind, retry_after: trouble.retry_after, started, drained: false };
        let decided = flow.recovery.after(&failure, at, deadline, &router.bucket, jitter);
        let attempt = flow.attempt.take();
        let name = match &decided {
            Ok(_) => step.name(),
            Err(why) => why.name(),
        };
        if let Ok(retry) = &decided {
            let avoids = match (retry.prefill, retry.decode) {
                (None, None) => "nobody",
                (Some(Avoid::Softly), None) => "prefill softly",
                (Some(Avoid::Strictly), None) => "prefill strictly",
                (None, Some(Avoid::Softly)) => "decode softly",
                (None, Some(Avoid::Strictly)) => "decode strictly",
                (Some(Avoid::Softly), Some(_)) => "both softly",
                (Some(Avoid::Strictly), Some(_)) => "prefill strictly, decode softly",
            };
            self.counts.add("recovery avoids", avoids);
        }
        let Some(router) = self.router_mut(r) else { return };
        let Some(flow) = router.flows.get_mut(&request) else { return };
        if let (Ok(retry), Some(attempt)) = (&decided, &attempt) {
            flow.avoided.failed(attempt.prefill.as_ref(), &attempt.decode, retry);
            for (party, _) in retry.avoids(attempt.prefill.as_ref(), &attempt.decode).filter(|_| retry.probation) {
                if let Some(known) = router.workers.get(party) {
                    known.probation.failed(at, &PROBATION);
                }
            }
        }
        if attempt.is_some() {
            flow.said = Some(said);
            flow.full = Some(said).filter(|said| said.kind == ErrorKind::Overloaded).or(flow.full);
        }
        self.counts.add(if decided.is_ok() { "recovery goes on after" } else { "recovery gives up" }, name);
        if let Some(attempt) = attempt {
            self.close(attempt.decode_call);
            attempt.prefill_call.into_iter().for_each(|call| self.close(call));
        }
        match decided {
            Ok(retry) => {
                let at = now + retry.after.as_micros() as Time;
                self.clock.post(at, here, Event::Again { request });
            }
            Err(_) => self.request_ends(r, request, Some(said.kind)),
        }
    }

    /// The router tells the client of the end.
    pub(super) fn request_ends(&mut self, r: usize, request: usize, error: Option<ErrorKind>) {
        let Some(flow) = self.router_mut(r).and_then(|router| router.flows.remove(&request)) else { return };
        drop(flow.place);
        let here = self.addr(r);
        self.post(here, Event::Turn);
        if let Some(attempt) = flow.attempt {
            self.close(attempt.decode_call);
            attempt.prefill_call.into_iter().for_each(|call| self.close(call));
        }
        if error == Some(ErrorKind::Internal) && !self.may_break {
            self.fail(Invariant::EveryEnd, format!("request {request} ended with an internal error"));
        }
        self.requests[request].ended(self.clock.now(), error);
        self.counts.add("request ends", error.map_or("ok", ErrorKind::name));
    }

    pub(super) fn flow(&self, r: usize, request: usize) -> Option<&Flow> {
        self.router(r)?.flows.get(&request)
    }

    pub(super) fn flow_mut(&mut self, r: usize, request: usize) -> Option<&mut Flow> {
        self.router_mut(r)?.flows.get_mut(&request)
    }
}

/// Where a request asks to be prefilled.
pub(super) fn policy(draw: usize) -> PrefillPolicy {
    [PrefillPolicy::Auto, PrefillPolicy::Auto, PrefillPolicy::Remote, PrefillPolicy::Local][draw % 4]
}

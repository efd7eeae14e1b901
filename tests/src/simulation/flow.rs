//! A request's way through a router: the real placement, recovery and pairing decide, this carries them out.

use super::clock::{Addr, Fifo, Time, ms};
use super::event::{Event, Said, Trouble};
use super::world::World;
use baton_router::PrefillPolicy;
use baton_router::pure::{
    Avoided, Circle, Decision, Demand, Failure, FromDecode, FromPrefill, Pair, Phase, Place, ProbationLimits, Recovery,
    Refusal, Says, Thresholds, Worker, place,
};
use baton_types::{ErrorKind, Party, RequestId, Role, TokenId};
use futures::FutureExt as _;
use std::collections::VecDeque;
use std::time::Duration;

const THRESHOLDS: Thresholds = Thresholds { local_prefill_tokens_max: 12, prefill_tokens_per_s_default: 4000.0 };
const PROBATION: ProbationLimits = ProbationLimits { min: Duration::from_millis(100), max: Duration::from_millis(800) };
/// Load older than this counts as none.
const STALE_MAX: Duration = Duration::from_millis(700);
/// Longest wait for a claim.
const CLAIM_MAX: Time = ms(250);
/// A silent peer is noticed after this.
const KEEPALIVE: Time = ms(600);

/// A token as routers are told it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Told {
    token: TokenId,
    ends: bool,
}

/// A stream from a router to a worker, and what it asks for.
#[derive(Debug)]
pub(super) struct Call {
    pub(super) role: Role,
    pub(super) name: RequestId,
    pub(super) request: usize,
    attempt: u32,
    pub(super) tokens: Vec<TokenId>,
    pub(super) prompt_len: usize,
    pub(super) max_tokens: usize,
    pub(super) priority: i32,
    pub(super) deadline: Time,
    /// The prefill worker whose KV a decode worker is to wait for.
    pub(super) source: Option<Party>,
    /// The decode worker that a prefill is for.
    pub(super) sink: Addr,
    pub(super) router: Addr,
    pub(super) worker: Addr,
    pub(super) router_open: bool,
    pub(super) worker_open: bool,
    there: Fifo,
    back: Fifo,
}

#[derive(Debug)]
enum Stage {
    Claiming,
    Local,
    Pair(Box<Pair<Told, Trouble>>),
}

/// One attempt.
#[derive(Debug)]
struct Attempt {
    number: u32,
    decode: Party,
    prefill: Option<Party>,
    decode_call: usize,
    prefill_call: Option<usize>,
    stage: Stage,
    /// What the decode worker said and is not to be heard yet.
    unheard: VecDeque<FromDecode<Told, Trouble>>,
}

/// A request as its router sees it.
#[derive(Debug)]
pub(super) struct Flow {
    recovery: Recovery,
    avoided: Avoided,
    attempts: u32,
    said: Option<Trouble>,
    tokens: Vec<TokenId>,
    attempt: Option<Attempt>,
    /// Its place inside the router.
    place: Place,
}

impl World {
    /// A request reaches its router.
    pub(super) fn arrived(&mut self, r: usize, request: usize) {
        let (here, limits) = (self.addr(r), self.shape.retry);
        self.requests[request].router = Some(here);
        let Some(router) = self.router_mut(r) else { return };
        let place = match router.admission.enter() {
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
                Some(flow) => flow.place.run().now_or_never().is_some(),
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
                let (kind, retry_after) = match refusal {
                    Refusal::NoDecodeWorker | Refusal::NoPrefillWorker => (ErrorKind::Unavailable, None),
                    Refusal::NeverFits { .. } => (ErrorKind::ContextLengthExceeded, None),
                    Refusal::Full { retry_after } => (ErrorKind::Overloaded, Some(retry_after)),
                    Refusal::TooLate { first_token } => (ErrorKind::Overloaded, Some(first_token)),
                };
                self.attempt_failed(r, request, Phase::Place, Trouble { kind, retry_after });
            }
        }
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
                policy,
                time_left: if sent > 0 { Duration::MAX } else { left },
            };
            for circle in Circle::WIDENING {
                let fits = router.workers.iter().filter_map(|(party, known)| {
                    let on_probation = known.probation.lasts(now);
                    let admits = flow.avoided.admits(party, known.record.role, on_probation, circle);
                    let load = known.load.measured(now, STALE_MAX).filter(|_| admits)?;
                    Some((party, Worker { record: known.record.clone(), load }))
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
        let call = self.call(r, request, number, Role::Decode, &decode, prefill.clone(), Addr::WORLD);
        if let Some(flow) = self.flow_mut(r, request) {
            let (stage, unheard) = (Stage::Claiming, VecDeque::new());
            flow.attempt =
                Some(Attempt { number, decode, prefill, decode_call: call, prefill_call: None, stage, unheard });
        }
        let at = self.clock.now() + CLAIM_MAX;
        self.clock.post(at, here, Event::ClaimLate { request, attempt: number });
    }

    /// Opens a stream to a worker, at its address.
    #[allow(clippy::too_many_arguments)] // Two callers, and what differs between them.
    fn call(
        &mut self,
        r: usize,
        request: usize,
        attempt: u32,
        role: Role,
        to: &Party,
        source: Option<Party>,
        sink: Addr,
    ) -> usize {
        let router = self.addr(r);
        let sent = self.flow(r, request).map(|flow| flow.tokens.clone()).unwrap_or_default();
        let spec = &self.requests[request];
        let name = RequestId::try_new(format!("r{request}.{attempt}.{}", router.incarnation)).expect("a short name");
        let process = self.instances[&to.instance];
        let call = Call {
            role,
            name,
            request,
            attempt,
            tokens: [&spec.prompt[..], &sent].concat(),
            prompt_len: spec.prompt.len(),
            max_tokens: spec.max_tokens,
            priority: spec.priority,
            deadline: spec.deadline,
            source,
            sink,
            router,
            worker: Addr::whoever(process),
            router_open: true,
            worker_open: false,
            there: Fifo::default(),
            back: Fifo::default(),
        };
        self.calls.push(call);
        let call = self.calls.len() - 1;
        let at = self.clock.now() + self.delay();
        let at = self.calls[call].there.arrive(at);
        if self.procs[process].is_up {
            self.clock.post(at, Addr::whoever(process), Event::Open { call });
            self.watch_sign(call, process);
        } else {
            self.clock.post(at, router, Event::Broken { call });
        }
        call
    }

    /// A worker that stands still gives no sign of life.
    pub(super) fn watch_sign(&mut self, call: usize, process: usize) {
        if let Some(stops) = self.procs[process].stalled {
            let (at, to) = (self.clock.now() + KEEPALIVE, self.calls[call].router);
            self.clock.post(at, to, Event::NoSign { call, stops });
        }
    }

    /// A worker's words on their way to the router.
    pub(super) fn send_said(&mut self, from: Addr, call: usize, said: Said) {
        let at = self.clock.now() + self.delay();
        let c = &mut self.calls[call];
        if c.worker == from {
            let at = c.back.arrive(at);
            self.clock.post(at, c.router, Event::Said { call, said });
        }
    }

    /// The router lets a stream go.
    fn close(&mut self, call: usize) {
        let at = self.clock.now() + self.delay();
        let c = &mut self.calls[call];
        if std::mem::take(&mut c.router_open) {
            let (at, to) = (c.there.arrive(at), Addr::whoever(c.worker.process));
            self.clock.post(at, to, Event::HangUp { call });
        }
    }

    /// Streams of a process that died break at the other end.
    pub(super) fn break_calls_of(&mut self, dead: Addr, silent: bool) {
        for call in 0..self.calls.len() {
            let soon = if silent { KEEPALIVE } else { ms(20) };
            let at = self.clock.now() + self.draw(soon as usize) as Time;
            let c = &mut self.calls[call];
            if c.worker == dead && std::mem::take(&mut c.worker_open) {
                let at = c.back.arrive(at);
                self.clock.post(at, c.router, Event::Broken { call });
            } else if c.router == dead && std::mem::take(&mut c.router_open) {
                let at = c.there.arrive(at);
                self.clock.post(at, Addr::whoever(c.worker.process), Event::HangUp { call });
            }
        }
    }

    /// Streams to a process that stopped are watched.
    pub(super) fn watch_calls_of(&mut self, process: usize) {
        for call in 0..self.calls.len() {
            if self.calls[call].worker.process == process && self.calls[call].router_open {
                self.watch_sign(call, process);
            }
        }
    }

    /// No sign of life for too long, if it is the same stop still.
    pub(super) fn no_sign(&mut self, r: usize, call: usize, stops: u64) {
        let process = self.calls[call].worker.process;
        if self.procs[process].stalled == Some(stops) && self.calls[call].router_open {
            self.broken(r, call);
        }
    }

    /// A stream broke under the router.
    pub(super) fn broken(&mut self, r: usize, call: usize) {
        let lost = Trouble::new(ErrorKind::Unavailable);
        self.heard(r, call, Err(lost));
        self.close(call);
    }

    /// A word of a worker.
    pub(super) fn said(&mut self, r: usize, call: usize, said: Said) {
        let said = match said {
            Said::Error(trouble) => Err(trouble),
            said => Ok(said),
        };
        let stated = said.is_err();
        self.heard_stated(r, call, said, stated);
    }

    fn heard(&mut self, r: usize, call: usize, said: Result<Said, Trouble>) {
        self.heard_stated(r, call, said, false);
    }

    fn heard_stated(&mut self, r: usize, call: usize, said: Result<Said, Trouble>, stated: bool) {
        let Call { request, attempt, router_open, role, .. } = self.calls[call];
        let number = attempt;
        if !router_open {
            return;
        }
        let now = self.clock.instant(self.clock.now());
        let Some(flow) = self.flow_mut(r, request) else { return };
        let Some(attempt) = flow.attempt.as_mut().filter(|a| a.number == number) else { return };
        match (&mut attempt.stage, role) {
            (Stage::Claiming, _) => match said {
                Ok(Said::Claimed) => self.claimed(r, request),
                Ok(_) => self.out_of_order(r, request, Phase::Claim),
                Err(trouble) => self.attempt_failed(r, request, Phase::Claim, trouble),
            },
            (Stage::Local, _) => match said {
                Ok(Said::Token { token, ends }) => drop(self.token(r, request, Told { token, ends })),
                Ok(Said::Started) => {}
                Ok(_) => self.out_of_order(r, request, Phase::Decode),
                Err(trouble) => self.attempt_failed(r, request, Phase::Decode, trouble),
            },
            (Stage::Pair(pair), Role::Prefill) => {
                let event = match said {
                    Ok(Said::Token { token, ends }) => FromPrefill::Token(Told { token, ends }),
                    Ok(Said::Done) => FromPrefill::Done,
                    Ok(_) => return,
                    Err(trouble) => FromPrefill::Ended(trouble),
                };
                if !pair.hears_prefill() {
                    return;
                }
                let says = pair.prefill(event, || Trouble::new(ErrorKind::Internal), now);
                self.follows(r, request, says);
            }
            (Stage::Pair(_), Role::Decode) => {
                let event = match said {
                    Ok(Said::Token { token, ends }) => FromDecode::Token(Told { token, ends }),
                    Ok(Said::Adopted) => FromDecode::Adopted,
                    Ok(Said::Started) => return,
                    Ok(_) => return self.out_of_order(r, request, Phase::Decode),
                    Err(error) if stated => FromDecode::Stated { cancelled: error.kind == ErrorKind::Cancelled, error },
                    Err(error) => FromDecode::Broke(error),
                };
                attempt.unheard.push_back(event);
                self.hear_decode(r, request);
            }
        }
    }

    fn out_of_order(&mut self, r: usize, request: usize, phase: Phase) {
        self.attempt_failed(r, request, phase, Trouble::new(ErrorKind::Internal));
    }

    /// Takes what the decode worker said, as far as it is its turn.
    fn hear_decode(&mut self, r: usize, request: usize) {
        let now = self.clock.instant(self.clock.now());
        loop {
            let Some(attempt) = self.flow_mut(r, request).and_then(|flow| flow.attempt.as_mut()) else { return };
            let Stage::Pair(pair) = &mut attempt.stage else { return };
            let says = match pair.early() {
                Some(token) => Says::Token(token),
                None if !pair.hears_decode() => break,
                None => match attempt.unheard.pop_front() {
                    Some(event) => pair.decode(event, now),
                    None => break,
                },
            };
            if !self.follow_one(r, request, says) {
                return;
            }
        }
        self.doubt(r, request);
    }

    fn follows(&mut self, r: usize, request: usize, says: Says<Told, Trouble>) {
        if self.follow_one(r, request, says) {
            self.hear_decode(r, request);
        }
    }

    /// Whether the attempt goes on.
    fn follow_one(&mut self, r: usize, request: usize, says: Says<Told, Trouble>) -> bool {
        match says {
            Says::Nothing | Says::Done => true,
            Says::Token(token) => self.token(r, request, token),
            Says::Failed(phase, trouble) => {
                self.attempt_failed(r, request, phase, trouble);
                false
            }
        }
    }

    fn doubt(&mut self, r: usize, request: usize) {
        let (now, here) = (self.clock.now(), self.addr(r));
        let at = self.clock.instant(now);
        let Some(attempt) = self.flow(r, request).and_then(|flow| flow.attempt.as_ref()) else { return };
        let Stage::Pair(pair) = &attempt.stage else { return };
        let number = attempt.number;
        if let Some(due) = pair.due(at) {
            let due = self.clock.time(due);
            self.clock.post(due, here, Event::DoubtEnds { request, attempt: number });
        }
    }

    /// Nothing better was heard in time.
    pub(super) fn doubt_ends(&mut self, r: usize, request: usize, number: u32) {
        let now = self.clock.instant(self.clock.now());
        let Some(attempt) = self.flow_mut(r, request).and_then(|flow| flow.attempt.as_mut()) else { return };
        let Stage::Pair(pair) = &mut attempt.stage else { return };
        if attempt.number == number && pair.due(now).is_some_and(|due| due <= now) {
            let pair = std::mem::take(pair);
            self.counts.add("pair", "doubt ends");
            if let Some((phase, trouble)) = pair.overdue() {
                self.attempt_failed(r, request, phase, trouble);
            }
        }
    }

    fn claimed(&mut self, r: usize, request: usize) {
        let Some(attempt) = self.flow_mut(r, request).and_then(|flow| flow.attempt.as_mut()) else { return };
        let number = attempt.number;
        let Some(prefill) = attempt.prefill.clone() else {
            attempt.stage = Stage::Local;
            return;
        };
        attempt.stage = Stage::Pair(Box::default());
        let decode = attempt.decode.clone();
        let sink = Addr { process: self.instances[&decode.instance], incarnation: decode.incarnation.0 };
        let call = self.call(r, request, number, Role::Prefill, &prefill, None, sink);
        if let Some(attempt) = self.flow_mut(r, request).and_then(|flow| flow.attempt.as_mut()) {
            attempt.prefill_call = Some(call);
        }
    }

    pub(super) fn claim_late(&mut self, r: usize, request: usize, number: u32) {
        let attempt = self.flow(r, request).and_then(|flow| flow.attempt.as_ref());
        if attempt.is_some_and(|a| a.number == number && matches!(a.stage, Stage::Claiming)) {
            self.attempt_failed(r, request, Phase::Claim, Trouble::new(ErrorKind::Unavailable));
        }
    }

    /// The client is sent a token; whether the answer goes on.
    fn token(&mut self, r: usize, request: usize, Told { token, ends }: Told) -> bool {
        let Some(flow) = self.flow_mut(r, request) else { return false };
        let at = flow.tokens.len();
        flow.tokens.push(token);
        let spec = &self.requests[request];
        if spec.answer.get(at) != Some(&token) {
            self.fail(format!(
                "request {request} was sent token {token} at {at}, which is not {:?}",
                spec.answer.get(at)
            ));
            return false;
        }
        let is_last = ends || at + 1 >= spec.max_tokens;
        if is_last && at + 1 != spec.answer.len() {
            self.fail(format!("the answer of request {request} ends at {at}"));
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
    fn attempt_failed(&mut self, r: usize, request: usize, phase: Phase, trouble: Trouble) {
        let (now, here) = (self.clock.now(), self.addr(r));
        let times = (self.clock.instant(now), self.clock.instant(self.requests[request].deadline));
        let jitter = self.random.below(1001) as f64 / 1000.0;
        let Some(router) = self.router_mut(r) else { return };
        let Some(flow) = router.flows.get_mut(&request) else { return };
        // What a worker cancelled, no client did.
        let kind = if trouble.kind == ErrorKind::Cancelled { ErrorKind::Unavailable } else { trouble.kind };
        let trouble = Trouble { kind, ..trouble };
        let said = if phase == Phase::Place { flow.said.take().unwrap_or(trouble) } else { trouble };
        let failure = Failure { phase, kind, retry_after: trouble.retry_after, started: !flow.tokens.is_empty() };
        let decided = flow.recovery.after(&failure, times, &router.bucket, jitter);
        let attempt = flow.attempt.take();
        let name = match &decided {
            Ok(_) => phase.name(),
            Err(why) => why.name(),
        };
        if let (Ok(retry), Some(attempt)) = (&decided, &attempt) {
            let workers = [(attempt.prefill.as_ref(), retry.prefill), (Some(&attempt.decode), retry.decode)];
            for (party, how) in workers.into_iter().filter_map(|(party, how)| Some((party?, how?))) {
                flow.avoided.add(party.clone(), how);
                if let Some(known) = router.workers.get(party).filter(|_| retry.probation) {
                    known.probation.failed(times.0, &PROBATION);
                }
            }
        }
        flow.said = Some(said);
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
            self.fail(format!("request {request} ended with an internal error"));
        }
        self.requests[request].ended(self.clock.now(), error);
        self.counts.add("request ends", error.map_or("ok", ErrorKind::name));
    }

    fn flow(&self, r: usize, request: usize) -> Option<&Flow> {
        self.router(r)?.flows.get(&request)
    }

    fn flow_mut(&mut self, r: usize, request: usize) -> Option<&mut Flow> {
        self.router_mut(r)?.flows.get_mut(&request)
    }
}

/// Where a request asks to be prefilled.
pub(super) fn policy(draw: usize) -> PrefillPolicy {
    [PrefillPolicy::Auto, PrefillPolicy::Auto, PrefillPolicy::Remote, PrefillPolicy::Local][draw % 4]
}

//! What a router makes of its workers' words: for two streams of one attempt, the real pairing decides.

use super::call::{Call, Wanted};
use super::clock::Addr;
use super::event::{Event, Said, Trouble};
use super::flow::{Stage, Told};
use super::world::World;
use baton_router::pure::{FromDecode, FromPrefill, Next, Pair, PrefillFault, Step};
use baton_types::{ErrorKind, Role};
use std::time::Duration;

impl World {
    pub(super) fn heard(&mut self, r: usize, call: usize, said: Result<Said, Trouble>) {
        self.heard_stated(r, call, said, false);
    }

    pub(super) fn heard_stated(&mut self, r: usize, call: usize, said: Result<Said, Trouble>, stated: bool) {
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
                Ok(_) => self.out_of_order(r, request, Step::Claim),
                Err(trouble) => self.attempt_failed(r, request, Step::Claim, trouble),
            },
            (Stage::Local, _) => match said {
                Ok(Said::Token { token, ends }) => drop(self.token(r, request, Told { token, ends })),
                Ok(Said::Started) => {}
                Ok(_) => self.out_of_order(r, request, Step::Decode),
                Err(trouble) => self.attempt_failed(r, request, Step::Decode, trouble),
            },
            (Stage::Pair(pair), Role::Prefill) => {
                let event = match said {
                    Ok(Said::Token { token, ends }) => FromPrefill::Token(Told { token, ends }),
                    Ok(Said::Done) => FromPrefill::Done,
                    Ok(_) => return,
                    Err(trouble) if stated && trouble.kind == ErrorKind::Overloaded => FromPrefill::NoRoom(trouble),
                    Err(trouble) => FromPrefill::Ended(trouble),
                };
                if !pair.hears_prefill() {
                    return;
                }
                let name = match &event {
                    FromPrefill::Token(_) => "prefill token",
                    FromPrefill::Done => "prefill done",
                    FromPrefill::NoRoom(_) => "prefill finds no room",
                    FromPrefill::Ended(_) => "prefill ended",
                };
                let otherwise = |unlike| match unlike {
                    PrefillFault::OutOfOrder => Trouble::new(ErrorKind::Internal),
                    PrefillFault::NotAdopted => Trouble::new(ErrorKind::Unavailable),
                };
                let says = pair.prefill(event, otherwise, now);
                self.counts.moved("pair", name, name_of(&says));
                self.follows(r, request, says);
            }
            (Stage::Pair(_), Role::Decode) => {
                let event = match said {
                    Ok(Said::Token { token, ends }) => FromDecode::Token(Told { token, ends }),
                    Ok(Said::Adopted) => FromDecode::Adopted,
                    Ok(Said::Started) => return,
                    Ok(_) => return self.out_of_order(r, request, Step::Decode),
                    Err(error) if stated => FromDecode::Stated { cancelled: error.kind == ErrorKind::Cancelled, error },
                    Err(error) => FromDecode::Broke(error),
                };
                attempt.unheard.push_back(event);
                self.hear_decode(r, request);
            }
        }
    }

    fn out_of_order(&mut self, r: usize, request: usize, step: Step) {
        self.attempt_failed(r, request, step, Trouble::new(ErrorKind::Internal));
    }

    /// Takes what the decode worker said, as far as it is its turn.
    fn hear_decode(&mut self, r: usize, request: usize) {
        let now = self.clock.instant(self.clock.now());
        loop {
            let Some(attempt) = self.flow_mut(r, request).and_then(|flow| flow.attempt.as_mut()) else { return };
            let Stage::Pair(pair) = &mut attempt.stage else { return };
            let says = match pair.early() {
                Some(token) => {
                    self.counts.add("pair", "early token");
                    Next::Token(token)
                }
                None if !pair.hears_decode() => break,
                None => match attempt.unheard.pop_front() {
                    Some(event) => {
                        let name = match &event {
                            FromDecode::Adopted => "adopted",
                            FromDecode::Token(_) => "decode token",
                            FromDecode::Stated { .. } => "decode states an error",
                            FromDecode::Broke(_) => "decode breaks",
                        };
                        let says = pair.decode(event, now);
                        self.counts.moved("pair", name, name_of(&says));
                        says
                    }
                    None => break,
                },
            };
            if !self.follow_one(r, request, says) {
                return;
            }
        }
        self.doubt(r, request);
    }

    fn follows(&mut self, r: usize, request: usize, says: Next<Told, Trouble>) {
        if self.follow_one(r, request, says) {
            self.hear_decode(r, request);
        }
    }

    /// Whether the attempt goes on.
    fn follow_one(&mut self, r: usize, request: usize, says: Next<Told, Trouble>) -> bool {
        match says {
            Next::Nothing | Next::Done => true,
            Next::Token(token) => self.token(r, request, token),
            Next::Failed(step, trouble) => {
                self.attempt_failed(r, request, step, trouble);
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
        if let Some(due) = pair.due(at).filter(|_| !self.mutant.doubts_for_ever()) {
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
            let pair = std::mem::replace(pair, Box::new(Pair::new(Duration::ZERO)));
            self.counts.add("pair", "doubt ends");
            if let Some((step, trouble)) = pair.overdue() {
                self.attempt_failed(r, request, step, trouble);
            }
        }
    }

    fn claimed(&mut self, r: usize, request: usize) {
        let adopted_max = self.shape.retry.adopted_max;
        let Some(attempt) = self.flow_mut(r, request).and_then(|flow| flow.attempt.as_mut()) else { return };
        let number = attempt.number;
        let Some(prefill) = attempt.prefill.clone() else {
            attempt.stage = Stage::Local;
            return;
        };
        attempt.stage = Stage::Pair(Box::new(Pair::new(adopted_max)));
        let decode = attempt.decode.clone();
        let sink = Addr { process: self.instances[&decode.instance], incarnation: decode.incarnation.0 };
        let call = self.call(r, (request, number), &prefill, Wanted::Prefill { sink });
        if let Some(attempt) = self.flow_mut(r, request).and_then(|flow| flow.attempt.as_mut()) {
            attempt.prefill_call = Some(call);
        }
    }

    pub(super) fn claim_late(&mut self, r: usize, request: usize, number: u32) {
        let attempt = self.flow(r, request).and_then(|flow| flow.attempt.as_ref());
        if attempt.is_some_and(|a| a.number == number && matches!(a.stage, Stage::Claiming)) {
            self.attempt_failed(r, request, Step::Claim, Trouble::new(ErrorKind::Unavailable));
        }
    }
}

/// What follows, by name; a failure by the phase that is at fault.
fn name_of<T, E>(says: &Next<T, E>) -> &'static str {
    match says {
        Next::Nothing => "nothing yet",
        Next::Token(_) => "token",
        Next::Done => "done",
        Next::Failed(step, _) => step.name(),
    }
}

//! Prefill on one worker, decode on another: orders the events of their streams, and decides which of the two failed.
//!
//! The streams come over different connections, so either may overtake the other.

use super::Step;
use baton_types::seeded;
use std::time::{Duration, Instant};

/// A prefill worker that fails after its first token may already have handed all KV over. The decode worker has this
/// long to report that.
const ADOPTION_WAIT_MAX: Duration = Duration::from_millis(500);
/// If the sequence ends with its first token, the prefill worker abandons the handoff. The decode worker's error may
/// arrive before that token. The prefill worker has this long to send it.
const LAST_WORD_WAIT_MAX: Duration = Duration::from_millis(500);

/// An event of the prefill worker's stream: a token `T`, or an error `E`.
#[derive(Debug)]
pub(crate) enum FromPrefill<T, E> {
    Token(T),
    /// The KV is handed over, or the handoff is not needed.
    Done,
    /// The decode worker has no room for the KV.
    NoRoom(E),
    /// The stream ended.
    Ended(E),
}

/// Why an event of a prefill worker is an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PrefillFault {
    /// The event is out of order.
    OutOfOrder,
    /// It has handed the KV over, but the decode worker has not reported it.
    NotAdopted,
}

/// An event of the decode worker's stream.
#[derive(Debug)]
pub(crate) enum FromDecode<T, E> {
    /// The KV is verified and adopted.
    Adopted,
    /// A token after the prefill worker's.
    Token(T),
    /// The worker returned an error; `cancelled` if the sequence was abandoned.
    Stated {
        /// Its kind is `Cancelled`.
        cancelled: bool,
        error: E,
    },
    /// The stream broke, or an event was out of order.
    Broke(E),
}

/// The next action for the answer.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Next<T, E> {
    /// Nothing yet.
    Nothing,
    /// The answer continues with this token.
    Token(T),
    /// The prefill worker has finished its part.
    Done,
    /// The attempt failed.
    Failed(Step, E),
}

/// Both streams of one attempt, and their state so far.
#[derive(Debug)]
pub(crate) struct Pair<T, E> {
    /// The prefill worker's stream is open.
    prefilling: bool,
    /// The prefill worker's token has arrived. Every event of the decode worker is ordered after it.
    first: bool,
    /// Token of the decode worker that arrived before the first one.
    early: Option<T>,
    adopted: bool,
    /// The decode worker's stream ended because the prefill worker abandoned the handoff.
    given_up: bool,
    /// A suspected failure and its time limit: it becomes final unless a better event arrives before.
    doubt: Option<(Step, E, Instant)>,
    adopted_max: Duration,
}

impl<T, E> Pair<T, E> {
    /// Both streams are open and have sent nothing. Once the prefill worker reports the handoff, the decode worker has
    /// `adopted_max` to report the adoption: another process may have received the KV.
    pub(crate) fn new(adopted_max: Duration) -> Self {
        let (early, doubt) = (None, None);
        Self { prefilling: true, first: false, early, adopted: false, given_up: false, doubt, adopted_max }
    }

    /// Whether to read the prefill worker's stream.
    pub(crate) fn reads_prefill(&self) -> bool {
        self.prefilling
    }

    /// Whether to read the decode worker's stream.
    pub(crate) fn reads_decode(&self) -> bool {
        self.early.is_none() && !self.given_up
    }

    /// The token that arrived early, once it is its turn.
    pub(crate) fn early(&mut self) -> Option<T> {
        if self.first { self.early.take() } else { None }
    }

    /// When to call [`Pair::overdue`].
    pub(crate) fn due(&self, now: Instant) -> Option<Instant> {
        if seeded!(NoStreamDeadline) {
            return None;
        }
        // If the handoff was abandoned although the first token is not the last, no better event can arrive.
        self.doubt.as_ref().map(|(_, _, at)| if self.first && self.given_up { now } else { *at })
    }

    /// The failure, since no better event arrived in time.
    pub(crate) fn overdue(self) -> Option<(Step, E)> {
        self.doubt.map(|(step, error, _)| (step, error))
    }

    /// Handles an event of the prefill worker. `fault` makes the error for an event out of order, or for KV that is not
    /// adopted.
    pub(crate) fn prefill(
        &mut self,
        event: FromPrefill<T, E>,
        fault: impl FnOnce(PrefillFault) -> E,
        now: Instant,
    ) -> Next<T, E> {
        match event {
            FromPrefill::Token(token) if !self.first => {
                self.first = true;
                Next::Token(token)
            }
            FromPrefill::Done if self.first => {
                self.prefilling = false;
                if !self.adopted {
                    self.doubt = Some((Step::Handoff, fault(PrefillFault::NotAdopted), now + self.adopted_max));
                }
                Next::Done
            }
            FromPrefill::Token(_) | FromPrefill::Done => Next::Failed(Step::Prefill, fault(PrefillFault::OutOfOrder)),
            FromPrefill::NoRoom(error) => Next::Failed(Step::Handoff, error),
            FromPrefill::Ended(error) => {
                self.prefilling = false;
                if !self.first {
                    return Next::Failed(Step::Prefill, error);
                }
                if !self.adopted {
                    self.doubt = Some((Step::Prefill, error, now + ADOPTION_WAIT_MAX));
                }
                Next::Nothing
            }
        }
    }

    /// Handles an event of the decode worker.
    pub(crate) fn decode(&mut self, event: FromDecode<T, E>, now: Instant) -> Next<T, E> {
        match event {
            FromDecode::Adopted => (self.adopted, self.doubt) = (true, None),
            FromDecode::Token(token) => {
                (self.adopted, self.doubt) = (true, None);
                if self.first {
                    return Next::Token(token);
                }
                self.early = Some(token);
            }
            // An error that the decode worker returns before it adopts is about the handoff; a broken stream is about
            // the worker.
            FromDecode::Stated { cancelled, error } if !self.adopted => {
                let may_have_ended = cancelled && !self.first && self.prefilling;
                // If the prefill worker failed, that was earlier, and is the cause.
                let cause = self.doubt.take().filter(|(step, ..)| *step == Step::Prefill);
                let (step, error) = cause.map_or((Step::Handoff, error), |(step, error, _)| (step, error));
                if !may_have_ended {
                    return Next::Failed(step, error);
                }
                self.given_up = true;
                self.doubt = Some((step, error, now + LAST_WORD_WAIT_MAX));
            }
            FromDecode::Stated { error, .. } | FromDecode::Broke(error) => return Next::Failed(Step::Decode, error),
        }
        Next::Nothing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Steps `ms:event`. Prefill worker: `t` token, `d` done, `n` no room, `x` its stream ends. Decode worker: `A`
    /// adopted, `T` token, `C` the sequence was cancelled, `E` another error, `X` its stream breaks. `?` lets the time
    /// pass.
    fn run(script: &str) -> String {
        let start = Instant::now();
        let (mut pair, mut out) = (Pair::new(Duration::from_millis(2000)), Vec::new());
        let fault = |what| if what == PrefillFault::OutOfOrder { "order" } else { "not adopted" };
        for step in script.split_whitespace() {
            let (ms, word) = step.split_once(':').unwrap();
            let now = start + Duration::from_millis(ms.parse().unwrap());
            let said = match word {
                "t" => pair.prefill(FromPrefill::Token("first"), fault, now),
                "d" => pair.prefill(FromPrefill::Done, fault, now),
                "n" => pair.prefill(FromPrefill::NoRoom("full"), fault, now),
                "x" => pair.prefill(FromPrefill::Ended("prefill ended"), fault, now),
                "A" => pair.decode(FromDecode::Adopted, now),
                "T" => pair.decode(FromDecode::Token("second"), now),
                "C" => pair.decode(FromDecode::Stated { cancelled: true, error: "given up" }, now),
                "E" => pair.decode(FromDecode::Stated { cancelled: false, error: "stated" }, now),
                "X" => pair.decode(FromDecode::Broke("broke"), now),
                _ => Next::Nothing,
            };
            out.push(match said {
                Next::Nothing if pair.due(now).is_some_and(|due| due <= now) => {
                    return format!("{} {:?}", out.join(" "), pair.overdue().unwrap());
                }
                Next::Nothing => pair.early().unwrap_or("-").to_owned(),
                Next::Token(token) => [Some(token), pair.early()].into_iter().flatten().collect::<Vec<_>>().join("+"),
                Next::Done => "done".to_owned(),
                Next::Failed(step, error) => format!("{step:?}({error})"),
            });
        }
        out.join(" ")
    }

    #[test]
    fn scripts() {
        let cases = [
            ("0:t 1:d 2:A 3:T", "first done - second"),
            ("0:A 1:T 2:t", "- - first+second"),
            ("0:d", "Prefill(order)"),
            ("0:t 1:t", "first Prefill(order)"),
            ("0:x", "Prefill(prefill ended)"),
            ("0:n", "Handoff(full)"),
            ("0:t 1:n", "first Handoff(full)"),
            // All KV may have been handed over before the prefill worker failed.
            ("0:t 1:x 500:? 501:?", "first - - (Prefill, \"prefill ended\")"),
            ("0:t 1:x 400:T 600:?", "first - second -"),
            ("0:t 1:A 2:x 900:?", "first - - -"),
            ("0:t 1:x 2:E", "first - Prefill(prefill ended)"),
            ("0:t 1:E", "first Handoff(stated)"),
            ("0:t 1:C", "first Handoff(given up)"),
            ("0:t 1:A 2:C", "first - Decode(given up)"),
            ("0:t 1:X", "first Decode(broke)"),
            // The prefill worker reports the handoff, but the decode worker received nothing.
            ("0:t 1:d 2000:? 2001:?", "first done - (Handoff, \"not adopted\")"),
            ("0:t 1:d 1999:A 2001:? 9000:T", "first done - - second"),
            ("0:t 1:d 1999:T 2001:?", "first done second -"),
            ("0:A 1:t 2:d 9000:?", "- first done -"),
            ("0:t 1:d 2:E", "first done Handoff(stated)"),
            ("0:t 1:d 2:C", "first done Handoff(given up)"),
            ("0:t 1:d 2:X", "first done Decode(broke)"),
            // The answer may have ended with its first token, which arrives after the decode worker's event about it.
            ("0:C 100:t", "- first"),
            ("0:C 499:? 500:?", "- - (Handoff, \"given up\")"),
            ("0:C 100:t 100:?", "- first (Handoff, \"given up\")"),
        ];
        for (script, expected) in cases {
            assert_eq!(run(script).trim_start(), expected, "{script}");
        }
    }
}

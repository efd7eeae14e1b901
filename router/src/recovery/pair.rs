//! Prefill on one worker, decode on another: in which order what their streams say counts, and which of the two is at fault.
//!
//! The streams come over different connections, so either may overtake the other.

use super::Step;
use baton_types::seeded;
use std::time::{Duration, Instant};

/// A prefill worker that fails after its first token may have handed all KV over; the decode worker gets so long to say so.
const ADOPTION_WAIT_MAX: Duration = Duration::from_millis(500);
/// A prefill worker whose sequence ended with its first token gives the handoff up, and the decode worker's word of that may come before
/// the token does; the prefill worker gets so long to say it.
const LAST_WORD_WAIT_MAX: Duration = Duration::from_millis(500);

/// What the prefill worker's stream says: a token `T`, or an error `E`.
#[derive(Debug)]
pub(crate) enum FromPrefill<T, E> {
    Token(T),
    /// The KV is handed over, or need not be.
    Done,
    /// The decode worker has no room for the KV.
    NoRoom(E),
    /// The stream ended.
    Ended(E),
}

/// What is wrong with a prefill worker's event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PrefillFault {
    /// It does not belong there.
    OutOfOrder,
    /// It has handed the KV over, and the decode worker says nothing of it.
    NotAdopted,
}

/// What the decode worker's stream says.
#[derive(Debug)]
pub(crate) enum FromDecode<T, E> {
    /// The KV is verified and adopted.
    Adopted,
    /// A token behind the prefill worker's.
    Token(T),
    /// The worker stated an error; `cancelled` if it is that the sequence was given up.
    Stated {
        /// Its kind is `Cancelled`.
        cancelled: bool,
        error: E,
    },
    /// The stream broke, or said what does not belong there.
    Broke(E),
}

/// What follows for the answer.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Next<T, E> {
    /// Nothing yet.
    Nothing,
    /// The answer goes on with this token.
    Token(T),
    /// The prefill worker's part is done.
    Done,
    /// The attempt failed.
    Failed(Step, E),
}

/// Both streams of one attempt, and what is known so far.
#[derive(Debug)]
pub(crate) struct Pair<T, E> {
    /// The prefill worker's stream is open.
    prefilling: bool,
    /// The prefill worker's token came. Whatever the decode worker says comes after it.
    first: bool,
    /// Token of the decode worker that overtook the first one.
    early: Option<T>,
    adopted: bool,
    /// The decode worker's stream ended because the prefill worker gave the handoff up.
    given_up: bool,
    /// A failure that stands unless something better is heard until then.
    doubt: Option<(Step, E, Instant)>,
    adopted_max: Duration,
}

impl<T, E> Pair<T, E> {
    /// Both streams are open and said nothing. Once the prefill worker says that it has handed the KV over, the decode worker has
    /// `adopted_max` to say that it adopted it: whoever took the KV may not have been the decode worker.
    pub(crate) fn new(adopted_max: Duration) -> Self {
        let (early, doubt) = (None, None);
        Self { prefilling: true, first: false, early, adopted: false, given_up: false, doubt, adopted_max }
    }

    /// Whether the prefill worker's stream is to be heard.
    pub(crate) fn reads_prefill(&self) -> bool {
        self.prefilling
    }

    /// Whether the decode worker's stream is to be heard.
    pub(crate) fn reads_decode(&self) -> bool {
        self.early.is_none() && !self.given_up
    }

    /// The token that came too early, once it is its turn.
    pub(crate) fn early(&mut self) -> Option<T> {
        if self.first { self.early.take() } else { None }
    }

    /// When [`Pair::overdue`] is to be asked.
    pub(crate) fn due(&self, now: Instant) -> Option<Instant> {
        if seeded!(EndlessDoubt) {
            return None;
        }
        // Nothing better can come of a handoff that was given up with the first token not the last.
        self.doubt.as_ref().map(|(_, _, at)| if self.first && self.given_up { now } else { *at })
    }

    /// Nothing better was heard in time.
    pub(crate) fn overdue(self) -> Option<(Step, E)> {
        self.doubt.map(|(step, error, _)| (step, error))
    }

    /// The prefill worker says something. `fault` makes the error of an event out of order, or of KV that nobody adopts.
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

    /// The decode worker says something.
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
            // What the decode worker itself says before it adopts is about the handoff; a broken stream is about the worker.
            FromDecode::Stated { cancelled, error } if !self.adopted => {
                let may_have_ended = cancelled && !self.first && self.prefilling;
                // Where the prefill worker failed, that came first, and is the cause.
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

    /// Steps `ms:word`. Prefill worker: `t` token, `d` done, `n` no room, `x` its stream ends. Decode worker: `A` adopted, `T` token, `C` says that the
    /// sequence was cancelled, `E` another error, `X` its stream breaks. `?` lets the time pass.
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
            // All KV may have been handed over before the prefill worker went.
            ("0:t 1:x 500:? 501:?", "first - - (Prefill, \"prefill ended\")"),
            ("0:t 1:x 400:T 600:?", "first - second -"),
            ("0:t 1:A 2:x 900:?", "first - - -"),
            ("0:t 1:x 2:E", "first - Prefill(prefill ended)"),
            ("0:t 1:E", "first Handoff(stated)"),
            ("0:t 1:C", "first Handoff(given up)"),
            ("0:t 1:A 2:C", "first - Decode(given up)"),
            ("0:t 1:X", "first Decode(broke)"),
            // Handed over, says the prefill worker, and the decode worker has nothing.
            ("0:t 1:d 2000:? 2001:?", "first done - (Handoff, \"not adopted\")"),
            ("0:t 1:d 1999:A 2001:? 9000:T", "first done - - second"),
            ("0:t 1:d 1999:T 2001:?", "first done second -"),
            ("0:A 1:t 2:d 9000:?", "- first done -"),
            ("0:t 1:d 2:E", "first done Handoff(stated)"),
            ("0:t 1:d 2:C", "first done Handoff(given up)"),
            ("0:t 1:d 2:X", "first done Decode(broke)"),
            // The answer may have ended with its first token, which comes later than what the decode worker says of it.
            ("0:C 100:t", "- first"),
            ("0:C 499:? 500:?", "- - (Handoff, \"given up\")"),
            ("0:C 100:t 100:?", "- first (Handoff, \"given up\")"),
        ];
        for (script, expected) in cases {
            assert_eq!(run(script).trim_start(), expected, "{script}");
        }
    }
}

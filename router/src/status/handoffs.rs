//! Handoffs of KV between pairs of workers: how many are open now, and those that ended in the last minute, for people
//! who watch. Pure: observations are passed in with their time.

use baton_types::{InstanceId, RequestId, TransferReport};
use parking_lot::Mutex;
use serde::Serialize;
use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

/// How long an ended handoff is remembered.
const WINDOW: Duration = Duration::from_secs(60);
/// Most ended handoffs that are remembered; the newest ones.
const ENDED_MAX: usize = 1024;

/// A prefill worker and the decode worker that its KV goes to.
type Pair = (InstanceId, InstanceId);

/// Handoffs of one router. The open ones are bounded by its running requests.
#[derive(Debug, Default)]
pub(crate) struct Handoffs(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    open: BTreeMap<Pair, u32>,
    /// In order of their ends, with consecutive numbers.
    ended: VecDeque<Handoff>,
    /// Number of the next one.
    next: u64,
}

/// A handoff that ended.
#[derive(Clone, Debug)]
pub(crate) struct Handoff {
    /// Counts them, from 0.
    pub(crate) number: u64,
    pub(crate) at: Instant,
    pub(crate) request: RequestId,
    pub(crate) prefill: InstanceId,
    pub(crate) decode: InstanceId,
    pub(crate) report: TransferReport,
}

/// How many handoffs of one pair are open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct OpenPair {
    pub(crate) prefill: InstanceId,
    pub(crate) decode: InstanceId,
    pub(crate) open: u32,
}

/// A handoff in progress. Dropping it ends it without a report.
#[derive(Debug)]
pub(crate) struct OpenHandoff<'a> {
    of: &'a Handoffs,
    pair: Pair,
}

impl Handoffs {
    /// A prefill worker is called for a sequence that a decode worker continues.
    pub(crate) fn open(&self, prefill: &InstanceId, decode: &InstanceId) -> OpenHandoff<'_> {
        let pair = (prefill.clone(), decode.clone());
        *self.0.lock().open.entry(pair.clone()).or_default() += 1;
        OpenHandoff { of: self, pair }
    }

    /// The pairs with open handoffs, by name.
    pub(crate) fn pairs(&self) -> Vec<OpenPair> {
        let state = self.0.lock();
        let pair = |((prefill, decode), open): (&Pair, &u32)| OpenPair {
            prefill: prefill.clone(),
            decode: decode.clone(),
            open: *open,
        };
        state.open.iter().map(pair).collect()
    }

    /// Handoffs with this number or a later one that ended in the last minute, and the number of the next one.
    pub(crate) fn since(&self, number: u64, now: Instant) -> (Vec<Handoff>, u64) {
        let mut state = self.0.lock();
        state.forget(now);
        (state.ended.iter().filter(|ended| ended.number >= number).cloned().collect(), state.next)
    }
}

impl State {
    fn forget(&mut self, now: Instant) {
        let is_over = |ended: &Handoff| now.saturating_duration_since(ended.at) > WINDOW;
        while self.ended.len() > ENDED_MAX || self.ended.front().is_some_and(is_over) {
            self.ended.pop_front();
        }
    }
}

impl OpenHandoff<'_> {
    /// It ended with this report. One without bytes moved nothing: the answer ended with its first token.
    pub(crate) fn done(self, request: &RequestId, report: &TransferReport, now: Instant) {
        if report.transfer_bytes == 0 {
            return;
        }
        let mut state = self.of.0.lock();
        let (prefill, decode) = self.pair.clone();
        let number = state.next;
        let ended = Handoff { number, at: now, request: request.clone(), prefill, decode, report: report.clone() };
        state.ended.push_back(ended);
        state.next += 1;
        state.forget(now);
    }
}

impl Drop for OpenHandoff<'_> {
    fn drop(&mut self) {
        let mut state = self.of.0.lock();
        if let Some(open) = state.open.get_mut(&self.pair) {
            *open -= 1;
            if *open == 0 {
                state.open.remove(&self.pair);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(name: &str) -> InstanceId {
        InstanceId::try_new(name).unwrap()
    }

    fn report(bytes: u64) -> TransferReport {
        TransferReport { transfer_bytes: bytes, ..TransferReport::default() }
    }

    fn numbers(handoffs: &Handoffs, since: u64, now: Instant) -> (Vec<u64>, u64) {
        let (ended, next) = handoffs.since(since, now);
        (ended.iter().map(|ended| ended.number).collect(), next)
    }

    #[test]
    fn open_ones_are_counted_until_they_end_in_whatever_way() {
        let (handoffs, now) = (Handoffs::default(), Instant::now());
        let request = RequestId::try_new("r").unwrap();
        let open = |decode: &str| handoffs.open(&id("p"), &id(decode));
        let (one, two, other) = (open("d0"), open("d0"), open("d1"));
        let counts = || handoffs.pairs().iter().map(|pair| (pair.decode.to_string(), pair.open)).collect::<Vec<_>>();
        assert_eq!(counts(), [("d0".into(), 2), ("d1".into(), 1)]);
        one.done(&request, &report(7), now);
        other.done(&request, &report(0), now);
        assert_eq!(counts(), [("d0".into(), 1)]);
        drop(two);
        assert!(counts().is_empty());
        let (ended, next) = handoffs.since(0, now);
        assert_eq!((ended.len(), ended[0].report.transfer_bytes, next), (1, 7, 1), "what moved nothing is not told");
    }

    #[test]
    fn those_that_ended_are_told_once_and_bounded() {
        let (handoffs, start) = (Handoffs::default(), Instant::now());
        let request = RequestId::try_new("r").unwrap();
        let done = |now: Instant| handoffs.open(&id("p"), &id("d")).done(&request, &report(1), now);
        done(start);
        done(start + WINDOW);
        assert_eq!(numbers(&handoffs, 0, start + WINDOW), (vec![0, 1], 2));
        assert_eq!(numbers(&handoffs, 1, start + WINDOW), (vec![1], 2));
        assert_eq!(numbers(&handoffs, 0, start + WINDOW + Duration::from_millis(1)), (vec![1], 2));
        (0..2 * ENDED_MAX).for_each(|_| done(start + WINDOW));
        let (told, next) = numbers(&handoffs, 0, start + WINDOW);
        assert_eq!((told.len(), told[0], next), (ENDED_MAX, 2 + ENDED_MAX as u64, 2 + 2 * ENDED_MAX as u64));
    }
}

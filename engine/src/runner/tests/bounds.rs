//! Submissions that are refused, and the reported load.

use super::*;
use crate::{Awaited, SequencePhase, SubmitError};

fn refusal(engine: &EngineHandle, request: SequenceRequest, run: Run) -> SubmitError {
    engine.submit(request, run, TestSink::unread()).expect_err("refused")
}

#[test]
fn what_can_never_fit_is_refused_at_once() {
    let check = |blocks: u32, len: usize, expected: Option<(usize, &str)>| {
        let (engine, _) = start(blocks, config(), Hooks::default());
        let got = engine.check_fits(len).err();
        let expected =
            expected.map(|(limit, what)| format!("{} tokens can never fit: {limit} is the limit of {what}", len + 1));
        assert_eq!(got.as_ref().map(ToString::to_string), expected);
        if got.is_some() {
            assert_eq!(Some(refusal(&engine, request(&prompt(1, len), 1), Run::Full)), got);
        }
    };
    check(8, 63, None);
    check(8, 64, Some((64, "the context")));
    check(3, 47, None);
    check(3, 48, Some((48, "the KV pool")));
}

#[test]
fn nonsense_is_refused_with_a_reason() {
    let (engine, _) = start(8, config(), Hooks::default());
    let check = |expected: &str, change: &dyn Fn(&mut SequenceRequest)| {
        let mut bad = request(&[1, 2, 3], 4);
        change(&mut bad);
        let error = refusal(&engine, bad, Run::Full);
        assert!(matches!(&error, SubmitError::Invalid(m) if m.contains(expected)), "{error}");
    };
    check("prompt_len", &|r| r.tokens.clear());
    check("prompt_len", &|r| r.prompt_len = 0);
    check("prompt_len", &|r| r.prompt_len = 4);
    check("vocabulary", &|r| r.tokens[1] = VOCAB as u32);
    check("max_tokens", &|r| (r.prompt_len, r.sampling.max_tokens) = (1, 2));
    let lease = engine.pool().try_lease(&[1]).unwrap();
    let error = refusal(&engine, request(&prompt(1, 18), 1), Run::Adopted { lease, turn: None });
    assert!(matches!(&error, SubmitError::Invalid(m) if m.contains("adopted blocks")), "{error}");
    assert_eq!(engine.pool().counts().referenced, 0, "a refused lease is free again");
}

/// Held in the queue until its deadline; afterwards as many sequences fit as before.
#[test]
fn a_deadline_in_the_queue_returns_its_place() {
    let (engine, _) = start(8, EngineConfig { waiting_max: 2, ..config() }, Hooks::default());
    engine.set_gate(Some(Arc::new(|_: &RequestId, phase: SequencePhase| phase != SequencePhase::Queue)));
    for round in 0..3 {
        let late: Vec<_> = (0..2)
            .map(|i| {
                let mut request = request(&prompt(i, 5), 2);
                request.deadline = Instant::now() + Duration::from_millis(20);
                submit(&engine, request, Run::Full)
            })
            .collect();
        for sequence in &late {
            let (_, outcome) = sequence.end();
            assert!(matches!(outcome, Outcome::Failed(ErrorKind::DeadlineExceeded, _)), "{round}: {outcome:?}");
        }
    }
    eventually("an empty queue", || engine.load().waiting == 0);
}

#[test]
fn the_queue_is_bounded_and_its_places_come_back() {
    let (engine, _) = start(8, EngineConfig { waiting_max: 2, ..config() }, Hooks::default());
    engine.set_gate(Some(Arc::new(|_: &RequestId, phase: SequencePhase| phase != SequencePhase::Queue)));
    let waiting: Vec<_> = (0..2).map(|i| submit(&engine, request(&prompt(i, 5), 2), Run::Full)).collect();
    assert_eq!(refusal(&engine, request(&[1], 1), Run::Full), SubmitError::Full { waiting: 2, waiting_max: 2 });
    eventually("load", || (engine.load().waiting, engine.load().waiting_tokens) == (2, 10));
    waiting[0].control.cancel();
    waiting[0].end();
    let third = submit(&engine, request(&prompt(3, 5), 2), Run::Full);
    engine.set_gate(None);
    waiting[1].end();
    third.end();
    (0..2).for_each(|i| drop(submit(&engine, request(&prompt(i, 5), 2), Run::Full).end()));
}

#[test]
fn reservations_keep_the_margin_and_let_those_who_wait_go_first() {
    let (engine, _) = start(8, EngineConfig { watermark_blocks: 2, ..config() }, Hooks::default());
    let all = engine.reserve(8 * BLOCK, &[]).expect("an empty pool takes what fits it");
    assert!(engine.reserve(1, &[]).is_none());
    drop(all);
    let held = engine.reserve(5 * BLOCK, &[]).unwrap();
    assert!(engine.reserve(2 * BLOCK, &[]).is_none(), "three are free, two stay so");
    assert!(!engine.lacks_blocks());
    let starved = submit(&engine, request(&prompt(1, 2 * BLOCK), 1), Run::Full);
    eventually("starved", || engine.reserve(1, &[]).is_none());
    assert!(engine.lacks_blocks());
    drop(held);
    starved.end();
    eventually("room again", || engine.reserve(5 * BLOCK, &[]).is_some());
}

#[test]
fn a_reservation_that_waits_is_not_overtaken_by_later_sequences() {
    let (engine, _) = start(8, config(), Hooks::default());
    engine.set_gate(Some(Arc::new(|_: &RequestId, phase: SequencePhase| phase != SequencePhase::Prefill)));
    let outside = engine.pool().try_lease(&[2]);
    let (turn, tokens) = (engine.take_turn(0, Share::default(), 8 * BLOCK), 8 * BLOCK);
    assert!(engine.reserve(tokens, &[]).is_none());
    engine.keep_room(Some(Awaited { turn, share: Share::default(), tokens }));
    let late = submit(&engine, request(&prompt(1, 5), 1), Run::Full);
    eventually("it is there", || engine.load().waiting + engine.load().running > 0);
    drop(outside);
    let reserved = engine.reserve(tokens, &[]).expect("the block that the late one wants is kept");
    engine.keep_room(None);
    engine.set_gate(None);
    drop(reserved);
    assert_eq!(late.end().0.len(), 1);
}

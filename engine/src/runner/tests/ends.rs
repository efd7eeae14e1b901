//! Reasons for which sequences end, in every phase.

use super::*;
use crate::{SequencePhase, SubmitError};
use stand_in::continuation;

#[test]
fn tokens_follow_the_prompt_until_the_first_reason_to_end() {
    let tokens = prompt(1, 5);
    let output = continuation(&tokens, 59);
    let first_of = |i: usize| output.iter().position(|t| *t == output[i]).unwrap() + 1;
    let (end, stop) = (first_of(6), first_of(3));
    let check = |what: &str, change: &dyn Fn(&mut SamplingParams), count: usize, reason: FinishReason| {
        let (engine, _) = start(8, EngineConfig { end_tokens: vec![output[6]], ..config() }, Hooks::default());
        let mut request = request(&tokens, 1000);
        change(&mut request.sampling);
        let (got, outcome) = submit(&engine, request, Run::Full).end();
        assert_eq!(got, output[..count], "{what}");
        assert!(matches!(outcome, Outcome::Finished(r) if r == reason), "{what}: {outcome:?}");
        assert_eq!(engine.pool().counts().referenced, 0, "blocks are free before the end is told");
    };
    check("end token", &|_| {}, end, FinishReason::Stop);
    check("stop token", &|s| s.stop_token_ids = vec![output[3]], stop, FinishReason::Stop);
    check("max_tokens", &|s| s.max_tokens = 2, 2, FinishReason::Length);
    check("ignored end token", &|s| (s.ignore_eos, s.max_tokens) = (true, 9), 9, FinishReason::Length);
    check("context", &|s| s.ignore_eos = true, 59, FinishReason::Length);
    check("a stop token wins over max_tokens", &|s| s.max_tokens = end as u32, end, FinishReason::Stop);
}

#[test]
fn the_pool_bounds_a_sequence_where_it_is_smaller_than_the_context() {
    let (engine, _) = start(3, config(), Hooks::default());
    assert_eq!(engine.len_max(), 48);
    let tokens = prompt(2, 10);
    let (got, outcome) = submit(&engine, request(&tokens, 1000), Run::Full).end();
    assert_eq!(got, continuation(&tokens, 38));
    assert!(matches!(outcome, Outcome::Finished(FinishReason::Length)));
}

#[test]
fn a_continued_sequence_counts_what_was_generated_before() {
    let (engine, _) = start(8, config(), Hooks::default());
    let (tokens, output) = (prompt(3, 6), continuation(&prompt(3, 6), 10));
    let mut continued = request(&[&tokens[..], &output[..4]].concat(), 10);
    continued.prompt_len = 6;
    assert_eq!(submit(&engine, continued, Run::Full).end().0, output[4..]);
}

/// Holds everything in one phase.
fn hold(engine: &EngineHandle, held: SequencePhase) {
    engine.set_gate(Some(Arc::new(move |_: &RequestId, phase: SequencePhase| phase != held)));
}

const PHASES: [SequencePhase; 3] = [SequencePhase::Queue, SequencePhase::Prefill, SequencePhase::Decode];

#[test]
fn a_cancel_takes_effect_in_every_phase_while_nothing_moves() {
    for phase in PHASES {
        let (engine, _) = start(8, config(), Hooks::default());
        hold(&engine, phase);
        let held: Vec<_> = (0..6).map(|i| submit(&engine, request(&prompt(i, 20), 30), Run::Full)).collect();
        if phase == SequencePhase::Decode {
            held[0].wait_token();
        }
        for sequence in &held {
            sequence.control.cancel();
            let (_, outcome) = sequence.end();
            assert!(matches!(outcome, Outcome::Finished(FinishReason::Cancelled)), "{phase:?}: {outcome:?}");
        }
        assert_eq!(engine.pool().counts().referenced, 0, "{phase:?}");
        eventually("an empty queue", || engine.load().waiting == 0);
    }
}

#[test]
fn dropping_the_control_cancels_and_detaching_does_not() {
    let (engine, _) = start(8, config(), Hooks::default());
    hold(&engine, SequencePhase::Queue);
    let Submitted { control, events, .. } = submit(&engine, request(&prompt(1, 4), 4), Run::Full);
    drop(control);
    assert!(matches!(events.recv_timeout(FOREVER), Ok(SequenceEvent::Finished { reason: FinishReason::Cancelled })));
    let Submitted { control, events, .. } = submit(&engine, request(&prompt(1, 4), 4), Run::Full);
    control.detach();
    engine.set_gate(None);
    assert_eq!(events.iter().filter(|e| matches!(e, SequenceEvent::Token { .. })).count(), 4);
}

#[test]
fn a_deadline_ends_a_sequence_in_every_phase() {
    for phase in PHASES {
        let (engine, _) = start(8, config(), Hooks::default());
        hold(&engine, phase);
        let deadline = Instant::now() + Duration::from_millis(50);
        let held = submit(&engine, SequenceRequest { deadline, ..request(&prompt(1, 20), 4) }, Run::Full);
        assert!(matches!(held.end().1, Outcome::Failed(ErrorKind::DeadlineExceeded, _)), "{phase:?}");
        assert_eq!(engine.pool().counts().referenced, 0);
        eventually("an empty queue", || engine.load().waiting == 0);
    }
}

#[test]
fn whatever_ends_a_sequence_in_the_queue_its_place_is_free_again() {
    const PLACES: usize = 2;
    let deadline = || Instant::now() + Duration::from_millis(20);
    for late in [true, false] {
        let (engine, _) = start(8, EngineConfig { waiting_max: PLACES, ..config() }, Hooks::default());
        hold(&engine, SequencePhase::Queue);
        // More rounds than there are places, so that a place that is not released is detected.
        for round in 0..PLACES + 1 {
            let queued: Vec<_> = (0..PLACES as u32)
                .map(|i| {
                    let plain = request(&prompt(i, 20), 4);
                    let asked = if late { SequenceRequest { deadline: deadline(), ..plain } } else { plain };
                    submit(&engine, asked, Run::Full)
                })
                .collect();
            if !late {
                let refused = engine.submit(request(&prompt(9, 20), 4), Run::Full, TestSink::unread());
                assert!(matches!(refused, Err(SubmitError::Full { .. })), "round {round}: {refused:?}");
            }
            for sequence in &queued {
                if !late {
                    sequence.control.cancel();
                }
                sequence.end();
            }
        }
    }
}

#[test]
fn a_reader_without_room_is_paused_and_then_cancelled_while_others_go_on() {
    let (engine, _) = start(16, EngineConfig { stall: Duration::from_millis(100), ..config() }, Hooks::default());
    let tokens = prompt(2, 4);
    let stalled = submit_with_room(&engine, request(&prompt(1, 4), 60), Run::Full, 3);
    let other = submit(&engine, request(&tokens, 20), Run::Full);
    assert_eq!(other.end().0, continuation(&tokens, 20));
    let (got, outcome) = stalled.end();
    assert!(matches!(outcome, Outcome::Failed(ErrorKind::Cancelled, _)), "{outcome:?}");
    assert_eq!(got, continuation(&prompt(1, 4), 2), "one start and two tokens had room");
}

#[test]
fn a_reader_that_finds_room_again_misses_nothing() {
    let (engine, _) = start(16, config(), Hooks::default());
    let tokens = prompt(1, 4);
    let sequence = submit_with_room(&engine, request(&tokens, 40), Run::Full, 3);
    submit(&engine, request(&tokens, 20), Run::Full).end();
    eventually("paused, and in its place", || engine.load().running == 1);
    assert_eq!(engine.load().generated_tokens, 2 + 20);
    assert!(engine.load().prefill_rows > 0 && engine.still().is_zero());
    sequence.room.store(usize::MAX, Ordering::Relaxed);
    engine.wake();
    assert_eq!(sequence.end().0, continuation(&tokens, 40));
}

#[test]
fn a_reader_that_is_gone_ends_its_sequence() {
    let (engine, _) = start(16, config(), Hooks::default());
    hold(&engine, SequencePhase::Queue);
    let Submitted { control, events, .. } = submit(&engine, request(&prompt(1, 4), 60), Run::Full);
    control.detach();
    drop(events);
    engine.set_gate(None);
    eventually("freed", || engine.load().running + engine.load().waiting + engine.pool().counts().referenced == 0);
    assert!(engine.load().generated_tokens < 60);
}

//! A failing model, a hanging one, and the end of the engine itself.

use super::*;
use crate::{ModelError, SequencePhase, SubmitError};
use baton_kernels::device::DeviceError;
use stand_in::continuation;

fn before_step(hook: impl FnMut(&crate::StepInput) -> Result<(), ModelError> + Send + 'static) -> Hooks {
    Hooks { before_step: Some(Box::new(hook)), ..Hooks::default() }
}

#[test]
fn a_failed_step_or_a_panic_fails_every_sequence_and_the_engine_says_so() {
    let panics = before_step(|batch| if batch.ids.contains(&900.into()) { panic!("on purpose") } else { Ok(()) });
    let fails = before_step(|batch| {
        if batch.ids.contains(&900.into()) { Err(DeviceError::Step("on purpose".into()).into()) } else { Ok(()) }
    });
    for (hooks, reason) in [(panics, "panicked"), (fails, "on purpose")] {
        let (engine, _) = start(8, config(), hooks);
        engine.set_gate(Some(Arc::new(|_: &RequestId, phase: SequencePhase| phase != SequencePhase::Queue)));
        let mut all: Vec<_> = (0..6).map(|i| submit(&engine, request(&prompt(i, 5), 50), Run::Full)).collect();
        all.push(submit(&engine, request(&[900], 5), Run::Full));
        assert!(engine.healthy());
        engine.set_gate(None);
        for sequence in &all {
            match sequence.end().1 {
                Outcome::Failed(ErrorKind::Internal, message) => assert!(message.contains(reason), "{message}"),
                // Sequences that finished before the failing one ran.
                Outcome::Finished(FinishReason::Length) => {}
                other => panic!("{other:?}"),
            }
        }
        assert!(!engine.healthy() && engine.heartbeat().failed);
        assert_eq!(engine.pool().counts().referenced, 0);
        assert_eq!(engine.submit(request(&[1], 1), Run::Full, TestSink::unread()).unwrap_err(), SubmitError::Stopped);
        assert!(engine.stop(), "the thread ended");
    }
}

#[test]
fn logits_that_are_no_numbers_fail_their_sequence_alone() {
    let (engine, _) = start(8, config(), Hooks { poison: Some(13), ..Hooks::default() });
    let tokens: Vec<u32> = prompt(1, 5).into_iter().filter(|t| *t != 13).collect();
    let (poisoned, other) =
        (submit(&engine, request(&[13, 2], 5), Run::Full), submit(&engine, request(&tokens, 3), Run::Full));
    assert!(matches!(poisoned.end().1, Outcome::Failed(ErrorKind::Internal, _)));
    assert_eq!(other.end().0, continuation(&tokens, 3));
    assert!(engine.healthy());
}

#[test]
fn a_step_that_hangs_makes_the_engine_unhealthy_until_it_returns() {
    let (release, blocked) = channel::<()>();
    let hooks = before_step(move |_| {
        // The first step hangs until the test releases it; then the sender is gone.
        let _ = blocked.recv();
        Ok(())
    });
    let (engine, _) = start(8, EngineConfig { step_max: Duration::from_millis(20), ..config() }, hooks);
    assert!(engine.healthy());
    let sequence = submit(&engine, request(&[1], 2), Run::Full);
    eventually("unhealthy", || !engine.healthy());
    drop(release);
    sequence.end();
    eventually("healthy", || engine.healthy() && !engine.heartbeat().busy);
    assert_eq!(engine.heartbeat().steps, 2);
}

#[test]
fn stopping_ends_what_runs_and_refuses_what_comes() {
    let (engine, _) = start(8, config(), Hooks::default());
    engine.set_gate(Some(Arc::new(|_: &RequestId, phase: SequencePhase| phase != SequencePhase::Decode)));
    let running = submit(&engine, request(&[1, 2, 3], 20), Run::Full);
    running.wait_token();
    assert!(engine.stop());
    assert!(matches!(running.end().1, Outcome::Failed(ErrorKind::Unavailable, _)));
    assert_eq!(engine.pool().counts().referenced, 0);
    assert!(!engine.heartbeat().failed, "a stop is no failure");
    assert!(engine.submit(request(&[1], 1), Run::Full, TestSink::unread()).is_err());
}

#[test]
fn the_engine_ends_with_its_last_handle() {
    let (engine, _) = start(8, config(), Hooks::default());
    let clone = engine.clone();
    engine.set_gate(Some(Arc::new(|_: &RequestId, _: SequencePhase| false)));
    let held = submit(&engine, request(&[1], 1), Run::Full);
    drop(engine);
    assert!(clone.healthy());
    assert!(held.events.try_recv().is_err(), "one handle is left");
    drop(clone);
    assert!(matches!(held.end().1, Outcome::Failed(ErrorKind::Unavailable, _)));
}

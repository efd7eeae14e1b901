mod hazards;
mod parts;

use super::*;
use baton_types::Dtype;

const ABORT_WAIT: Duration = Duration::from_millis(100);
/// Two granules of one layer of k and v: four checksums.
const EXPECTED: Expected = Expected { tokens: 32, token_bytes: 2, algorithm: 1 };

fn granted(from: u32) -> SinkInput {
    SinkInput::Granted { from }
}

fn whole_commit() -> Commit {
    Commit { ticket: TicketId(9), algorithm: 1, sums: 4, bytes: 64, prompt_len: 4, tokens: vec![0; 33], extra: vec![] }
}

fn commit() -> SinkInput {
    SinkInput::Commit(Box::new(whole_commit()))
}
/// Checksums of this many granules, both planes each, from `first_granule` on.
fn sums(first_granule: u32, granules: usize) -> SinkInput {
    let runs = vec![SumRun { group: 0, layer: 0, first_granule, sums: vec![0; 2 * granules] }];
    SinkInput::Checksums(runs)
}
fn verified(sums: u64) -> SinkInput {
    SinkInput::Verified { sums }
}
fn closed() -> SinkInput {
    SinkInput::WindowClosed
}
fn aborted(flushed: bool) -> SinkInput {
    SinkInput::Aborted { flushed, detail: "x".into() }
}
fn lost(fenced: bool) -> SinkInput {
    SinkInput::ConnectionLost { fenced, detail: "x".into() }
}
fn cancel() -> SinkInput {
    SinkInput::Cancel(HandoffFailure::Aborted("x".into()))
}
fn corrupt() -> SinkInput {
    SinkInput::Unverified(HandoffFailure::Corrupt("x".into()))
}
fn device_busy() -> SinkInput {
    SinkInput::Unverified(HandoffFailure::DeviceBusy("x".into()))
}

fn describe(action: &SinkAction) -> String {
    match action {
        SinkAction::SendGrant => "grant".into(),
        SinkAction::SendRefuse { reason, .. } => format!("refuse {}", reason.name()),
        SinkAction::Verify(_) => "verify".into(),
        SinkAction::CloseWindow => "close".into(),
        SinkAction::Deliver(_) => "deliver".into(),
        SinkAction::SendAck => "ack".into(),
        SinkAction::SendNack(failure) => format!("nack {}", failure.name()),
        SinkAction::SendAbort(_) => "abort".into(),
        SinkAction::Release => "release".into(),
        SinkAction::Quarantine => "quarantine".into(),
        SinkAction::ReleaseQuarantined => "release quarantined".into(),
        SinkAction::Failed(failure) => format!("failed {}", failure.name()),
        SinkAction::Forget => "forget".into(),
    }
}

/// Feeds the inputs, each at a number of milliseconds, and compares the resulting actions.
fn check_at(steps: Vec<(u64, SinkInput, &str)>) {
    let begin = Instant::now();
    let layout = KvLayout::llama(16, 1, 1, 8, Dtype::Bf16).unwrap();
    let mut sink = Sink::new(TicketId(9), &layout, EXPECTED, begin + Duration::from_secs(1), ABORT_WAIT);
    for (i, (at, input, expected)) in steps.into_iter().enumerate() {
        let what = format!("step {i}: {input:?}");
        let actions: Vec<_> = sink.handle(begin + Duration::from_millis(at), input).iter().map(describe).collect();
        assert_eq!(actions.join(", "), expected, "{what}");
    }
}

fn check(steps: Vec<(SinkInput, &str)>) {
    check_at(steps.into_iter().map(|(input, expected)| (0, input, expected)).collect());
}

/// [`check`] from a grant on.
fn check_granted(steps: Vec<(SinkInput, &str)>) {
    let mut all = vec![(granted(0), "grant")];
    all.extend(steps);
    check(all);
}

#[test]
fn adopts_what_is_whole_in_any_order() {
    let adopted = || (SinkInput::Delivered(Ok(())), "ack, forget");
    check_granted(vec![
        (sums(1, 1), "verify"),
        (verified(2), ""),
        (sums(0, 1), "verify"),
        (commit(), "close"),
        (closed(), ""),
        (verified(2), "deliver"),
        adopted(),
    ]);
    check_granted(vec![
        (commit(), "close"),
        (closed(), ""),
        (sums(0, 2), "verify"),
        (verified(4), "deliver"),
        adopted(),
    ]);
    check_granted(vec![
        (sums(0, 2), "verify"),
        (verified(4), ""),
        (commit(), "close"),
        (closed(), "deliver"),
        adopted(),
    ]);
    // Everything matches, but something else is still being stored.
    check_granted(vec![
        (sums(0, 2), "verify"),
        (commit(), "close"),
        (verified(4), ""),
        (closed(), "deliver"),
        adopted(),
    ]);
}

#[test]
fn what_was_here_before_is_no_part_of_the_whole() {
    // Half of the positions: half of the checksums, half of the bytes, and all of the tokens.
    let half = || Commit { sums: 2, bytes: 32, ..whole_commit() };
    let commit_of = |commit| SinkInput::Commit(Box::new(commit));
    check(vec![
        (granted(16), "grant"),
        (sums(1, 1), "verify"),
        (verified(2), ""),
        (commit_of(half()), "close"),
        (closed(), "deliver"),
        (SinkInput::Delivered(Ok(())), "ack, forget"),
    ]);
    let wrong = [whole_commit(), Commit { bytes: 64, ..half() }, Commit { tokens: vec![0; 16], ..half() }];
    for commit in wrong {
        let expected = "nack protocol, release, failed protocol, forget";
        check(vec![(granted(16), "grant"), (commit_of(commit), expected)]);
    }
    // No correct source sends checksums of positions that are not moved.
    for outside in [sums(0, 1), sums(0, 2), sums(2, 1)] {
        check(vec![(granted(16), "grant"), (outside, "abort, failed protocol")]);
    }
}

#[test]
fn a_doubled_commit_delivers_once() {
    let first = |then| vec![(sums(0, 2), "verify"), (verified(4), ""), (commit(), "close"), then, (commit(), "")];
    check_granted(first((closed(), "deliver")));
    check_granted(first((commit(), "")).into_iter().chain([(closed(), "deliver")]).collect());
    check_granted(vec![
        (commit(), "close"),
        (commit(), ""),
        (closed(), ""),
        (sums(0, 2), "verify"),
        (verified(4), "deliver"),
    ]);
}

#[test]
fn a_commit_that_does_not_fit_is_refused() {
    let changes: [fn(&mut Commit); 5] =
        [|c| c.bytes -= 1, |c| c.sums += 1, |c| c.algorithm = 2, |c| c.tokens.truncate(31), |c| c.prompt_len = 34];
    for change in changes {
        let mut commit = whole_commit();
        change(&mut commit);
        let expected = "nack protocol, release, failed protocol, forget";
        check_granted(vec![(SinkInput::Commit(Box::new(commit)), expected)]);
    }
}

#[test]
fn corruption_is_never_adopted() {
    // Found after the commit: nothing is in flight.
    check_granted(vec![
        (sums(0, 2), "verify"),
        (commit(), "close"),
        (corrupt(), "nack corrupt, release, failed corrupt, forget"),
        (verified(4), ""),
    ]);
    // Found while later layers are still written: the blocks wait for the source's confirmation or its commit, which is equivalent.
    for end in [aborted(true), commit()] {
        check_granted(vec![
            (sums(0, 1), "verify"),
            (corrupt(), "nack corrupt, failed corrupt"),
            (end, "release, forget"),
        ]);
    }
}

#[test]
fn what_a_busy_device_did_not_sum_is_not_adopted_and_quarantined_only_if_its_source_is_silent() {
    check_granted(vec![
        (sums(0, 2), "verify"),
        (commit(), "close"),
        (device_busy(), "nack device_busy, release, failed device_busy, forget"),
        (verified(4), ""),
    ]);
    for end in [aborted(true), commit()] {
        check_granted(vec![
            (sums(0, 1), "verify"),
            (device_busy(), "nack device_busy, failed device_busy"),
            (end, "release, forget"),
        ]);
    }
    check_at(vec![
        (0, granted(0), "grant"),
        (0, sums(0, 1), "verify"),
        (0, device_busy(), "nack device_busy, failed device_busy"),
        (99, SinkInput::Tick, ""),
        (100, SinkInput::Tick, "quarantine"),
    ]);
}

#[test]
fn checksums_of_nothing_that_was_granted_abort() {
    check_granted(vec![(sums(0, 2), "verify"), (sums(2, 1), "abort, failed protocol")]);
    check_granted(vec![(sums(0, 3), "abort, failed protocol")]);
}

#[test]
fn a_part_verified_twice_does_not_stand_for_another() {
    // As many checksums matched as a whole handoff has, but half of the handoff was never compared.
    check_granted(vec![
        (sums(0, 1), "verify"),
        (verified(2), ""),
        (sums(0, 1), "abort, failed protocol"),
        (verified(2), ""),
        (commit(), "release, forget"),
    ]);
}

#[test]
fn parts_verified_once_each_are_the_whole() {
    check_granted(vec![
        (sums(0, 1), "verify"),
        (sums(1, 1), "verify"),
        (verified(2), ""),
        (commit(), "close"),
        (closed(), ""),
        (verified(2), "deliver"),
    ]);
}

#[test]
fn blocks_return_only_behind_a_fence() {
    check_granted(vec![(aborted(true), "release, failed aborted_by_peer, forget")]);
    check_granted(vec![
        (aborted(false), "failed aborted_by_peer, quarantine"),
        (aborted(true), "release quarantined, forget"),
    ]);
    check_granted(vec![(lost(true), "failed peer_lost, release, forget")]);
    check_granted(vec![
        (lost(false), "failed peer_lost, quarantine"),
        (lost(true), "release quarantined, forget"),
        (SinkInput::Fenced, ""),
    ]);
    check_granted(vec![
        (lost(false), "failed peer_lost, quarantine"),
        (SinkInput::Fenced, "release quarantined, forget"),
    ]);
    check_granted(vec![(cancel(), "abort, failed aborted"), (cancel(), ""), (aborted(true), "release, forget")]);
    check_granted(vec![(cancel(), "abort, failed aborted"), (lost(false), "quarantine")]);
    check_granted(vec![(SinkInput::Fenced, "failed peer_lost, release, forget")]);
}

#[test]
fn behind_a_commit_nothing_is_quarantined() {
    check_granted(vec![(commit(), "close"), (lost(false), "failed peer_lost, release, forget")]);
    check_granted(vec![
        (sums(0, 2), "verify"),
        (verified(4), ""),
        (commit(), "close"),
        (closed(), "deliver"),
        (lost(false), "failed peer_lost, release, forget"),
        (SinkInput::Delivered(Ok(())), ""),
    ]);
    check_granted(vec![
        (commit(), "close"),
        (cancel(), "abort, failed aborted"),
        (aborted(false), "release, forget"),
        (lost(true), ""),
    ]);
    check_at(vec![
        (0, granted(0), "grant"),
        (0, commit(), "close"),
        (0, cancel(), "abort, failed aborted"),
        (100, SinkInput::Tick, "release, forget"),
    ]);
}

/// The end of a short answer, whose stream cancels what is left, may overtake the worker's answer to the delivery.
#[test]
fn what_was_delivered_is_not_cancelled() {
    let delivered = |answer: Result<(), String>, then: &'static str| {
        check_granted(vec![
            (sums(0, 2), "verify"),
            (verified(4), ""),
            (commit(), "close"),
            (closed(), "deliver"),
            (cancel(), ""),
            (SinkInput::Delivered(answer), then),
            (cancel(), ""),
        ]);
    };
    delivered(Ok(()), "ack, forget");
    delivered(Err("x".into()), "nack not_adopted, failed not_adopted, forget");
}

#[test]
fn before_the_grant_there_is_nothing_to_fence() {
    let refused = || SinkInput::Refused { reason: RefuseReason::NoRoom, detail: String::new() };
    check(vec![(refused(), "refuse no_room, forget"), (granted(0), "release")]);
    check(vec![(aborted(true), "failed aborted_by_peer, forget"), (granted(0), "release")]);
    check(vec![(cancel(), "refuse no_room, failed aborted, forget")]);
    check(vec![(lost(false), "failed peer_lost, forget")]);
    check(vec![(commit(), ""), (sums(0, 1), ""), (verified(1), "")]);
}

#[test]
fn deadlines_abort_and_then_quarantine() {
    check_at(vec![
        (0, granted(0), "grant"),
        (999, SinkInput::Tick, ""),
        (1000, SinkInput::Tick, "abort, failed deadline"),
        (1099, SinkInput::Tick, ""),
        (1100, SinkInput::Tick, "quarantine"),
        (9999, SinkInput::Tick, ""),
        (9999, aborted(true), "release quarantined, forget"),
    ]);
    check_at(vec![(1000, SinkInput::Tick, "refuse no_room, failed deadline, forget")]);
    check_at(vec![(0, granted(0), "grant"), (1000, commit(), "abort, failed deadline")]);
}

#[test]
fn a_worker_that_does_not_adopt_ends_it() {
    check_granted(vec![
        (sums(0, 2), "verify"),
        (verified(4), ""),
        (commit(), "close"),
        (closed(), "deliver"),
        (SinkInput::Delivered(Err("x".into())), "nack not_adopted, failed not_adopted, forget"),
    ]);
}

use super::*;
use baton_types::Dtype;

const WAIT: Duration = Duration::from_millis(100);

fn granted(by_itself: bool) -> ReaderInput {
    ReaderInput::Granted { ticket: TicketId(9), by_itself }
}
/// Checksums of this many granules of the single layer of k and v, from `first_granule` on.
fn sums(first_granule: u32, granules: usize) -> ReaderInput {
    ReaderInput::Checksums(vec![SumRun { group: 0, layer: 0, first_granule, sums: vec![0; 2 * granules] }])
}
fn held(sums: u64) -> ReaderInput {
    ReaderInput::Held { algorithm: 1, sums }
}
fn verified(sums: u64) -> ReaderInput {
    ReaderInput::Verified { sums }
}
fn closed() -> ReaderInput {
    ReaderInput::WindowClosed
}
fn not_held() -> ReaderInput {
    ReaderInput::NotHeld("x".into())
}
fn lost() -> ReaderInput {
    ReaderInput::ConnectionLost { fenced: true, detail: "x".into() }
}
fn lost_unfenced() -> ReaderInput {
    ReaderInput::ConnectionLost { fenced: false, detail: "x".into() }
}
fn abort() -> ReaderInput {
    ReaderInput::Abort(HandoffFailure::Aborted("x".into()))
}

fn describe(action: &ReaderAction) -> String {
    match action {
        ReaderAction::Read => "read".into(),
        ReaderAction::SendAsk => "ask".into(),
        ReaderAction::CloseWindow => "close".into(),
        ReaderAction::SendConfirm => "confirm".into(),
        ReaderAction::Verify(_) => "verify".into(),
        ReaderAction::SendUnpin => "unpin".into(),
        ReaderAction::Disconnect => "disconnect".into(),
        ReaderAction::Failed(failure) => format!("failed {}", failure.name()),
        ReaderAction::Adopt => "adopt".into(),
        ReaderAction::Quarantine => "quarantine".into(),
        ReaderAction::Forget => "forget".into(),
    }
}

/// Feeds the inputs, each at a number of milliseconds, and compares the resulting actions. 32 tokens: four checksums.
fn check_at(steps: Vec<(u64, ReaderInput, &str)>) {
    let begin = Instant::now();
    let layout = KvLayout::llama(16, 1, 1, 8, Dtype::Bf16).unwrap();
    let mut reader = Reader::new(&layout, 32, 1, begin + Duration::from_secs(1), WAIT);
    for (i, (at, input, expected)) in steps.into_iter().enumerate() {
        let what = format!("step {i}: {input:?}");
        let actions: Vec<_> = reader.handle(begin + Duration::from_millis(at), input).iter().map(describe).collect();
        assert_eq!(actions.join(", "), expected, "{what}");
    }
}

fn check(steps: Vec<(ReaderInput, &str)>) {
    check_at(steps.into_iter().map(|(input, expected)| (0, input, expected)).collect());
}

#[test]
fn adopts_what_was_read_held_and_verified() {
    check(vec![
        (granted(true), "read"),
        (sums(0, 1), ""),
        (ReaderInput::Read, "confirm"),
        (sums(1, 1), ""),
        (held(4), "verify"),
        (verified(2), ""),
        (verified(2), "adopt, forget"),
        (lost(), ""),
    ]);
    check(vec![
        (granted(false), "ask"),
        (sums(0, 2), ""),
        (held(4), "close"),
        (verified(4), ""),
        (closed(), "verify"),
        (verified(4), "adopt, forget"),
        (closed(), ""),
    ]);
    check(vec![
        (granted(false), "ask"),
        (sums(0, 2), ""),
        (held(4), "close"),
        (abort(), "failed aborted, forget"),
        (closed(), ""),
    ]);
}

#[test]
fn nothing_is_adopted_unless_the_pin_held_after_the_last_byte() {
    check(vec![(granted(false), "ask"), (sums(0, 2), ""), (not_held(), "failed unpinned, forget"), (held(4), "")]);
    check(vec![
        (granted(true), "read"),
        (ReaderInput::Read, "confirm"),
        (not_held(), "unpin, failed unpinned, forget"),
    ]);
    // Confirmed before all bytes were here.
    check(vec![
        (granted(true), "read"),
        (sums(0, 2), ""),
        (held(4), "unpin, failed protocol"),
        (ReaderInput::Read, "forget"),
        (verified(4), ""),
    ]);
    check(vec![(held(4), "unpin, failed protocol, forget")]);
}

#[test]
fn checksums_must_cover_everything_once() {
    check(vec![(granted(false), "ask"), (sums(0, 1), ""), (held(2), "failed protocol, forget")]);
    check(vec![(granted(false), "ask"), (sums(0, 2), ""), (held(3), "failed protocol, forget")]);
    check(vec![(granted(false), "ask"), (sums(0, 1), ""), (sums(0, 1), "unpin, failed protocol"), (held(4), "forget")]);
    let of_another = ReaderInput::Held { algorithm: 2, sums: 4 };
    check(vec![(granted(false), "ask"), (sums(0, 2), ""), (of_another, "failed protocol, forget")]);
    check(vec![
        (granted(false), "ask"),
        (sums(0, 2), ""),
        (held(4), "close"),
        (closed(), "verify"),
        (ReaderInput::Unverified(HandoffFailure::Corrupt("x".into())), "failed corrupt, forget"),
        (verified(4), ""),
    ]);
}

#[test]
fn blocks_wait_for_what_is_under_way_whoever_moves_it() {
    let read = || ReaderInput::Read;
    check(vec![
        (granted(true), "read"),
        (abort(), "unpin, failed aborted"),
        (abort(), ""),
        (not_held(), ""),
        (read(), "forget"),
    ]);
    check(vec![(granted(true), "read"), (not_held(), "unpin, failed unpinned"), (lost(), "forget")]);
    check(vec![(granted(false), "ask"), (abort(), "unpin, failed aborted"), (read(), ""), (not_held(), "forget")]);
    // The confirmation crossed the reader's last message.
    check(vec![(granted(false), "ask"), (abort(), "unpin, failed aborted"), (sums(0, 2), ""), (held(4), "forget")]);
    for (by_itself, begins) in [(true, "read"), (false, "ask")] {
        check_at(vec![
            (0, granted(by_itself), begins),
            (1000, ReaderInput::Tick, "unpin, failed deadline"),
            (1099, ReaderInput::Tick, ""),
            (1100, ReaderInput::Tick, "disconnect"),
            (1101, lost(), "forget"),
        ]);
    }
}

#[test]
fn what_an_owner_could_still_write_waits_for_a_fence() {
    check(vec![
        (granted(false), "ask"),
        (lost_unfenced(), "failed peer_lost, quarantine"),
        (not_held(), ""),
        (ReaderInput::Tick, ""),
        (ReaderInput::Fenced, "forget"),
    ]);
    check(vec![
        (granted(false), "ask"),
        (abort(), "unpin, failed aborted"),
        (lost_unfenced(), "quarantine"),
        (ReaderInput::Fenced, "forget"),
    ]);
    check(vec![(granted(false), "ask"), (lost(), "failed peer_lost, forget")]);
    // Its own reads end with their connection, and after the confirmation nothing is in flight.
    check(vec![(granted(true), "read"), (lost_unfenced(), "failed peer_lost, forget")]);
    check(vec![
        (granted(false), "ask"),
        (sums(0, 2), ""),
        (held(4), "close"),
        (lost_unfenced(), "failed peer_lost, forget"),
    ]);
}

#[test]
fn before_the_grant_nothing_is_under_way() {
    check(vec![(abort(), "unpin, failed aborted, forget"), (granted(true), "")]);
    check(vec![(lost_unfenced(), "failed peer_lost, forget")]);
    check(vec![(ReaderInput::Refused(HandoffFailure::Stopped), "failed stopped, forget")]);
    check_at(vec![(999, ReaderInput::Tick, ""), (1000, ReaderInput::Tick, "unpin, failed deadline, forget")]);
}

use super::*;
use baton_types::Dtype;

const WAIT: Duration = Duration::from_millis(100);

fn granted(by_itself: bool) -> ReaderInput {
    ReaderInput::Granted { ticket: TicketId(9), by_itself }
}
/// Checksums of so many granules of the one layer of k and v, from one on.
fn sums(first_granule: u32, granules: usize) -> ReaderInput {
    ReaderInput::Checksums(vec![SumRun { group: 0, layer: 0, first_granule, sums: vec![0; 2 * granules] }])
}
fn held(sums: u64) -> ReaderInput {
    ReaderInput::Held { algorithm: 1, sums }
}
fn verified(sums: u64) -> ReaderInput {
    ReaderInput::Verified { sums }
}
fn not_held() -> ReaderInput {
    ReaderInput::NotHeld("x".into())
}
fn lost() -> ReaderInput {
    ReaderInput::ConnectionLost("x".into())
}
fn abort() -> ReaderInput {
    ReaderInput::Abort(HandoffFailure::Aborted("x".into()))
}

fn describe(action: &ReaderAction) -> String {
    match action {
        ReaderAction::Read => "read".into(),
        ReaderAction::SendAsk => "ask".into(),
        ReaderAction::SendConfirm => "confirm".into(),
        ReaderAction::Verify(_) => "verify".into(),
        ReaderAction::SendUnpin => "unpin".into(),
        ReaderAction::Disconnect => "disconnect".into(),
        ReaderAction::Done(Ok(())) => "done".into(),
        ReaderAction::Done(Err(failure)) => format!("failed {}", failure.name()),
    }
}

/// Feeds the inputs, each at a number of milliseconds, and compares what comes of each. 32 tokens: four checksums.
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
        (verified(2), "done"),
        (lost(), ""),
    ]);
    check(vec![(granted(false), "ask"), (sums(0, 2), ""), (held(4), "verify"), (verified(4), "done")]);
}

#[test]
fn nothing_is_adopted_unless_the_pin_held_after_the_last_byte() {
    check(vec![(granted(false), "ask"), (sums(0, 2), ""), (not_held(), "unpin, failed unpinned"), (held(4), "")]);
    check(vec![(granted(true), "read"), (ReaderInput::Read, "confirm"), (not_held(), "unpin, failed unpinned")]);
    // Confirmed before everything was here.
    check(vec![
        (granted(true), "read"),
        (sums(0, 2), ""),
        (held(4), "unpin"),
        (ReaderInput::Read, "failed protocol"),
        (verified(4), ""),
    ]);
    check(vec![(held(4), "unpin, failed protocol")]);
}

#[test]
fn checksums_must_cover_everything_once() {
    check(vec![(granted(false), "ask"), (sums(0, 1), ""), (held(2), "unpin, failed protocol")]);
    check(vec![(granted(false), "ask"), (sums(0, 2), ""), (held(3), "unpin, failed protocol")]);
    check(vec![(granted(false), "ask"), (sums(0, 1), ""), (sums(0, 1), "unpin, failed protocol")]);
    let of_another = ReaderInput::Held { algorithm: 2, sums: 4 };
    check(vec![(granted(false), "ask"), (sums(0, 2), ""), (of_another, "unpin, failed protocol")]);
    check(vec![
        (granted(false), "ask"),
        (sums(0, 2), ""),
        (held(4), "verify"),
        (ReaderInput::Corrupt("x".into()), "failed corrupt"),
        (verified(4), ""),
    ]);
}

#[test]
fn blocks_wait_for_reads_under_way() {
    check(vec![(granted(true), "read"), (abort(), "unpin"), (abort(), ""), (ReaderInput::Read, "failed aborted")]);
    check(vec![(granted(true), "read"), (not_held(), "unpin"), (lost(), "failed unpinned")]);
    check_at(vec![
        (0, granted(true), "read"),
        (1000, ReaderInput::Tick, "unpin"),
        (1099, ReaderInput::Tick, ""),
        (1100, ReaderInput::Tick, "disconnect"),
        (1101, lost(), "failed deadline"),
    ]);
    // What the owner writes comes through a door that closes at once.
    check(vec![(granted(false), "ask"), (abort(), "unpin, failed aborted")]);
}

#[test]
fn before_the_grant_nothing_is_under_way() {
    check(vec![(abort(), "unpin, failed aborted"), (granted(true), "")]);
    check(vec![(lost(), "failed peer_lost")]);
    check(vec![(ReaderInput::Refused(HandoffFailure::Stopped), "failed stopped")]);
    check_at(vec![(999, ReaderInput::Tick, ""), (1000, ReaderInput::Tick, "unpin, failed deadline")]);
}

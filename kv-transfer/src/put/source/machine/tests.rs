use super::*;
use crate::RefuseReason;
use baton_types::{Dtype, KvPlane};
use std::time::Duration;

const FLUSH_WAIT: Duration = Duration::from_millis(100);

/// Two layers, blocks of 16 tokens, 32 bytes a token and layer; an epoch is one block of both layers.
fn source(tokens: u32) -> (Source, Instant) {
    let now = Instant::now();
    let layout = KvLayout::llama(16, 2, 1, 8, Dtype::Bf16).unwrap();
    (Source::new(layout, tokens, now + Duration::from_secs(1), 1024, FLUSH_WAIT), now)
}

fn run(layer: u16, first_granule: u32) -> SumRun {
    SumRun { group: 0, layer, first_granule, sums: vec![0; 2] }
}

fn layer(layer: u32, tokens_end: u32) -> SourceInput {
    SourceInput::LayerReady { layer, tokens_end }
}

fn describe(action: &SourceAction) -> String {
    match action {
        SourceAction::Copy { epoch, layer, tokens, .. } => format!("copy l{layer} {tokens:?} e{epoch}"),
        SourceAction::Flush { epoch: ABORT_EPOCH } => "flush abort".into(),
        SourceAction::Flush { epoch } => format!("flush e{epoch}"),
        SourceAction::Cancel => "cancel".into(),
        SourceAction::SendChecksums(runs) => format!("checksums {}", runs.len()),
        SourceAction::SendCommit { sums, bytes } => format!("commit {sums} {bytes}"),
        SourceAction::SendAborted { flushed, .. } => format!("aborted {flushed}"),
        SourceAction::Disconnect => "disconnect".into(),
        SourceAction::ReleaseHold => "release".into(),
        SourceAction::Done(Ok(())) => "adopted".into(),
        SourceAction::Done(Err(failure)) => format!("failed {}", failure.name()),
    }
}

type Steps = Vec<(SourceInput, &'static str)>;

/// Feeds the inputs and compares the resulting actions.
fn check(tokens: u32, steps: Steps) {
    let (mut source, now) = source(tokens);
    for (i, (input, expected)) in steps.into_iter().enumerate() {
        let what = format!("step {i}: {input:?}");
        let actions: Vec<_> = source.handle(now, input).iter().map(describe).collect();
        assert_eq!(actions.join(", "), expected, "{what}");
    }
}

fn granted() -> SourceInput {
    granted_from(0)
}
fn granted_from(from: u32) -> SourceInput {
    SourceInput::Granted { ticket: TicketId(1), from }
}
fn flushed(epoch: u32) -> SourceInput {
    SourceInput::Flushed { epoch, ok: true }
}
fn summed(epoch: u32, layer: u16) -> SourceInput {
    SourceInput::Summed { epoch, run: run(layer, 0) }
}
fn abort() -> SourceInput {
    SourceInput::Abort(HandoffFailure::Aborted("test".into()))
}

/// A layer that keeps everything, and one with a state of two planes and 48 bytes.
#[test]
fn a_state_goes_once_all_positions_are_ready() {
    let plane = |name, dim| KvPlane::try_new(name, 1, dim, Dtype::F32).unwrap();
    let full = KvGroup { kind: GroupKind::Full, layers: vec![1], planes: vec![plane("k", 4)] };
    let state = KvGroup { kind: GroupKind::State, layers: vec![0], planes: vec![plane("a", 4), plane("b", 8)] };
    for block_tokens in [16, 64] {
        let layout = KvLayout::try_new(block_tokens, vec![full.clone(), state.clone()]).unwrap();
        let now = Instant::now();
        let mut source = Source::new(layout, 64, now + Duration::from_secs(1), 1 << 20, FLUSH_WAIT);
        let first = if block_tokens == 16 { "copy l0 0..48 e0" } else { "" };
        let rest = if block_tokens == 16 { "copy l0 48..64 e0" } else { "copy l0 0..64 e0" };
        let summed = |group, sums: usize| {
            let run = SumRun { group, layer: 0, first_granule: 0, sums: vec![0; sums] };
            SourceInput::Summed { epoch: 0, run }
        };
        let ends = if block_tokens == 16 { 3 } else { 2 };
        let steps = [
            (granted(), ""),
            // Chunks before leave states that nobody gets, even one that ends in the last granule.
            (layer(0, 16), ""),
            (layer(0, 63), ""),
            (layer(1, 63), first),
            (layer(0, 64), "copy l0 48..64 e0"),
            (layer(1, 64), rest),
            (SourceInput::Finish, "flush e0"),
        ];
        let mut said = |input| source.handle(now, input).iter().map(describe).collect::<Vec<_>>().join(", ");
        for (input, expected) in steps {
            let what = format!("{input:?} in blocks of {block_tokens}");
            assert_eq!(said(input), expected, "{what}");
        }
        (0..ends).for_each(|_| assert_eq!(said(summed(0, 1)), ""));
        // Four sums of the full layer, and two of the state.
        assert_eq!(said(flushed(0)), format!("checksums {ends}, commit 6 {}", 64 * 16 + 48));
    }
}

#[test]
fn whole_blocks_go_early_and_the_rest_at_the_end() {
    check(
        20,
        vec![
            (granted(), ""),
            (layer(0, 10), ""),
            (layer(0, 18), "copy l0 0..16 e0"),
            (layer(1, 18), "copy l1 0..16 e0, flush e0"),
            (summed(0, 0), ""),
            (flushed(0), ""),
            (summed(0, 1), "checksums 2"),
            (layer(0, 20), "copy l0 16..20 e1"),
            (layer(1, 20), "copy l1 16..20 e1"),
            (SourceInput::Finish, "flush e1"),
            (summed(1, 0), ""),
            (summed(1, 1), ""),
            (flushed(1), "checksums 2, commit 8 1280"),
            (SourceInput::Acked, "cancel, release, adopted"),
            (abort(), ""),
        ],
    );
}

#[test]
fn a_late_grant_finds_everything() {
    check(
        16,
        vec![
            (layer(0, 16), ""),
            (layer(1, 16), ""),
            (SourceInput::Finish, ""),
            (granted(), "copy l0 0..16 e0, copy l1 0..16 e0, flush e0"),
            (flushed(0), ""),
            (summed(0, 0), ""),
            (summed(0, 1), "checksums 2, commit 4 1024"),
        ],
    );
}

#[test]
fn what_the_sink_has_already_is_neither_copied_nor_summed() {
    // Computed before the grant, and after it.
    check(
        52,
        vec![
            (layer(0, 40), ""),
            (granted_from(16), "copy l0 16..32 e0"),
            (layer(1, 16), ""),
            (layer(1, 31), ""),
            (layer(1, 52), "copy l1 16..52 e0, flush e0"),
            (layer(0, 52), "copy l0 32..52 e1"),
            (SourceInput::Finish, "flush e1"),
            (summed(0, 0), ""),
            (summed(0, 1), ""),
            (flushed(0), "checksums 2"),
            (summed(1, 0), ""),
            // Two layers of 36 tokens: three granules of two planes each, 32 bytes a token.
            (flushed(1), "checksums 1, commit 12 2304"),
        ],
    );
}

#[test]
fn a_part_may_begin_in_the_middle_of_a_block() {
    let layout = KvLayout::llama(48, 1, 1, 8, Dtype::Bf16).unwrap();
    let now = Instant::now();
    let mut source = Source::new(layout, 100, now + Duration::from_secs(1), 1 << 20, FLUSH_WAIT);
    let mut handle = |input| source.handle(now, input).iter().map(describe).collect::<Vec<_>>().join(", ");
    assert_eq!(handle(granted_from(64)), "");
    assert_eq!(handle(layer(0, 60)), "", "the first block that moves has nothing that does");
    assert_eq!(handle(layer(0, 99)), "copy l0 64..96 e0");
    assert_eq!(handle(layer(0, 100)), "copy l0 96..100 e0");
    assert_eq!(handle(SourceInput::Finish), "flush e0");
    assert_eq!(source.tokens_moved(), 36);
}

#[test]
fn a_grant_of_no_part_is_never_written() {
    for from in [1, 15, 17, 48, 64, u32::MAX] {
        let aborted = "aborted true, cancel, release, failed protocol";
        check(48, vec![(layer(0, 48), ""), (granted_from(from), aborted)]);
    }
}

#[test]
fn the_commit_waits_for_fences_behind_finish() {
    check(
        4,
        vec![
            (granted(), ""),
            (layer(0, 4), "copy l0 0..4 e0"),
            (SourceInput::Finish, ""),
            (layer(1, 9), "copy l1 0..4 e0, flush e0"),
            (summed(0, 1), ""),
            (summed(0, 0), ""),
            (flushed(0), "checksums 2, commit 4 256"),
        ],
    );
}

#[test]
fn every_state_ends_without_leaving_a_hold() {
    let writing = || vec![(granted(), ""), (layer(0, 16), "copy l0 0..16 e0")];
    let committed = || {
        vec![
            (granted(), ""),
            (layer(0, 1), "copy l0 0..1 e0"),
            (layer(1, 1), "copy l1 0..1 e0"),
            (SourceInput::Finish, "flush e0"),
            (summed(0, 0), ""),
            (summed(0, 1), ""),
            (flushed(0), "checksums 2, commit 4 64"),
        ]
    };
    let lost = || SourceInput::ConnectionLost("x".into());
    let refused =
        || SourceInput::Refused(HandoffFailure::Refused { reason: RefuseReason::NoRoom, detail: String::new() });
    let cases: Vec<(u32, Steps, Steps)> = vec![
        (16, vec![], vec![(abort(), "aborted true, cancel, release, failed aborted")]),
        (16, vec![], vec![(refused(), "cancel, release, failed refused")]),
        (16, vec![], vec![(lost(), "cancel, release, failed peer_lost")]),
        (
            16,
            vec![],
            vec![(SourceInput::AbortedBySink("x".into()), "aborted true, cancel, release, failed aborted_by_peer")],
        ),
        (
            16,
            writing(),
            vec![
                (abort(), "cancel, flush abort"),
                (layer(1, 16), ""),
                (flushed(0), ""),
                (flushed(ABORT_EPOCH), "aborted true, cancel, release, failed aborted"),
            ],
        ),
        (
            16,
            writing(),
            vec![
                (SourceInput::DeviceFailed, "cancel, flush abort"),
                (
                    SourceInput::Flushed { epoch: ABORT_EPOCH, ok: false },
                    "aborted false, cancel, release, failed device",
                ),
            ],
        ),
        (16, writing(), vec![(abort(), "cancel, flush abort"), (lost(), "cancel, release, failed aborted")]),
        (16, writing(), vec![(lost(), "cancel, release, failed peer_lost")]),
        (16, writing(), vec![(SourceInput::Acked, "cancel, flush abort")]),
        (16, writing(), vec![(granted(), "cancel, flush abort")]),
        // A refusal after a grant must not release blocks that writes may still read.
        (
            16,
            writing(),
            vec![
                (refused(), "cancel, flush abort"),
                (refused(), ""),
                (flushed(ABORT_EPOCH), "aborted true, cancel, release, failed refused"),
            ],
        ),
        (16, writing(), vec![(abort(), "cancel, flush abort"), (refused(), "")]),
        (1, committed(), vec![(refused(), "aborted true, cancel, release, failed refused")]),
        (1, committed(), vec![(abort(), "aborted true, cancel, release, failed aborted")]),
        (
            1,
            committed(),
            vec![(
                SourceInput::Nacked(HandoffFailure::Corrupt("x".into())),
                "aborted true, cancel, release, failed corrupt",
            )],
        ),
        (1, committed(), vec![(lost(), "cancel, release, failed peer_lost")]),
    ];
    for (tokens, mut steps, end) in cases {
        steps.extend(end);
        check(tokens, steps);
    }
}

#[test]
fn the_deadline_names_what_was_going_on() {
    let (mut source, now) = source(16);
    assert!(source.handle(now, SourceInput::Tick).is_empty());
    let actions = source.handle(now + Duration::from_secs(1), SourceInput::Tick);
    let failure = HandoffFailure::Deadline("waiting for a grant");
    assert_eq!(actions.last(), Some(&SourceAction::Done(Err(failure))));
}

#[test]
fn a_flush_that_does_not_end_is_ended_with_its_connection() {
    let (mut source, begin) = source(16);
    let mut handle = |at_ms: u64, input| {
        let actions = source.handle(begin + Duration::from_millis(at_ms), input);
        actions.iter().map(describe).collect::<Vec<_>>().join(", ")
    };
    handle(0, granted());
    handle(0, layer(0, 16));
    assert_eq!(handle(50, abort()), "cancel, flush abort");
    assert_eq!(handle(149, SourceInput::Tick), "");
    // Longer than the flush limit, whatever other inputs come meanwhile.
    assert_eq!(handle(149, abort()), "");
    assert_eq!(handle(150, SourceInput::Tick), "disconnect");
    assert_eq!(handle(151, SourceInput::ConnectionLost("x".into())), "cancel, release, failed aborted");
    assert_eq!(handle(9_999, SourceInput::Tick), "");
}

#[test]
fn a_layer_that_does_not_exist_is_refused() {
    check(16, vec![(layer(2, 16), "aborted true, cancel, release, failed protocol")]);
}

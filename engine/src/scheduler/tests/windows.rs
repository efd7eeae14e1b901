//! Groups of blocks that differ: a full one, and one with a window. Blocks hold 4 tokens.

use super::*;
use baton_kv_cache::PoolGroup;
use baton_types::GroupKind;

/// A window of 8 tokens beside a full group. A chunk of 8 and the 7 tokens before it touch at most 5 blocks.
fn world(full: u32, window: u32) -> World {
    let group = |kind, blocks| PoolGroup { kind, blocks };
    let groups = vec![group(GroupKind::Full, full), group(GroupKind::Window(8), window)];
    let mut w = World::new(full, config());
    w.pool = SharedPool::try_new(PoolShape { block_tokens: 4, groups }).unwrap();
    w.scheduler = Scheduler::new(config(), w.pool.clone());
    w
}

/// Indices of a sequence's blocks in the group with the window.
fn window(w: &World, key: SequenceKey) -> std::ops::Range<usize> {
    w.scheduler.lease(key).unwrap().tables().0[1].indices()
}

#[test]
fn a_long_prompt_passes_through_a_window_that_never_holds_it() {
    let mut w = world(32, 6);
    let a = w.prompt(100);
    w.step();
    assert_eq!((window(&w, a), w.pool.counts_of(0).referenced), (0..5, 25));
    while w.scheduler.computed(a) < 100 {
        w.step();
    }
    // The last chunk began at 96, and attended to 89 and later.
    assert_eq!(window(&w, a), 22..25);
    w.step();
    assert_eq!((window(&w, a), w.pool.counts_of(1).free), (23..26, 3));
}

#[test]
fn each_group_limits_admission() {
    // `a` has two blocks of the window by then; `b` needs five, and the watermark.
    for (blocks, starts) in [(8, true), (7, false)] {
        let mut w = world(64, blocks);
        let a = w.prompt(4);
        w.step();
        w.prompt(40);
        assert_eq!(w.step().contains("start b"), starts, "{blocks} blocks");
        w.scheduler.remove(a);
        assert_ne!(w.step().contains("start b"), starts, "once `a` is gone");
    }
}

#[test]
fn a_decode_that_lacks_a_window_block_takes_it_from_the_last() {
    let mut w = world(64, 4);
    let a = w.prompt(4);
    w.prompt(4);
    w.step();
    let lines: Vec<String> = (0..12).map(|_| w.step()).collect();
    assert!(lines.iter().any(|line| line.contains("preempt b")), "{lines:?}");
    // Position 16 attends to 9 and later.
    assert!(w.scheduler.computed(a) > 12 && window(&w, a).len() <= 3, "{:?}", window(&w, a));
}

#[test]
fn a_quarantine_of_one_group_keeps_out_who_needs_that_group() {
    let mut w = world(64, 6);
    let quarantined = w.pool.try_lease(&[0, 3]).unwrap().quarantine(7);
    w.prompt(100); // Five blocks of six.
    w.prompt(4);
    w.check(
        1,
        expect![[r#"
        start b b:0+4*
    "#]],
    );
    quarantined.release();
    assert!(w.step().contains("start a"), "once the peer is fenced");
}

#[test]
fn a_reservation_waits_for_what_it_holds_of_each_group() {
    let mut w = world(64, 9);
    let turn = w.turn(0, 100);
    // Position 100 attends to 93 and later: two blocks of the window, and the watermark. A prompt needs five.
    w.scheduler.keep_for(Some(Awaited { turn, share: w.share, tokens: 100 }));
    w.prompt(24);
    assert!(w.step().contains("start b"), "nine are enough for both");
    let turn = w.turn(1, 100);
    w.scheduler.keep_for(Some(Awaited { turn, share: w.share, tokens: 100 }));
    w.prompt(24);
    assert!(!w.step().contains("start d"), "four are not");
}

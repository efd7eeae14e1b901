//! Groups of states beside full ones. Blocks have 16 tokens: each symbol of a prompt is a block.

use super::windows::{cached, held, pool, reserve};
use super::{TTL, hashes};
use crate::{Fill, Keep, Lease, SharedPool, StateBefore};
use baton_types::GroupKind::{Full, State};
use std::ops::Range;
use std::time::Instant;

const COMPUTED: Fill = Fill::Computed { chunk: 16 };
const RECEIVED: Fill = Fill::Received { peer_block_tokens: None };

/// Computes positions of a prompt, whose first `prompt` tokens were given, and caches them.
fn compute(lease: &mut Lease, symbols: &[u8], positions: Range<usize>, prompt: usize) {
    assert!(lease.hold(positions.clone(), StateBefore::Replaced));
    lease.settle(positions.end, prompt);
    lease.store(&hashes(symbols), positions.end, Keep::idle(TTL), Instant::now());
    lease.let_go_of_spares();
}

/// A prompt that was computed in these steps, and left.
fn after(pool: &SharedPool, symbols: &[u8], ends: &[usize]) {
    let mut lease = reserve(pool, symbols, COMPUTED).unwrap();
    let mut from = lease.cached_blocks() * 16;
    for end in ends {
        compute(&mut lease, symbols, from..*end, usize::MAX);
        from = *end;
    }
}

#[test]
fn a_hit_ends_where_a_step_ended_behind_whole_blocks() {
    let pool = pool(&[(Full, 16), (State, 8)]);
    after(&pool, b"abcdefgh", &[32, 60, 96, 100]);
    assert_eq!(
        [&b"ab"[..], b"abc", b"abcd", b"abcdef", b"abcdefgh"].map(|symbols| cached(&pool, symbols)),
        [2, 2, 2, 6, 6]
    );
    let lease = reserve(&pool, b"abcdexyz", COMPUTED).unwrap();
    assert_eq!((lease.cached_blocks(), lease.known_blocks()), (2, 5), "others went on from the fifth in another way");
    // The state to go on from; two blocks are for those behind the next steps.
    assert_eq!((held(&lease), pool.counts_of(1).referenced), (vec![(0, 8), (1, 2)], 3));
}

#[test]
fn a_state_is_replaced_within_a_block_and_kept_behind_it() {
    let pool = pool(&[(Full, 16), (State, 8)]);
    let mut lease = reserve(&pool, b"abcdefgh", COMPUTED).unwrap();
    let state = |lease: &Lease| lease.tables().0[1].clone();
    let first = state(&lease);
    assert_eq!((first.first, first.blocks.len()), (0, 1), "nothing is before the first position");
    compute(&mut lease, b"abcdefgh", 0..40, 128);
    assert_eq!((state(&lease).first, &state(&lease).blocks), (2, &first.blocks));
    compute(&mut lease, b"abcdefgh", 40..48, 128);
    assert_eq!((state(&lease).first, &state(&lease).blocks), (2, &first.blocks));
    assert!(lease.hold(48..100, StateBefore::Replaced));
    assert_eq!((state(&lease).first, state(&lease).blocks.len(), lease.holds_state_before()), (2, 2, true));
    lease.settle(100, 128);
    assert_eq!((state(&lease).first, lease.holds_state_before()), (6, false));
    assert_ne!(state(&lease).blocks, first.blocks);
    assert_eq!((cached(&pool, b"abcdefgh"), pool.counts_of(1).cached), (3, 1));
}

#[test]
fn a_step_that_is_launched_ahead_keeps_what_it_reads() {
    let pool = pool(&[(Full, 16), (State, 8)]);
    let mut lease = reserve(&pool, b"abcd", COMPUTED).unwrap();
    compute(&mut lease, b"abcd", 0..31, 31);
    // One step computes position 31 in place. The next, which is launched ahead of its end, begins behind whole blocks.
    assert!(lease.hold(31..32, StateBefore::Replaced) && !lease.holds_state_before());
    assert!(lease.hold(31..33, StateBefore::Replaced) && lease.holds_state_before());
    let tables = lease.tables().0[1].clone();
    lease.settle(32, 31);
    assert_eq!(lease.tables().0[1], tables, "the second step still reads the first state");
    lease.store(&hashes(b"abcd"), 32, Keep::idle(TTL), Instant::now());
    lease.settle(33, 31);
    assert_eq!((held(&lease)[1], cached(&pool, b"abcd")), ((2, 3), 2));
}

#[test]
fn what_is_undone_leaves_the_state_before() {
    let pool = pool(&[(Full, 16), (State, 4)]);
    let mut lease = reserve(&pool, b"abcd", COMPUTED).unwrap();
    compute(&mut lease, b"abcd", 0..35, 35);
    let before = lease.tables().0[1].clone();
    for end in [36, 40, 50] {
        assert_eq!(lease.missing(35..end, StateBefore::Kept)[1], 0, "it has a block for the next state");
        assert!(lease.hold(35..end, StateBefore::Kept) && lease.holds_state_before());
        lease.undo();
        assert_eq!((&lease.tables().0[1], pool.counts_of(1).free), (&before, 2));
    }
    // Taken, the state behind them stays, also within a block.
    assert!(lease.hold(35..38, StateBefore::Kept));
    lease.settle(38, 35);
    assert_eq!((held(&lease)[1], pool.counts_of(1).free), ((2, 3), 2));
    assert_ne!(lease.tables().0[1].blocks, before.blocks);
    lease.undo();
    assert_eq!(held(&lease)[1], (2, 3), "nothing is left to undo");
}

#[test]
fn a_peer_brings_the_state_of_what_it_fills() {
    let pool = pool(&[(Full, 24), (State, 6)]);
    after(&pool, b"abcdef", &[96]);
    // Of the four blocks no state is cached; the peer's own will do.
    let lease = reserve(&pool, b"abcdxy", RECEIVED).unwrap();
    assert_eq!((lease.cached_blocks(), held(&lease)), (4, vec![(0, 6), (5, 6)]));
    assert_eq!((pool.shape().blocks_received(96), pool.counts_of(1).referenced), (vec![6, 2], 2));
    // Where all is cached, nothing is fresh.
    let lease = reserve(&pool, b"abcdef", RECEIVED).unwrap();
    assert_eq!((lease.cached_blocks(), held(&lease)), (6, vec![(0, 6), (5, 6)]));
    assert_eq!(pool.counts_of(1).referenced, 3);
    // Without a state behind it, the last block is filled again.
    let lease = reserve(&pool, b"abcd", RECEIVED).unwrap();
    assert_eq!((lease.cached_blocks(), held(&lease)), (3, vec![(0, 4), (3, 4)]));
}

#[test]
fn what_was_received_is_a_checkpoint_if_it_ends_with_a_block() {
    for (symbols, tokens, found) in [(b"abc", 48, 3), (b"xyz", 47, 0)] {
        let pool = pool(&[(Full, 16), (State, 4)]);
        let hashes = hashes(symbols);
        let wanted = crate::Reserve {
            hashes: &hashes,
            reuse_tokens_max: tokens - 1,
            tokens,
            fill: RECEIVED,
            keep_free: &[],
            now: Instant::now(),
        };
        let mut lease = pool.try_reserve(wanted).unwrap();
        lease.store(&hashes, tokens, Keep::idle(TTL), Instant::now());
        assert_eq!(cached(&pool, symbols), found);
        // It goes on from there.
        assert!(lease.hold(tokens..tokens + 1, StateBefore::Replaced));
        assert_eq!(lease.holds_state_before(), tokens == 48);
    }
}

/// An answer leaves a checkpoint behind each block. The next one takes its place, so they do not evict those of prompts.
#[test]
fn checkpoints_of_an_answer_make_room_first() {
    let pool = pool(&[(Full, 40), (State, 5)]);
    after(&pool, b"prompt", &[96]);
    let mut lease = reserve(&pool, b"abcdefghijklmnop", COMPUTED).unwrap();
    compute(&mut lease, b"abcdefghijklmnop", 0..32, 32);
    for block in 2..16 {
        compute(&mut lease, b"abcdefghijklmnop", block * 16..(block + 1) * 16, 32);
    }
    assert_eq!(cached(&pool, b"prompt"), 6);
    assert_eq!([&b"ab"[..], b"abcdefghijklmno", b"abcdefghijklmnop"].map(|of| cached(&pool, of)), [2, 15, 16]);
}

#[test]
fn states_are_not_forked() {
    let pool = pool(&[(Full, 8), (State, 3)]);
    let mut lease = reserve(&pool, b"abcd", COMPUTED).unwrap();
    compute(&mut lease, b"abcd", 0..64, 64);
    assert!(lease.fork(63, 64, &[]).is_none(), "the state is that of another position");
}

#[test]
fn states_alone_are_not_cached() {
    let pool = pool(&[(State, 4)]);
    after(&pool, b"abcd", &[32, 64]);
    assert_eq!((cached(&pool, b"abcd"), pool.counts().free), (0, 4));
}

/// A sequence never waits for another block while it computes: observed prefills could wait for each other.
#[test]
fn a_sequence_goes_on_with_the_states_that_it_has() {
    let pool = pool(&[(Full, 32), (State, 4)]);
    let mut leases = [b"abcdefgh", b"ijklmnop"].map(|symbols| (reserve(&pool, symbols, COMPUTED).unwrap(), symbols));
    assert_eq!(pool.available()[1], 0);
    for positions in [0..16, 16..32, 32..40, 40..90, 90..128] {
        for (lease, symbols) in &mut leases {
            compute(lease, *symbols, positions.clone(), 128);
        }
    }
    assert_eq!([b"abcdefgh", b"ijklmnop"].map(|symbols| cached(&pool, symbols)), [8, 8]);
}

/// A state that another sequence goes on from is not available for the next one of the sequence that made it.
#[test]
fn without_a_block_for_the_next_state_it_is_changed_in_place_and_not_cached() {
    let pool = pool(&[(Full, 32), (State, 5)]);
    let mut maker = reserve(&pool, b"abcdefgh", COMPUTED).unwrap();
    compute(&mut maker, b"abcdefgh", 0..32, 128);
    let other = reserve(&pool, b"abxy", COMPUTED).unwrap();
    assert_eq!((other.cached_blocks(), pool.available()[1]), (2, 1));
    let last = pool.try_lease(&[0, 1]).unwrap();
    compute(&mut maker, b"abcdefgh", 32..64, 128);
    assert_eq!(cached(&pool, b"abcdefgh"), 2, "the state behind 64 positions is the only one that it has");
    let state = maker.tables().0[1].blocks.clone();
    compute(&mut maker, b"abcdefgh", 64..70, 128);
    assert_eq!((&maker.tables().0[1].blocks, maker.missing(70..80, StateBefore::Kept)[1]), (&state, 1));
    drop(last);
    assert!(maker.hold(70..96, StateBefore::Kept), "now there is one to propose with");
    drop(other);
}

//! Sequences with common prefixes. Blocks hold 16 tokens here.

use super::*;
use baton_kv_cache::{CacheConfig, Keep, Pin, PrefixHash};

/// A world with a cache, and its steps with this many rows.
fn world(blocks: u32, chunk_tokens_max: usize) -> World {
    world_with_pins(blocks, chunk_tokens_max, 0)
}

fn world_with_pins(blocks: u32, chunk_tokens_max: usize, pinned_max: usize) -> World {
    let config = SchedulerConfig { block_tokens: 16, chunk_tokens_max, ..config() };
    let cache = CacheConfig { pinned_max, pinned_of_one_max: pinned_max, changes_max: 100 };
    let mut w = World::new(blocks, config);
    w.pool = SharedPool::with_cache(PoolShape::full(1, blocks, 16), cache).unwrap();
    w.scheduler = Scheduler::new(config, w.pool.clone());
    w
}

/// A sequence of `len` tokens whose groups of 16 have these names.
fn named(w: &mut World, priority: i32, names: &str, len: usize) -> SequenceKey {
    let chain = |n: usize| {
        names.bytes().take(n + 1).fold([0; 16], |name: [u8; 16], b| {
            let mut next = name;
            next.rotate_left(1);
            next[0] = b;
            next
        })
    };
    // Two prompts are equal if these and their lengths are.
    let mut whole = chain(names.len());
    whole[15] = len as u8;
    let hashes = (0..names.len()).map(|n| PrefixHash(chain(n))).collect();
    let prefix = Some(Prefix { hashes, whole: PrefixHash(whole), keep: Keep::idle(SECOND) });
    w.add(priority, Arrival { prefix, ..w.arrival(len) })
}

#[test]
fn one_waits_for_what_another_is_computing_and_nobody_for_it() {
    let mut w = world(16, 16);
    named(&mut w, 0, "xyz", 50);
    named(&mut w, 0, "xyq", 50);
    named(&mut w, 0, "pqr", 50);
    w.check(
        6,
        expect![[r#"
            start a a:0+16
            a:16+16
            a:32+16
            start b a:48+2* b:32+14
            start c a:50+1* b:46+4* c:0+11
            a:51+1* b:50+1* c:11+14
        "#]],
    );
}

#[test]
fn those_with_the_same_prompt_part_where_it_ends() {
    let mut w = world(24, 64);
    named(&mut w, 0, "xyz", 50);
    named(&mut w, 0, "xyz", 50);
    named(&mut w, 0, "xyz", 50);
    // One of the same length with other tokens; and the same with a token more.
    named(&mut w, 0, "xyq", 50);
    named(&mut w, 0, "xyz", 51);
    w.check(
        4,
        expect![[r#"
        start a a:0+50* copy 1 copy 1
        start bcd a:50+1* b:49+1* c:49+1* d:32+18*
        a:51+1* b:50+1* c:50+1* d:50+1*
        a:52+1* b:51+1* c:51+1* d:51+1*
    "#]],
    );
    // So few tokens are not worth waiting for.
    let mut w = world(24, 64);
    named(&mut w, 0, "", 8);
    named(&mut w, 0, "", 8);
    assert_eq!(w.step(), "start ab a:0+8* b:0+8*");
}

#[test]
fn nobody_overtakes_with_the_blocks_of_another() {
    // The first holds 4 of 10 blocks, the second needs 7 and waits for them, and the third has the prompt of the first.
    let mut w = world(10, 64);
    named(&mut w, 0, "xyz", 50);
    named(&mut w, 0, "pqrstu", 100);
    w.check(
        1,
        expect![[r#"
        start a a:0+50* starved
    "#]],
    );
    let third = named(&mut w, 0, "xyz", 50);
    assert_eq!(w.scheduler.fork_for_new(third), None);
    w.check(
        2,
        expect![[r#"
        a:50+1* starved
        a:51+1* starved
    "#]],
    );
}

#[test]
fn it_waits_no_longer_than_computing_it_would_take() {
    let mut w = world(16, 16);
    // Two blocks in common: 32 tokens; the limit is twice the time that they take.
    w.scheduler.measured(64.0);
    named(&mut w, 0, "xyz", 50);
    named(&mut w, 0, "xyq", 50);
    assert_eq!(w.step(), "start a a:0+16");
    w.held.insert(('a', "prefill"));
    assert_eq!(w.step(), "start b b:16+16", "one that is held is not waited for");

    // A sequence before the other still waits for it, and then takes its rows.
    let mut w = world(16, 16);
    w.scheduler.measured(64.0);
    named(&mut w, 0, "xyz", 50);
    assert_eq!(w.step(), "start a a:0+16");
    named(&mut w, 1, "xyq", 50);
    assert_eq!(w.step(), "a:16+16", "two blocks in common, of which one is there: half a second");
    w.now += SECOND / 2;
    assert_eq!(w.step(), "start b b:32+16");
}

#[test]
fn what_is_cached_for_a_waiting_sequence_is_no_work_to_do() {
    let mut w = world(16, 64);
    let first = named(&mut w, 0, "xyz", 50);
    assert_eq!(w.scheduler.totals().waiting_tokens, 50);
    w.step();
    // Two of three blocks; then all three, the last of which holds the token that is computed for its logits.
    named(&mut w, 0, "xyq", 50);
    named(&mut w, 0, "xyz", 48);
    assert_eq!(w.scheduler.totals().waiting_tokens, 18 + 16);
    w.scheduler.remove(first);
    w.step();
    assert_eq!(w.scheduler.totals().waiting_tokens, 0, "they were admitted with these blocks, and computed");
}

#[test]
fn pins_outlive_a_step_whose_sequences_have_ended() {
    let mut w = world_with_pins(3, 64, 1);
    let until = w.now + 100 * SECOND;
    let keep = Keep { ttl: SECOND, pin: Some(Pin { owner: 1, until }) };
    let (hash, arrival) = (PrefixHash([1; 16]), w.arrival(16));
    let prefix = Some(Prefix { hashes: vec![hash], whole: hash, keep });
    let pinned = w.add(0, Arrival { prefix, ..arrival });
    w.step();
    w.scheduler.remove(pinned);
    let b = w.prompt(15);
    assert_eq!(w.launch().0, "start b b:0+15*");
    let ended = w.scheduler.remove(b);
    w.is_retiring = true;
    // One block is free, one is pinned, and one is in the step.
    w.prompt(17);
    assert_eq!((w.launch().0, w.pool.cache_counts().pinned), ("starved".into(), 1));
    drop(ended);
    w.is_retiring = false;
    assert_eq!((w.launch().0, w.pool.cache_counts().pinned), ("start c c:0+17*".into(), 1));
}

#[test]
fn blocks_that_were_exchanged_stay_until_the_step_ahead_has_read_them() {
    let mut w = world(8, 64);
    // Both generate the same tokens, so that they fill the same block at once.
    let both = [named(&mut w, 0, "", 15), named(&mut w, 0, "", 15)];
    let finish = |w: &mut World, batch: Vec<Segment>| batch.into_iter().for_each(|rows| drop(w.finish(rows)));
    let first_blocks = |w: &World| both.map(|key| w.scheduler.lease(key).unwrap().blocks().0[0][0]);
    let (line, prompts) = w.launch();
    assert_eq!(line, "start ab a:0+15* b:0+15*");
    let (line, fill) = w.launch();
    assert_eq!(line, "a:15+1* b:15+1*");
    finish(&mut w, prompts);
    both.into_iter().for_each(|key| w.scheduler.hashed(key, PrefixHash([1; 16])));
    let [stored, exchanged] = first_blocks(&w);
    assert_ne!(stored, exchanged);

    let (line, ahead) = w.launch();
    assert_eq!(line, "a:16+1* b:16+1*", "rows that read the blocks as they are now");
    finish(&mut w, fill);
    assert_eq!(first_blocks(&w), [stored; 2], "one block for both");
    let free = w.pool.counts().free;
    let rest = w.pool.try_lease(&[free]).unwrap();
    assert!(!rest.blocks().0[0].contains(&exchanged), "a block that the step ahead reads is given to another");
    assert_eq!(free, 4, "two blocks of each are referenced");
    drop(rest);

    // The next step ahead was launched after the exchange: it keeps nothing.
    let (line, next) = w.launch();
    assert_eq!(line, "a:17+1* b:17+1*");
    finish(&mut w, ahead);
    assert_eq!(w.pool.counts().free, 5, "the exchanged block is free");
    assert!(w.pool.try_lease(&[5]).unwrap().blocks().0[0].contains(&exchanged));
    finish(&mut w, next);
    assert_eq!(w.pool.counts().free, 5);
}

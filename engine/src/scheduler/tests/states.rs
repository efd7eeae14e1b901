//! A group of states beside a full one: where parts of prompts end, and which steps are planned ahead. Blocks hold 4 tokens.

use super::*;
use baton_kv_cache::{CacheConfig, Keep, PoolGroup, PrefixHash};
use baton_types::{GroupKind, TenantLabel};

fn world(states: u32, steps_max: usize) -> World {
    let group = |kind, blocks| PoolGroup { kind, blocks };
    let groups = vec![group(GroupKind::Full, 64), group(GroupKind::State, states)];
    let config = SchedulerConfig { steps_max, chunk_tokens_max: 40, block_tokens: 16, ..config() };
    let mut w = World::new(64, config);
    let cache = CacheConfig { pinned_max: 0, pinned_of_one_max: 0, changes_max: 64 };
    w.pool = SharedPool::with_cache(PoolShape { block_tokens: 16, groups }, cache).unwrap();
    w.scheduler = Scheduler::new(config, w.pool.clone());
    w
}

/// A prompt that uses the cache: each symbol is 16 tokens, and there are `rest` more.
fn prompt(w: &mut World, symbols: &[u8], rest: usize) -> SequenceKey {
    let name = |end: usize| {
        let mut hash = [0; 16];
        hash[..end].copy_from_slice(&symbols[..end]);
        PrefixHash(hash)
    };
    let whole = PrefixHash([rest as u8 | 0x80; 16]);
    let hashes = (1..=symbols.len()).map(name).collect();
    let prefix = Some(Prefix { hashes, whole, keep: Keep::idle(1000 * SECOND) });
    let arrival = w.arrival(16 * symbols.len() + rest);
    w.add(0, Arrival { prefix, ..arrival })
}

#[test]
fn parts_end_behind_whole_blocks() {
    let mut w = world(8, 1);
    let a = prompt(&mut w, b"abcde", 5);
    w.check(
        4,
        expect![[r#"
            start a a:0+32
            a:32+32
            a:64+16
            a:80+5*
        "#]],
    );
    w.scheduler.remove(a);
    // The last token is always computed; here it is the last of a block.
    prompt(&mut w, b"xyz", 0);
    w.check(
        2,
        expect![[r#"
            start b b:0+32
            b:32+16*
        "#]],
    );
    // So is that of a prompt whose rest would fit.
    let mut w = world(8, 1);
    prompt(&mut w, b"xy", 0);
    w.check(
        2,
        expect![[r#"
            start a a:0+16
            a:16+16*
        "#]],
    );
}

#[test]
fn a_part_ends_where_others_went_on_in_another_way() {
    let mut w = world(12, 1);
    let a = prompt(&mut w, b"abcde", 5);
    (0..4).for_each(|_| _ = w.step());
    w.scheduler.remove(a);
    // Behind 32 tokens there is a state, behind 48 none.
    let b = prompt(&mut w, b"abcxy", 5);
    w.check(
        3,
        expect![[r#"
            start b b:32+16
            b:48+32
            b:80+5*
        "#]],
    );
    w.scheduler.remove(b);
    prompt(&mut w, b"abcuv", 5);
    w.check(
        1,
        expect![[r#"
        start c c:48+32
    "#]],
    );
}

#[test]
fn a_prompt_that_is_not_cached_is_not_cut() {
    let mut w = world(8, 1);
    w.prompt(85);
    w.check(
        3,
        expect![[r#"
            start a a:0+40
            a:40+40
            a:80+5*
        "#]],
    );
}

#[test]
fn steps_are_planned_ahead_within_a_block() {
    let mut w = world(8, 2);
    let a = w.prompt(14);
    let (line, first) = w.launch();
    assert_eq!(line, "start a a:0+14*");
    assert_eq!(w.launch().0, "", "the state goes where the step before it ends");
    first.into_iter().for_each(|s| _ = w.finish(s));
    // Behind position 16 the state takes another block: the step there begins behind a whole one, and what follows waits for it.
    let ahead = [w.launch(), w.launch()];
    assert_eq!(ahead.each_ref().map(|(line, _)| line.as_str()), ["a:14+1*", "a:15+1*"]);
    let mut ahead = ahead.into_iter().flat_map(|(_, batch)| batch);
    ahead.next().into_iter().for_each(|s| _ = w.finish(s));
    let (line, next) = w.launch();
    assert_eq!((line.as_str(), w.scheduler.lease(a).unwrap().holds_state_before()), ("a:16+1*", true));
    ahead.for_each(|s| _ = w.finish(s));
    assert_eq!(w.launch().0, "");
    next.into_iter().for_each(|s| _ = w.finish(s));
    assert_eq!(w.launch().0, "a:17+1*");
}

#[test]
fn rows_that_another_tenant_could_not_use_end_behind_whole_blocks_too() {
    let mut w = world(8, 1);
    prompt(&mut w, b"abcde", 5);
    w.share.tenant = TenantLabel(2);
    w.prompt(63 * 16);
    w.check(
        2,
        expect![[r#"
            start a a:0+32 starved
            a:32+32 starved
        "#]],
    );
}

#[test]
fn what_was_sampled_before_a_rejected_proposal_is_computed_again_in_one_step() {
    let mut w = world(8, 1);
    let a = w.prompt(5);
    w.step();
    let mut scheduler = std::mem::replace(&mut w.scheduler, Scheduler::new(config(), w.pool.clone()));
    let mut segment = scheduler.plan(w.now, &w).batch[0];
    scheduler.propose(&mut segment, 4);
    assert_eq!((segment.rows, segment.drafts), (5, 4));
    scheduler.launched(a, segment.rows, segment.tokens_max());
    // Two proposals are sampled, and another token than the third.
    (0..3).for_each(|_| scheduler.advance(a, 1, true, Rest::Rejected, w.now));
    scheduler.rejected(a, 2, w.now);
    assert_eq!(scheduler.totals().waiting_tokens, 0, "it is no prompt");
    w.scheduler = scheduler;
    w.check(
        2,
        expect![[r#"
            a:5+4*
            a:9+1*
        "#]],
    );
}

//! How tenants divide chunks, places and blocks.

use super::*;
use baton_types::{TenantLabel, Weight};

fn tenant(name: u64, weight: u32) -> Share {
    Share { tenant: TenantLabel(name), weight: Weight::try_new(weight).unwrap() }
}

impl World {
    /// A prompt of a tenant.
    fn prompt_of(&mut self, share: Share, len: usize) -> SequenceKey {
        self.share = share;
        self.prompt(len)
    }
}

#[test]
fn a_long_prompt_leaves_others_their_rows_from_the_next_chunk_on() {
    let mut w = World::new(64, config());
    w.prompt_of(tenant(1, 1), 60);
    w.check(
        1,
        expect![[r#"
        start a a:0+8
    "#]],
    );
    w.prompt_of(tenant(2, 1), 10);
    w.check(
        4,
        expect![[r#"
            start b a:8+4 b:0+4
            a:12+4 b:4+4
            a:16+6 b:8+2*
            a:22+7 b:10+1*
        "#]],
    );
    // By weight; a tenant with less to compute leaves the rest to others.
    let mut w = World::new(64, config());
    w.prompt_of(tenant(1, 1), 60);
    w.prompt_of(tenant(2, 3), 60);
    w.prompt_of(tenant(3, 4), 3);
    w.check(
        3,
        expect![[r#"
            start abc a:0+2 b:0+3 c:0+3*
            a:2+1 b:3+6 c:3+1*
            a:3+2 b:9+5 c:4+1*
        "#]],
    );
}

#[test]
fn rows_of_a_full_batch_go_round() {
    let mut w = World::new(64, SchedulerConfig { chunk_tokens_max: 2, ..config() });
    w.prompt_of(tenant(1, 1), 1);
    w.prompt_of(tenant(1, 1), 1);
    w.check(
        1,
        expect![[r#"
            start ab a:0+1* b:0+1*
        "#]],
    );
    w.prompt_of(tenant(1, 1), 20);
    w.prompt_of(tenant(2, 1), 3);
    w.check(
        7,
        expect![[r#"
            start d a:1+1* b:1+1* d:0+1
            start c a:2+1* b:2+1* c:0+1
            a:3+1* b:3+1* d:1+1
            a:4+1* b:4+1* c:1+1
            a:5+1* b:5+1* d:2+1*
            a:6+1* b:6+1* d:3+1* c:2+1
            a:7+1* b:7+1* d:4+1* c:3+1
        "#]],
    );
}

#[test]
fn higher_priority_has_its_rows_first() {
    let mut w = World::new(64, config());
    w.prompt_of(tenant(1, 1), 60);
    w.share = tenant(2, 1);
    w.add(1, w.arrival(12));
    w.check(
        3,
        expect![[r#"
            start b b:0+8
            start a b:8+4* a:0+4
            b:12+1* a:4+7
        "#]],
    );
}

#[test]
fn a_full_batch_makes_place_for_a_tenant_below_its_share() {
    let mut w = World::new(64, config());
    for _ in 0..6 {
        w.prompt_of(tenant(1, 1), 1);
    }
    w.check(
        2,
        expect![[r#"
            start abcd a:0+1* b:0+1* c:0+1* d:0+1*
            a:1+1* b:1+1* c:1+1* d:1+1*
        "#]],
    );
    let g = w.prompt_of(tenant(2, 1), 1);
    w.prompt_of(tenant(2, 1), 1);
    w.prompt_of(tenant(2, 1), 1); // Beyond its share: two of four places.
    w.check(
        3,
        expect![[r#"
            start gh a:2+1* b:2+1* g:0+1* h:0+1*
            a:3+1* b:3+1* g:1+1* h:1+1*
            a:4+1* b:4+1* g:2+1* h:2+1*
        "#]],
    );
    w.scheduler.remove(g);
    w.check(
        2,
        expect![[r#"
            start i a:5+1* b:5+1* h:3+1* i:0+1*
            a:6+1* b:6+1* h:4+1* i:1+1*
        "#]],
    );
}

#[test]
fn a_full_pool_makes_room_for_a_tenant_below_its_share() {
    // Eight blocks besides the watermark.
    let mut w = World::new(9, SchedulerConfig { running_max: 8, chunk_tokens_max: 64, ..config() });
    for _ in 0..4 {
        w.prompt_of(tenant(1, 1), 7);
    }
    w.check(
        1,
        expect![[r#"
            start abcd a:0+7* b:0+7* c:0+7* d:0+7*
        "#]],
    );
    let e = w.prompt_of(tenant(2, 1), 8);
    w.check(
        3,
        expect![[r#"
            preempt d start e a:7+1* b:7+1* e:0+8* c:7+1*
            preempt c a:8+1* e:8+1* b:8+1*
            a:9+1* e:9+1* b:9+1* starved
        "#]],
    );
    w.scheduler.remove(e);
    w.check(
        1,
        expect![[r#"
            a:10+1* b:10+1* starved
        "#]],
    );
}

#[test]
fn who_is_within_its_share_keeps_its_blocks_until_it_grows_beyond_that() {
    let mut w = World::new(9, SchedulerConfig { running_max: 8, chunk_tokens_max: 64, ..config() });
    w.prompt_of(tenant(1, 1), 7);
    w.prompt_of(tenant(1, 1), 7);
    w.check(
        1,
        expect![[r#"
            start ab a:0+7* b:0+7*
        "#]],
    );
    w.prompt_of(tenant(2, 1), 19); // Five blocks: more than its share, but its first.
    w.prompt_of(tenant(2, 1), 3);
    w.prompt_of(tenant(1, 1), 3);
    w.check(
        2,
        expect![[r#"
            a:7+1* b:7+1* starved
            preempt b start c a:8+1* c:0+19*
        "#]],
    );
}

#[test]
fn a_large_one_is_not_starved_by_small_ones_of_others() {
    let mut w = World::new(9, SchedulerConfig { running_max: 8, chunk_tokens_max: 64, ..config() });
    for _ in 0..3 {
        w.prompt_of(tenant(1, 1), 7);
    }
    w.step();
    let large = w.prompt_of(tenant(2, 1), 28);
    for n in 0..40 {
        w.prompt_of(tenant(1, 1), 3);
        w.step();
        if w.scheduler.lease(large).is_some() {
            return assert!(n > 0, "two are within their share");
        }
        // Each ends after some tokens.
        let ended = w.names.keys().copied().find(|key| *key != large && w.scheduler.computed(*key) > 8);
        ended.and_then(|key| w.scheduler.remove(key));
    }
    panic!("it waits for ever");
}

#[test]
fn a_reservation_below_its_share_takes_blocks_from_those_beyond_theirs() {
    let mut w = World::new(9, SchedulerConfig { running_max: 8, chunk_tokens_max: 64, ..config() });
    for _ in 0..4 {
        w.prompt_of(tenant(1, 1), 7);
    }
    w.step();
    w.share = tenant(2, 1);
    let turn = w.turn(0, 8);
    w.scheduler.keep_for(Some(Awaited { turn, share: w.share, tokens: 8 }));
    assert_eq!(w.step(), "preempt d a:7+1* b:7+1* c:7+1*");
    assert!(w.pool.free_min() >= 3, "two, and the watermark");
    // A sequence of the tenant that has most takes nothing from its own tenant.
    w.share = tenant(1, 1);
    let turn = w.turn(0, 8);
    w.scheduler.keep_for(Some(Awaited { turn, share: w.share, tokens: 24 }));
    assert_eq!(w.step(), "a:8+1* b:8+1* c:8+1* starved", "the one that was preempted lacks blocks");
}

#[test]
fn a_reservation_takes_blocks_for_the_watermark_too() {
    // Two of ten blocks are free: as many as the reservation needs, and one less than it is granted with.
    let mut w = World::new(10, SchedulerConfig { running_max: 8, chunk_tokens_max: 64, ..config() });
    for _ in 0..4 {
        w.prompt_of(tenant(1, 1), 7);
    }
    w.step();
    assert_eq!(w.pool.free_min(), 2);
    w.share = tenant(2, 1);
    let turn = w.turn(0, 8);
    w.scheduler.keep_for(Some(Awaited { turn, share: w.share, tokens: 8 }));
    assert_eq!(w.step(), "preempt d a:7+1* b:7+1* c:7+1*");
    assert_eq!(w.pool.free_min(), 4);
}

#[test]
fn one_tenant_has_all_in_the_order_of_arrivals() {
    let mut w = World::new(4, SchedulerConfig { running_max: 2, watermark_blocks: 0, ..config() });
    w.share = tenant(7, 9);
    for _ in 0..3 {
        w.prompt(4);
    }
    w.check(
        2,
        expect![[r#"
            start ab a:0+4* b:0+4*
            a:4+1* b:4+1*
        "#]],
    );
    assert!(w.scheduler.entries.values().all(|entry| !entry.is_beyond));
}

#[test]
fn rows_whose_logits_come_back_are_shared_too() {
    let mut w = World::new(64, SchedulerConfig { scored_rows_max: 4, ..config() });
    w.share = tenant(1, 1);
    w.add(0, Arrival { scored: 0..29, ..w.arrival(30) });
    w.check(
        2,
        expect![[r#"
            start a a:0+4
            a:4+4
        "#]],
    );
    w.share = tenant(2, 1);
    w.add(0, Arrival { scored: 0..5, ..w.arrival(6) });
    for rows in [["a:8+2", "b:0+2"], ["a:10+2", "b:2+2"], ["a:12+", "b:4+2*"]] {
        let line = w.step();
        assert!(rows.iter().all(|rows| line.contains(rows)), "{line}");
    }
}

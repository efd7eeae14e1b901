//! Which sequences get blocks and places when there are too few.

use super::*;

#[test]
fn higher_priority_goes_first_and_nobody_overtakes_who_lacks_blocks() {
    let mut w = World::new(6, config());
    let a = w.prompt(8);
    w.check(
        1,
        expect![[r#"
        start a a:0+8*
    "#]],
    );
    w.prompt(16); // Four blocks and the watermark: not with `a` there.
    w.prompt(4); // Would fit, but comes later.
    let d = w.add(1, w.arrival(4)); // Comes first.
    w.check(
        2,
        expect![[r#"
        start d d:0+4* a:8+1* starved
        d:4+1* a:9+1* starved
    "#]],
    );
    w.scheduler.remove(a);
    w.scheduler.remove(d);
    w.check(
        2,
        expect![[r#"
        start b b:0+8
        b:8+8*
    "#]],
    );
}

#[test]
fn the_last_one_is_preempted_and_recomputed_whole() {
    let mut w = World::new(5, SchedulerConfig { watermark_blocks: 0, ..config() });
    let a = w.prompt(7);
    w.prompt(7);
    w.check(
        8,
        expect![[r#"
        start ab a:0+7* b:0+1
        a:7+1* b:1+6*
        a:8+1* b:7+1*
        a:9+1* starved
        a:10+1* starved
        a:11+1* starved
        preempt b a:12+1*
        a:13+1* starved
    "#]],
    );
    w.scheduler.remove(a);
    w.check(
        4,
        expect![[r#"
        b:0+8
        b:8+1*
        b:9+1*
        b:10+1*
    "#]],
    );
}

#[test]
fn lowest_priority_then_youngest_is_preempted_first() {
    let mut w = World::new(4, SchedulerConfig { watermark_blocks: 0, ..config() });
    w.prompt(4);
    w.add(-1, w.arrival(3));
    w.prompt(3);
    w.prompt(3);
    w.check(
        3,
        expect![[r#"
        start acd a:0+4* c:0+3* d:0+1
        a:4+1* c:3+1* d:1+2* starved
        preempt d a:5+1* c:4+1*
    "#]],
    );
}

#[test]
fn nobody_is_preempted_for_blocks_that_others_hold_too() {
    let mut w = World::new(3, SchedulerConfig { watermark_blocks: 0, ..config() });
    w.prompt(8);
    let lease = w.pool.try_lease(&[1]).unwrap();
    let outside = lease.fork(4, 4, &[]).unwrap().0;
    w.add(0, Arrival { computed: 3, lease: Some(lease), ..w.arrival(4) });
    w.check(
        3,
        expect![[r#"
        start ab a:0+7 b:3+1*
        a:7+1* starved
        starved
    "#]],
    );
    drop(outside);
    w.check(
        2,
        expect![[r#"
        preempt b a:8+1*
        a:9+1* starved
    "#]],
    );
}

#[test]
fn an_observed_prefill_is_never_preempted() {
    let mut w = World::new(5, SchedulerConfig { watermark_blocks: 0, ..config() });
    w.prompt(4);
    let b = w.add(0, Arrival { pinned: true, ..w.arrival(16) });
    w.check(
        3,
        expect![[r#"
        start ab a:0+4* b:0+4
        b:4+7 starved
        b:11+5* starved
    "#]],
    );
    assert!(w.scheduler.remove(b).is_some());
    w.check(
        1,
        expect![[r#"
        a:4+1*
    "#]],
    );
}

#[test]
fn a_first_one_without_blocks_waits_for_those_held_outside() {
    let mut w = World::new(2, SchedulerConfig { watermark_blocks: 0, ..config() });
    let outside = w.pool.try_lease(&[1]);
    w.prompt(4);
    w.check(
        2,
        expect![[r#"
        start a a:0+4*
        starved
    "#]],
    );
    drop(outside);
    w.check(
        1,
        expect![[r#"
        a:4+1*
    "#]],
    );
}

#[test]
fn one_that_a_quarantine_keeps_out_holds_nobody_back() {
    let mut w = World::new(5, SchedulerConfig { watermark_blocks: 0, ..config() });
    let quarantined = w.pool.try_lease(&[2]).unwrap().quarantine(7);
    w.prompt(16);
    w.prompt(4);
    w.check(
        2,
        expect![[r#"
        start b b:0+4*
        b:4+1*
    "#]],
    );
    quarantined.release();
    w.check(
        2,
        expect![[r#"
        preempt b start a a:0+7
        a:7+8
    "#]],
    );
}

#[test]
fn one_that_a_quarantine_stops_in_mid_answer_holds_nobody_back() {
    let mut w = World::new(5, SchedulerConfig { watermark_blocks: 0, ..config() });
    w.prompt(8);
    w.check(
        2,
        expect![[r#"
        start a a:0+8*
        a:8+1*
    "#]],
    );
    let quarantined = w.pool.try_lease(&[2]).unwrap().quarantine(7);
    w.prompt(4);
    w.check(
        8,
        expect![[r#"
        a:9+1* starved
        a:10+1* starved
        a:11+1* starved
        preempt a start b b:0+4*
        b:4+1*
        b:5+1*
        b:6+1*
        b:7+1*
    "#]],
    );
    quarantined.release();
    w.check(
        3,
        expect![[r#"
        preempt b a:0+7
        a:7+6* starved
        a:13+1* starved
    "#]],
    );
}

#[test]
fn a_late_adopted_one_makes_way_for_an_older_one() {
    let mut w = World::new(4, SchedulerConfig { watermark_blocks: 0, ..config() });
    w.held.insert(('a', "queue"));
    w.prompt(12);
    w.adopted(9);
    w.check(
        2,
        expect![[r#"
        start b b:8+1*
        b:9+1*
    "#]],
    );
    w.held.clear();
    w.check(
        4,
        expect![[r#"
        preempt b start a a:0+7
        a:7+5* starved
        a:12+1* starved
        a:13+1* starved
    "#]],
    );
}

#[test]
fn in_a_full_batch_an_earlier_one_takes_the_place_of_the_last() {
    let mut w = World::new(8, SchedulerConfig { running_max: 2, ..config() });
    w.add(-1, w.arrival(4));
    w.check(
        2,
        expect![[r#"
        start a a:0+4*
        a:4+1*
    "#]],
    );
    let b = w.adopted(6);
    w.adopted(6);
    w.check(
        1,
        expect![[r#"
        start bc b:5+1* c:5+1*
    "#]],
    );
    w.held.insert(('c', "decode")); // Held: it keeps its place.
    w.check(
        1,
        expect![[r#"
        b:6+1*
    "#]],
    );
    w.scheduler.remove(b);
    w.check(
        1,
        expect![[r#"
        a:5+1*
    "#]],
    ); // It kept its blocks: nothing is computed again.
}

#[test]
fn the_watermark_holds_newcomers_back_while_others_run() {
    let mut w = World::new(5, SchedulerConfig { watermark_blocks: 2, ..config() });
    w.prompt(20); // All five blocks: nothing runs, so the margin is waived.
    w.check(
        1,
        expect![[r#"
        start a a:0+8
    "#]],
    );
    let mut w = World::new(5, SchedulerConfig { watermark_blocks: 2, ..config() });
    let a = w.prompt(4);
    w.prompt(9); // Three blocks would leave one.
    w.check(
        1,
        expect![[r#"
        start a a:0+4* starved
    "#]],
    );
    w.scheduler.remove(a);
    w.check(
        1,
        expect![[r#"
        start b b:0+8
    "#]],
    );
}

#[test]
fn who_comes_after_a_waiting_reservation_leaves_it_its_blocks() {
    let mut w = World::new(6, config());
    let a = w.prompt(8);
    w.check(
        1,
        expect![[r#"
        start a a:0+8*
    "#]],
    );
    let b = w.prompt(12); // Before the reservation: it gets what comes free first.
    let turn = w.turn(0, 20);
    w.scheduler.keep_for(Some(Awaited { turn, share: w.share, tokens: 20 }));
    w.prompt(4); // After it: fits, and would keep the reservation from ever fitting.
    w.check(
        1,
        expect![[r#"
        a:8+1* starved
    "#]],
    );
    w.scheduler.remove(a);
    w.check(
        2,
        expect![[r#"
        start b b:0+8
        b:8+4*
    "#]],
    );
    w.scheduler.remove(b);
    // Nothing runs, and nothing lacks blocks: they are for the reservation.
    w.check(
        1,
        expect![[r#"
        idle
    "#]],
    );
    let urgent = w.add(1, w.arrival(1)); // Comes before the reservation anyway.
    w.check(
        1,
        expect![[r#"
        start e e:0+1*
    "#]],
    );
    w.scheduler.remove(urgent);
    w.scheduler.keep_for(None);
    w.check(
        1,
        expect![[r#"
        start d d:0+4*
    "#]],
    );
}

#[test]
fn blocks_of_one_that_ended_in_a_launched_step_come_before_those_of_a_later_one() {
    let mut w = World::new(4, SchedulerConfig { watermark_blocks: 0, ..config() });
    w.held.insert(('b', "decode"));
    w.prompt(6);
    w.prompt(3);
    let c = w.prompt(3);
    w.check(
        2,
        expect![[r#"
        start ab a:0+6* b:0+2
        start c a:6+1* b:2+1* c:0+3*
    "#]],
    );
    let (line, running) = w.launch();
    assert_eq!(line, "a:7+1* c:3+1*");
    // `a` needs a third block. `b` has one and is in no step; `c` had one.
    let ended = w.scheduler.remove(c);
    w.is_retiring = true;
    assert_eq!(w.launch().0, "starved");
    running.into_iter().for_each(|segment| drop(w.finish(segment)));
    drop(ended);
    w.is_retiring = false;
    assert_eq!(w.launch().0, "a:8+1*");
}

#[test]
fn blocks_of_one_that_is_overdue_in_a_launched_step_come_back() {
    let mut w = World::new(4, SchedulerConfig { watermark_blocks: 0, ..config() });
    w.held.insert(('b', "decode"));
    w.prompt(6);
    w.prompt(3);
    w.add(0, Arrival { deadline: w.start + 2 * SECOND, ..w.arrival(3) });
    (0..2).for_each(|_| drop(w.step()));
    let (line, running) = w.launch();
    assert_eq!(line, "a:7+1* c:3+1*");
    // `a` needs a third block. `b` is not preempted: `c` gives back its own once the step is over.
    w.now += 2 * SECOND;
    assert_eq!(w.launch().0, "Deadline(c, with blocks) starved");
    let [of_a, _] = running[..] else { panic!("{running:?}") };
    w.finish(of_a);
    assert_eq!(w.launch().0, "a:8+1*");
}

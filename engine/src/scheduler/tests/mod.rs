//! Scenarios as text, under virtual time.

mod fair_share;
mod memory;
mod prefix_sharing;
mod random;
mod states;
mod windows;

use super::*;
use baton_kv_cache::{BlockCounts, PoolShape};
use expect_test::{Expect, expect};
use std::collections::{BTreeSet, HashMap};
use std::time::Instant;

const SECOND: Duration = Duration::from_secs(1);

/// A scheduler under virtual time. Sequences are named by letters in order of arrival; blocks hold 4 tokens.
struct World {
    scheduler: Scheduler,
    pool: SharedPool,
    start: Instant,
    now: Instant,
    names: HashMap<SequenceKey, char>,
    full: BTreeSet<char>,
    held: BTreeSet<(char, &'static str)>,
    unprepared: BTreeSet<char>,
    is_retiring: bool,
    next: u64,
    order: FairOrder,
    /// The share of the next sequences.
    share: Share,
}

impl Conditions for World {
    fn has_room(&self, key: SequenceKey) -> bool {
        !self.full.contains(&self.names[&key])
    }
    fn continues(&self, _: SequenceKey) -> bool {
        true
    }
    fn is_open(&self, key: SequenceKey, phase: SequencePhase) -> bool {
        let phase = match phase {
            SequencePhase::Queue => "queue",
            SequencePhase::Prefill => "prefill",
            SequencePhase::Decode => "decode",
        };
        !self.held.contains(&(self.names[&key], phase))
    }
    fn is_prepared(&self, key: SequenceKey) -> bool {
        !self.unprepared.contains(&self.names[&key])
    }
    fn is_retiring(&self) -> bool {
        self.is_retiring
    }
}

fn config() -> SchedulerConfig {
    SchedulerConfig {
        block_tokens: 4,
        chunk_tokens_max: 8,
        mixed_chunk_tokens_max: usize::MAX,
        steps_max: 1,
        running_max: 4,
        scored_rows_max: 4,
        watermark_blocks: 1,
        stall: 5 * SECOND,
        recheck: SECOND / 100,
    }
}

impl World {
    fn new(blocks: u32, config: SchedulerConfig) -> Self {
        let pool = SharedPool::try_new(PoolShape::full(1, blocks, 4)).unwrap();
        let scheduler = Scheduler::new(config, pool.clone());
        let now = Instant::now();
        Self {
            scheduler,
            pool,
            start: now,
            now,
            names: HashMap::new(),
            full: BTreeSet::new(),
            held: BTreeSet::new(),
            unprepared: BTreeSet::new(),
            is_retiring: false,
            next: 0,
            order: FairOrder::default(),
            share: Share::default(),
        }
    }

    fn arrival(&self, len: usize) -> Arrival {
        let (deadline, share) = (self.start + 1000 * SECOND, self.share);
        Arrival { len, computed: 0, lease: None, pinned: false, deadline, share, prefix: None, scored: 0..0 }
    }

    /// The next place in the order, for this many tokens.
    fn turn(&mut self, priority: i32, tokens: usize) -> SequenceKey {
        let start = self.order.enter(priority, self.share, tokens, None).start;
        let key = SequenceKey::new(priority, start, self.next);
        self.names.insert(key, (b'a' + self.next as u8) as char);
        self.next += 1;
        key
    }

    fn add(&mut self, priority: i32, arrival: Arrival) -> SequenceKey {
        let key = self.turn(priority, arrival.len - arrival.computed);
        self.scheduler.add(key, arrival);
        key
    }

    fn prompt(&mut self, len: usize) -> SequenceKey {
        self.add(0, self.arrival(len))
    }

    fn adopted(&mut self, len: usize) -> SequenceKey {
        let lease = self.pool.try_lease(&[(len - 1).div_ceil(4)]);
        assert!(lease.is_some());
        self.add(0, Arrival { computed: len - 1, lease, ..self.arrival(len) })
    }

    /// Plans one step, carries it out, and describes it in one line: `name:position+rows`, with a star where a token is sampled.
    fn step(&mut self) -> String {
        let (line, batch) = self.launch();
        let mut line = vec![line];
        for s in batch {
            line.extend(self.finish(s));
        }
        line.retain(|part| !part.is_empty());
        if line.is_empty() { "idle".into() } else { line.join(" ") }
    }

    /// Notes that rows of a launched step are computed.
    fn finish(&mut self, s: Segment) -> Vec<String> {
        self.scheduler.advance(s.key, s.rows, s.samples, Rest::Nothing, self.now);
        let forked = if s.samples { self.scheduler.fork_for_waiting(s.key) } else { Vec::new() };
        forked.iter().map(|copy| format!("copy {}", copy.tokens)).collect()
    }

    /// Plans one step, launches it, and describes it.
    fn launch(&mut self) -> (String, Vec<Segment>) {
        let (mut scheduler, now) =
            (std::mem::replace(&mut self.scheduler, Scheduler::new(config(), self.pool.clone())), self.now);
        let decisions = scheduler.plan(now, self);
        self.scheduler = scheduler;
        decisions.started.iter().for_each(|key| self.order.served(key.priority(), key.start()));
        let mut line = Vec::new();
        let names = |keys: &[SequenceKey]| keys.iter().map(|k| self.names[k]).collect::<String>();
        line.extend(decisions.ended.iter().map(|(k, end, lease)| {
            format!("{end:?}({}{})", self.names[k], if lease.is_some() { ", with blocks" } else { "" })
        }));
        for (what, keys) in
            [("prepare", &decisions.to_prepare), ("preempt", &decisions.preempted), ("start", &decisions.started)]
        {
            if !keys.is_empty() {
                line.push(format!("{what} {}", names(keys)));
            }
        }
        for s in &decisions.batch {
            let star = if s.samples { "*" } else { "" };
            line.push(format!("{}:{}+{}{star}", self.names[&s.key], s.position, s.rows));
            self.scheduler.launched(s.key, s.rows, s.tokens_max());
        }
        if decisions.starved {
            line.push("starved".into());
        }
        (line.join(" "), decisions.batch)
    }

    fn check(&mut self, steps: usize, expected: Expect) {
        let lines: Vec<String> = (0..steps).map(|_| self.step()).collect();
        expected.assert_eq(&(lines.join("\n") + "\n"));
    }
}

#[test]
fn sequences_join_and_leave_at_every_step() {
    let mut w = World::new(32, config());
    let a = w.prompt(3);
    w.check(
        2,
        expect![[r#"
        start a a:0+3*
        a:3+1*
    "#]],
    );
    w.prompt(5);
    w.check(
        2,
        expect![[r#"
        start b a:4+1* b:0+5*
        a:5+1* b:5+1*
    "#]],
    );
    w.scheduler.remove(a);
    w.check(
        1,
        expect![[r#"
        b:6+1*
    "#]],
    );
}

#[test]
fn a_step_is_planned_as_if_the_one_before_were_done() {
    let mut w = World::new(32, config());
    w.prompt(10);
    w.prompt(3);
    let (mut lines, mut running) = (Vec::new(), std::collections::VecDeque::new());
    for _ in 0..5 {
        let (line, batch) = w.launch();
        lines.push(line);
        running.push_back(batch);
        if running.len() == 2 {
            running.pop_front().unwrap().into_iter().for_each(|segment| drop(w.finish(segment)));
        }
    }
    expect![[r#"
        start a a:0+8
        start b a:8+2* b:0+3*
        a:10+1* b:3+1*
        a:11+1* b:4+1*
        a:12+1* b:5+1*"#]]
    .assert_eq(&lines.join("\n"));
}

#[test]
fn blocks_of_a_running_step_are_not_taken_and_it_is_not_followed_by_another() {
    let mut w = World::new(4, SchedulerConfig { watermark_blocks: 0, ..config() });
    w.prompt(7);
    w.prompt(7);
    let (_, first) = w.launch();
    let (_, second) = w.launch();
    first.into_iter().for_each(|segment| drop(w.finish(segment)));
    // Both hold two blocks, and `a` needs a third: those of `b` are in a step.
    assert_eq!(w.launch().0, "starved");
    second.into_iter().for_each(|segment| drop(w.finish(segment)));
    assert_eq!(w.launch().0, "preempt b a:8+1*");
}

#[test]
fn prefill_comes_in_chunks_behind_the_decode_rows() {
    let mut w = World::new(32, config());
    w.prompt(1);
    w.prompt(1);
    w.step();
    w.prompt(20);
    w.prompt(3);
    w.check(
        5,
        expect![[r#"
        start c a:1+1* b:1+1* c:0+6
        a:2+1* b:2+1* c:6+6
        a:3+1* b:3+1* c:12+6
        start d a:4+1* b:4+1* c:18+2* d:0+3*
        a:5+1* b:5+1* c:20+1* d:3+1*
    "#]],
    );
}

#[test]
fn prefill_beside_decode_rows_has_a_bound_of_its_own() {
    let mut w = World::new(64, SchedulerConfig { mixed_chunk_tokens_max: 3, ..config() });
    w.prompt(1);
    w.prompt(9);
    w.prompt(12);
    w.check(
        5,
        expect![[r#"
            start ab a:0+1* b:0+7
            start c a:1+1* b:7+2* c:0+1
            a:2+1* b:9+1* c:1+3
            a:3+1* b:10+1* c:4+3
            a:4+1* b:11+1* c:7+3
        "#]],
    );
}

#[test]
fn a_full_batch_leaves_prefill_one_row() {
    let mut w = World::new(64, SchedulerConfig { chunk_tokens_max: 2, ..config() });
    for _ in 0..3 {
        w.prompt(1);
    }
    (0..2).for_each(|_| drop(w.step()));
    w.prompt(3);
    w.prompt(1); // A fifth sequence waits: four run at most.
    w.check(
        4,
        expect![[r#"
        start d a:2+1* b:2+1* c:1+1* d:0+1
        a:3+1* b:3+1* c:2+1* d:1+1
        a:4+1* b:4+1* c:3+1* d:2+1*
        a:5+1* b:5+1* c:4+1* d:3+1*
    "#]],
    );
}

#[test]
fn deadlines_end_sequences_wherever_they_are() {
    let mut w = World::new(5, config());
    for (len, seconds) in [(4, 3), (40, 2), (4, 1000)] {
        w.add(0, Arrival { deadline: w.start + seconds * SECOND, ..w.arrival(len) });
    }
    w.check(
        1,
        expect![[r#"
        start a a:0+4* starved
    "#]],
    );
    w.now += 2 * SECOND;
    w.check(
        1,
        expect![[r#"
        Deadline(b) start c a:4+1* c:0+4*
    "#]],
    );
    w.now += SECOND;
    w.check(
        1,
        expect![[r#"
        Deadline(a, with blocks) c:4+1*
    "#]],
    );
}

#[test]
fn a_full_sink_pauses_one_sequence_and_ends_it_after_the_stall() {
    let mut w = World::new(16, config());
    w.prompt(2);
    w.prompt(2);
    w.check(
        1,
        expect![[r#"
        start ab a:0+2* b:0+2*
    "#]],
    );
    w.full.insert('a');
    w.check(
        1,
        expect![[r#"
        b:2+1*
    "#]],
    );
    w.now += 4 * SECOND;
    w.full.clear();
    w.check(
        1,
        expect![[r#"
        a:2+1* b:3+1*
    "#]],
    );
    w.full.insert('b');
    w.check(
        1,
        expect![[r#"
        a:3+1*
    "#]],
    );
    w.now += 5 * SECOND;
    w.check(
        1,
        expect![[r#"
        Stalled(b, with blocks) a:4+1*
    "#]],
    );
}

#[test]
fn a_gate_holds_one_sequence_in_its_phase_and_stops_nobody_else() {
    let mut w = World::new(32, config());
    w.held.extend([('a', "queue"), ('b', "prefill"), ('c', "decode")]);
    w.prompt(2);
    w.prompt(10);
    w.prompt(2);
    w.prompt(2);
    w.check(
        2,
        expect![[r#"
        start bcd c:0+2* d:0+2*
        d:2+1*
    "#]],
    );
    w.held.remove(&('a', "queue"));
    w.held.remove(&('b', "prefill"));
    w.check(
        1,
        expect![[r#"
        start a a:0+2* b:0+5 d:3+1*
    "#]],
    );
    w.held.insert(('b', "prefill"));
    w.held.clear();
    w.held.insert(('b', "prefill")); // Between two chunks.
    w.check(
        1,
        expect![[r#"
        a:2+1* c:2+1* d:4+1*
    "#]],
    );
}

#[test]
fn the_next_sequences_are_prepared_and_do_not_hold_up_others() {
    let mut w = World::new(32, SchedulerConfig { running_max: 2, ..config() });
    for _ in 0..6 {
        w.prompt(3);
    }
    w.unprepared.extend(['a', 'b', 'd', 'e', 'f']);
    w.check(
        1,
        expect![[r#"
            prepare abd start c c:0+3*
        "#]],
    );
    w.unprepared.remove(&'b');
    w.check(
        2,
        expect![[r#"
            prepare ad start b b:0+3* c:3+1*
            prepare ad b:3+1* c:4+1*
        "#]],
    );
    w.unprepared.clear();
    w.check(
        1,
        expect![[r#"
            start a a:0+3* b:4+1*
        "#]],
    );
}

#[test]
fn it_asks_to_be_woken_for_deadlines_and_for_what_is_held() {
    let mut w = World::new(4, config());
    let plan = |w: &mut World| {
        let mut scheduler = std::mem::replace(&mut w.scheduler, Scheduler::new(config(), w.pool.clone()));
        let wake_at = scheduler.plan(w.now, w).wake_at;
        w.scheduler = scheduler;
        wake_at.map(|at| at - w.start)
    };
    assert_eq!(plan(&mut w), None);
    w.add(0, Arrival { deadline: w.start + 7 * SECOND, ..w.arrival(4) });
    w.held.insert(('a', "prefill"));
    assert_eq!(plan(&mut w), Some(config().recheck), "it left the queue and is held behind it");
    w.held.clear();
    assert_eq!(plan(&mut w), Some(7 * SECOND));
    w.full.insert('a');
    assert_eq!(plan(&mut w), Some(config().recheck));
}

#[test]
fn totals_count_what_is_still_to_compute() {
    let mut w = World::new(8, config());
    w.prompt(12);
    w.prompt(12);
    w.step();
    let totals = w.scheduler.totals();
    assert_eq!(
        totals,
        Totals { waiting: 1, waiting_tokens: 4 + 12, running: 1, running_tokens: 12, blocks: 3, held_tokens: 12 }
    );
    assert_eq!(w.pool.counts(), BlockCounts { total: 8, free: 5, referenced: 3, ..BlockCounts::default() });
}

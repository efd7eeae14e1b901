//! Prefill and decode on different engines: observers, outgoing leases, adopted leases.

use super::*;
use crate::{PrefillObserver, SequencePhase};
use baton_kv_cache::Lease;
use baton_types::{BlockId, BlockTables, Fence};
use stand_in::{Hook, LAYERS, continuation};
use std::sync::Mutex;

#[derive(Clone, Default)]
struct Observer {
    log: Arc<Mutex<Vec<String>>>,
    /// Where it was told that states will be.
    states: Arc<Mutex<Vec<BlockId>>>,
    prefilled: Arc<Mutex<Option<Lease>>>,
    ended: Arc<Mutex<Option<Lease>>>,
}

impl Observer {
    fn take_prefilled(&self) -> Lease {
        self.prefilled.lock().unwrap().take().expect("the blocks come before the event")
    }
}

impl PrefillObserver for Observer {
    fn started(&mut self, blocks: &BlockTables, _now: Instant) {
        self.log.lock().unwrap().push(format!("{} blocks", blocks.total()));
    }
    fn grown(&mut self, blocks: &BlockTables) {
        let state = &blocks.0[1];
        self.log.lock().unwrap().push(format!("state {:?}", state.indices()));
        self.states.lock().unwrap().extend(&state.blocks);
    }
    fn layer_launched(&mut self, layer: u32, tokens_end: usize, _fence: &Fence) {
        self.log.lock().unwrap().push(format!("{layer}:{tokens_end}"));
    }
    fn prefilled(&mut self, lease: Lease) {
        *self.prefilled.lock().unwrap() = Some(lease);
    }
    fn ended(&mut self, lease: Lease) {
        *self.ended.lock().unwrap() = Some(lease);
    }
}

#[test]
fn an_observer_sees_every_layer_of_every_chunk_and_the_blocks_go_out() {
    let (engine, kv) = start(8, config(), Hooks::default());
    let (tokens, observer) = (prompt(1, 20), Observer::default());
    let run = Run::PrefillOnly { observer: Box::new(observer.clone()) };
    let (output, outcome) = submit(&engine, request(&tokens, 9), run).end();
    assert!(matches!(outcome, Outcome::Prefilled), "{outcome:?}");
    let lease = observer.take_prefilled();
    assert_eq!(output, continuation(&tokens, 1));
    assert_eq!(observer.log.lock().unwrap().join(" "), "2 blocks 0:8 1:8 0:16 1:16 0:20 1:20");
    assert_eq!(LAYERS, 2);
    assert_eq!(kv.load(&lease.blocks().0[0], 20), tokens);
    assert_eq!(engine.pool().counts().referenced, 2, "the lease holds them");
    drop(lease);
    assert_eq!(engine.pool().counts().referenced, 0);
}

/// Before each chunk, the one block with the state behind it: with an index of its own where the last one could be taken for another.
#[test]
fn an_observer_knows_where_the_state_behind_each_chunk_will_be() {
    for is_asynchronous in [false, true] {
        let config = EngineConfig { chunk_tokens_max: 12, ..config() };
        let (engine, kv) = start_on(Kv::with_states(8, 8), config, Hooks { is_asynchronous, ..Hooks::default() }, None);
        let (tokens, observer) = (prompt(1, 40), Observer::default());
        let run = Run::PrefillOnly { observer: Box::new(observer.clone()) };
        assert_eq!(submit(&engine, request(&tokens, 9), run).end().0, continuation(&tokens, 1));
        let lease = observer.take_prefilled();
        let log = observer.log.lock().unwrap()[1..].join(" ");
        let chunk = |index, end| format!("state {index}..{} 0:{end} 1:{end}", index + 1);
        let expected = [(0, 12), (1, 24), (2, 36), (2, 40)].map(|(index, end)| chunk(index, end)).join(" ");
        assert_eq!(log, expected);
        let states = observer.states.lock().unwrap().clone();
        assert_eq!((states.len(), states[2]), (4, states[3]), "within a block it stays where it is");
        assert_eq!((kv.state(states[3]), lease.tables().0[1].blocks.last()), (tokens.clone(), Some(&states[3])));
        drop(lease);
        assert_eq!(engine.pool().counts_of(1).referenced, 0);
    }
}

#[test]
fn an_observer_finds_the_state_behind_whole_blocks_in_the_last_of_them() {
    for (len, index) in [(31, 1), (32, 1), (33, 2), (48, 2)] {
        let config = EngineConfig { chunk_tokens_max: 64, ..config() };
        let (engine, _) = start_on(Kv::with_states(8, 8), config, Hooks::default(), None);
        let observer = Observer::default();
        let run = Run::PrefillOnly { observer: Box::new(observer.clone()) };
        assert!(matches!(submit(&engine, request(&prompt(1, len), 9), run).end().1, Outcome::Prefilled));
        assert_eq!(observer.log.lock().unwrap()[1], format!("state {index}..{}", index + 1), "{len} tokens");
    }
}

#[test]
fn samples_of_a_prefill_go_out_with_blocks_of_their_own() {
    let (engine, kv) = start(16, EngineConfig { chunk_tokens_max: 20, ..config() }, Hooks::default());
    engine.set_gate(Some(Arc::new(|_: &RequestId, _: SequencePhase| false)));
    let (tokens, observers) = (prompt(1, 20), [(); 3].map(|()| Observer::default()));
    let prefill = |observer: &Observer| {
        submit(&engine, shared_request(&tokens, 9, "a"), Run::PrefillOnly { observer: Box::new(observer.clone()) })
    };
    let sequences = observers.each_ref().map(prefill);
    engine.set_gate(None);
    for sequence in &sequences {
        let (output, outcome) = sequence.end();
        assert!(matches!(outcome, Outcome::Prefilled), "{outcome:?}");
        assert_eq!(output, continuation(&tokens, 1));
    }
    assert_eq!(engine.load().prefill_rows, 20 + 2);
    let logs = observers.each_ref().map(|observer| observer.log.lock().unwrap().join(" "));
    let forked = "2 blocks 0:19 0:20 1:20";
    assert_eq!(logs, ["2 blocks 0:20 1:20", forked, forked]);
    let leases = observers.each_ref().map(Observer::take_prefilled);
    leases.iter().for_each(|lease| assert_eq!(kv.load(&lease.blocks().0[0], 20), tokens));
    let mut last = leases.each_ref().map(|lease| lease.blocks().0[0][1]);
    last.sort_unstable();
    assert!(last[0] != last[1] && last[1] != last[2], "the block of the last tokens is each one's own");
    assert_eq!(engine.pool().counts().referenced, 1 + 3);
    drop(leases);
    assert_eq!(engine.pool().counts().referenced, 0);
}

#[test]
fn a_sample_that_comes_during_the_step_of_a_prefill_is_in_time() {
    let ((stepping, steps), (go, told)) = (channel(), channel());
    let before_step: Hook = Box::new(move |_| {
        stepping.send(()).unwrap();
        told.recv_timeout(FOREVER).unwrap();
        Ok(())
    });
    let hooks = Hooks { before_step: Some(before_step), ..Hooks::default() };
    let (engine, kv) = start(16, EngineConfig { chunk_tokens_max: 20, ..config() }, hooks);
    let (tokens, observers) = (prompt(1, 20), [(); 2].map(|()| Observer::default()));
    let prefill = |observer: &Observer| {
        submit(&engine, shared_request(&tokens, 9, "a"), Run::PrefillOnly { observer: Box::new(observer.clone()) })
    };
    let first = prefill(&observers[0]);
    steps.recv_timeout(FOREVER).unwrap();
    let second = prefill(&observers[1]);
    (0..2).for_each(|_| go.send(()).unwrap());
    for (sequence, observer) in [first, second].iter().zip(&observers) {
        assert_eq!(sequence.end().0, continuation(&tokens, 1));
        assert_eq!(kv.load(&observer.take_prefilled().blocks().0[0], 20), tokens);
    }
    assert_eq!(engine.load().prefill_rows, 20 + 1);
}

#[test]
fn what_ends_with_its_first_token_still_hands_its_blocks_out() {
    let (engine, _) = start(8, config(), Hooks::default());
    let sequence = submit(&engine, request(&[1, 2], 1), Run::PrefillOnly { observer: Box::new(Observer::default()) });
    assert!(matches!(sequence.next(), SequenceEvent::Started { .. }));
    assert!(matches!(sequence.next(), SequenceEvent::Token { finish: Some(FinishReason::Length), .. }));
    assert!(matches!(sequence.next(), SequenceEvent::Prefilled { .. }));
    assert!(sequence.events.recv_timeout(FOREVER).is_err(), "nothing follows, and the sink is gone");
}

/// Receives tokens, and is gone when the end comes.
struct Leaves(std::sync::mpsc::Sender<()>);

impl SequenceSink for Leaves {
    fn has_room(&self, _: usize) -> bool {
        true
    }
    fn send(&mut self, event: SequenceEvent) -> bool {
        let ends = matches!(event, SequenceEvent::Prefilled { .. });
        drop(event);
        if ends {
            self.0.send(()).unwrap();
        }
        !ends
    }
}

#[test]
fn a_prefill_whose_end_nobody_hears_leaves_its_blocks_to_the_observer() {
    let (engine, _) = start(8, config(), Hooks::default());
    let (observer, (left, gone)) = (Observer::default(), channel());
    let run = Run::PrefillOnly { observer: Box::new(observer.clone()) };
    let _control = engine.submit(request(&prompt(1, 20), 9), run, Box::new(Leaves(left))).unwrap();
    gone.recv_timeout(FOREVER).unwrap();
    assert_eq!(engine.pool().counts().referenced, 2, "a transfer may still read them");
    drop(observer.take_prefilled());
    assert_eq!(engine.pool().counts().referenced, 0);
}

#[test]
fn a_cancelled_prefill_leaves_its_blocks_to_the_observer() {
    let (engine, _) = start(8, config(), Hooks::default());
    engine.set_gate(Some(Arc::new(|_: &RequestId, phase: SequencePhase| phase != SequencePhase::Prefill)));
    let observer = Observer::default();
    let sequence =
        submit(&engine, request(&prompt(1, 20), 9), Run::PrefillOnly { observer: Box::new(observer.clone()) });
    assert!(matches!(sequence.next(), SequenceEvent::Started { .. }));
    sequence.control.cancel();
    assert!(matches!(sequence.end().1, Outcome::Finished(FinishReason::Cancelled)));
    assert_eq!(engine.pool().counts().referenced, 2, "a transfer may still read them");
    observer.ended.lock().unwrap().take();
    assert_eq!(engine.pool().counts().referenced, 0);
}

#[test]
fn an_adopted_sequence_continues_where_the_prefill_ended() {
    let (source, source_kv) = start(8, config(), Hooks::default());
    let (sink, sink_kv) = start(8, config(), Hooks::default());
    let _shift = sink.pool().try_lease(&[3]); // Other block ids than at the source.
    for len in [1, 15, 16, 17, 40] {
        let tokens = prompt(len as u32, len);
        let observer = Observer::default();
        let run = Run::PrefillOnly { observer: Box::new(observer.clone()) };
        let (first, outcome) = submit(&source, request(&tokens, 20), run).end();
        assert!(matches!(outcome, Outcome::Prefilled), "{outcome:?}");
        let from = observer.take_prefilled();
        let to = sink.reserve(len, &[]).unwrap();
        sink_kv.receive(&to.blocks().0[0], &source_kv.load(&from.blocks().0[0], len));
        drop(from);
        let mut adopted = request(&[&tokens[..], &first].concat(), 20);
        adopted.prompt_len = len;
        let (rest, _) = submit(&sink, adopted, Run::Adopted { lease: to, turn: None }).end();
        assert_eq!([first, rest].concat(), continuation(&tokens, 20));
    }
    assert_eq!(source.pool().counts().referenced, 0);
}

//! Sequences with a grammar: what it allows decides every token, whatever runs ahead, and a grammar that fails fails its sequence alone.

mod common;

use baton_engine::formats::{ModelSource, RandomModel};
use baton_engine::{
    Engine, EngineConfig, EngineHandle, GrammarState, Grammars, Model, Run, SequenceEvent, SequenceRequest,
    SequenceSink,
};
use baton_kernels::cpu::{CpuConfig, CpuDevice};
use baton_kernels::device::Device;
use baton_kernels::lagging::{LagConfig, Lagging};
use baton_kernels::sampling::TokenSet;
use baton_types::{ErrorKind, FinishReason, Grammar, KvPoolMap, RequestError, SamplingParams, TokenId};
use common::{FOREVER, Sink};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const MODEL: &str = "random:hidden=64,layers=2,heads=4,kv_heads=2,head_dim=16,ffn=96,vocab=301,context=128,seed=5";
const VOCAB: TokenId = 301;
const END: TokenId = 300;

/// Each token is one to seven above the one before it, the first from 0 to 6. From 200 on the answer may end, from 290 on it must.
/// A Lark grammar fails, with its text as the reason, once a token is above 50; "slow" takes its time; "panics" does; "held" starts once
/// nobody else holds the lock. Starts are counted.
#[derive(Clone, Default)]
struct Rising(Arc<Mutex<()>>, Arc<AtomicUsize>);

struct Risen {
    last: Option<TokenId>,
    told: String,
}

impl Grammars for Rising {
    fn stack_bytes(&self) -> usize {
        1 << 20
    }

    fn start(&self, grammar: &Grammar, answer: &[TokenId]) -> Result<Box<dyn GrammarState>, RequestError> {
        self.1.fetch_add(1, Ordering::Relaxed);
        let Grammar::Lark(told) = grammar else { return Err(RequestError::invalid("grammar", "it is no Lark")) };
        let _held = (told == "held").then(|| self.0.lock().unwrap());
        let mut state = Risen { last: None, told: told.clone() };
        answer.iter().try_for_each(|token| state.advance(*token))?;
        Ok(Box::new(state))
    }
}

impl Risen {
    fn next(&self) -> Vec<TokenId> {
        match self.last {
            None => (0..7).collect(),
            Some(last) if last >= 290 => vec![END],
            Some(last) => (last + 1..last + 8).chain((last >= 200).then_some(END)).filter(|t| *t <= END).collect(),
        }
    }
}

impl GrammarState for Risen {
    fn allowed(&mut self) -> Result<TokenSet, RequestError> {
        match &*self.told {
            "rising" | "held" => {}
            "slow" => std::thread::sleep(Duration::from_millis(3)),
            told if self.last.is_some_and(|last| last > 50) => {
                assert_ne!(told, "panics");
                return Err(RequestError::invalid("grammar", told));
            }
            _ => {}
        }
        Ok(self.next().into_iter().collect())
    }

    fn advance(&mut self, token: TokenId) -> Result<(), RequestError> {
        if !self.next().contains(&token) {
            return Err(RequestError::new(ErrorKind::Internal, format!("{token} after {:?}", self.last)));
        }
        self.last = Some(token);
        Ok(())
    }
}

/// What computes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum On {
    Cpu,
    /// One step ahead of the tokens.
    Lagging,
}

fn serve(on: On, grammars: Option<Rising>) -> EngineHandle {
    let source = RandomModel::parse(MODEL).unwrap();
    let config = EngineConfig {
        model_len_max: source.spec().context,
        chunk_tokens_max: 20,
        running_max: 4,
        watermark_blocks: 0,
        end_tokens: vec![END],
        ..EngineConfig::default()
    };
    let cpu = || CpuDevice::new(CpuConfig::default()).unwrap();
    let device: Arc<dyn Device> = match on {
        On::Cpu => cpu(),
        On::Lagging => Lagging::new(cpu(), LagConfig::default()),
    };
    let model = Model::load(&source, device.as_ref(), config.model_config(), &|_| ()).unwrap();
    // Too few for all sequences of a test at their full length: some are preempted.
    let map = KvPoolMap::try_new(model.layout(16).unwrap(), 12).unwrap();
    let memory = device.alloc_pool(&map).unwrap();
    memory.write_by(Instant::now() + FOREVER, 0, &vec![0xff; map.bytes()]).unwrap();
    let engine = Engine::start(model, memory, &map, config).unwrap();
    if let Some(grammars) = grammars {
        engine.set_grammars(Arc::new(grammars)).unwrap();
    }
    engine
}

fn request(seed: u64, grammar: Option<Grammar>) -> SequenceRequest {
    let tokens: Vec<TokenId> = (0..30 + seed as TokenId).map(|t| (t * t + 3) % VOCAB).collect();
    let sampling = SamplingParams {
        temperature: 1.0,
        seed,
        max_tokens: 90,
        logprobs: Some(1),
        grammar: grammar.map(Arc::new),
        ..SamplingParams::default()
    };
    common::request("request", tokens, sampling)
}

fn lark(told: &str) -> Option<Grammar> {
    Some(Grammar::Lark(told.into()))
}

fn submit(engine: &EngineHandle, request: SequenceRequest) -> Receiver<SequenceEvent> {
    let (sender, events) = channel();
    engine.submit(request, Run::Full, Box::new(Sink(sender))).unwrap().detach();
    events
}

type Answer = Vec<(TokenId, u32)>;

/// Tokens with the bits of their log-probabilities, and the end.
fn finish(events: &Receiver<SequenceEvent>) -> (Answer, Result<FinishReason, (ErrorKind, String)>) {
    let mut answer = Answer::new();
    loop {
        match events.recv_timeout(FOREVER).expect("an event") {
            SequenceEvent::Token { token, logprobs, .. } => answer.push((token, logprobs.unwrap().chosen.to_bits())),
            SequenceEvent::Finished { reason } => return (answer, Ok(reason)),
            SequenceEvent::Failed { kind, message } => return (answer, Err((kind, message))),
            _ => {}
        }
    }
}

/// Whether the tokens rise as they should.
fn rises(answer: &Answer) -> bool {
    let mut state = Risen { last: None, told: String::new() };
    answer.iter().all(|(token, _)| *token == END || state.advance(*token).is_ok())
}

#[test]
fn every_token_is_allowed_and_the_bits_are_those_of_a_sequence_alone() {
    let alone = |seed| {
        let (answer, end) = finish(&submit(&serve(On::Cpu, Some(Rising::default())), request(seed, lark("rising"))));
        assert!(rises(&answer) && end == Ok(FinishReason::Stop), "{answer:?} {end:?}");
        answer
    };
    let alone: Vec<Answer> = (0..6).map(alone).collect();
    for on in [On::Cpu, On::Lagging] {
        let engine = serve(on, Some(Rising::default()));
        let free = submit(&engine, SequenceRequest { priority: 1, ..request(9, None) });
        let running: Vec<_> = (0..6).map(|seed| submit(&engine, request(seed, lark("slow")))).collect();
        for (events, alone) in running.iter().zip(&alone) {
            assert_eq!(finish(events).0, *alone, "{on:?}");
        }
        assert!(!rises(&finish(&free).0), "a sequence without one is free");
        assert!(engine.load().preemptions > 0);
        // Continued from any of its tokens, as after a replay.
        for at in [1, 2, alone[3].len() - 2] {
            let mut continued = request(3, lark("rising"));
            continued.tokens.extend(alone[3][..at].iter().map(|(token, _)| token));
            assert_eq!(finish(&submit(&engine, continued)).0, alone[3][at..], "from {at}, {on:?}");
        }
    }
}

#[test]
fn min_tokens_counts_where_the_grammar_leaves_a_choice() {
    for on in [On::Cpu, On::Lagging] {
        let engine = serve(on, Some(Rising::default()));
        let mut asked = request(0, lark("rising"));
        (asked.sampling.min_tokens, asked.sampling.logit_bias) = (85, vec![(END, 100.0)]);
        let (answer, end) = finish(&submit(&engine, asked.clone()));
        // The bias takes the end at once where it may; the grammar must end above 290.
        let last = answer[answer.len() - 2].0;
        assert!(rises(&answer) && end == Ok(FinishReason::Stop) && (answer.len() >= 85 || last >= 290), "{answer:?}");
        // Where it is continued, its tokens so far count too.
        asked.sampling.min_tokens = 60;
        let (whole, _) = finish(&submit(&engine, asked.clone()));
        assert!(whole.len() >= 60 && whole[whole.len() - 2].0 < 290, "it may end before it must: {whole:?}");
        for at in [1, 30, 58] {
            let mut continued = asked.clone();
            continued.tokens.extend(whole[..at].iter().map(|(token, _)| token));
            assert_eq!(finish(&submit(&engine, continued)).0, whole[at..], "from {at}, {on:?}");
        }
        asked.sampling.min_tokens = 0;
        let (answer, _) = finish(&submit(&engine, asked));
        assert!((200..207).contains(&answer[answer.len() - 2].0), "{answer:?}");
    }
}

#[test]
fn a_grammar_that_fails_fails_its_sequence_alone() {
    for on in [On::Cpu, On::Lagging] {
        let engine = serve(on, Some(Rising::default()));
        let fine = submit(&engine, request(1, lark("rising")));
        let failed = |grammar| {
            let (answer, end) = finish(&submit(&engine, request(2, grammar)));
            assert!(rises(&answer), "{answer:?}");
            (answer.last().map_or(0, |(token, _)| *token), end.unwrap_err())
        };
        let (last, (kind, told)) = failed(lark("too much work"));
        assert!(last > 50 && kind == ErrorKind::InvalidRequest && told.contains("too much work"), "{last} {told}");
        let (last, (kind, _)) = failed(lark("panics"));
        assert!(last > 50 && kind == ErrorKind::Internal);
        assert_eq!(failed(Some(Grammar::Regex("a".into()))).1.0, ErrorKind::InvalidRequest);
        // Tokens that it does not allow are not continued.
        let mut foreign = request(2, lark("rising"));
        foreign.tokens.extend([3, 2]);
        assert_eq!(finish(&submit(&engine, foreign)).1.unwrap_err().0, ErrorKind::Internal);
        let (answer, end) = finish(&fine);
        assert!(rises(&answer) && end == Ok(FinishReason::Stop));
        let pool = engine.pool();
        assert!(engine.stop());
        assert_eq!(pool.counts().referenced, 0);
    }
}

#[test]
fn a_grammar_that_takes_long_to_start_holds_up_no_other_sequence() {
    for on in [On::Cpu, On::Lagging] {
        let rising = Rising::default();
        let engine = serve(on, Some(rising.clone()));
        let held = rising.0.lock().unwrap();
        let running = submit(&engine, request(1, None));
        let late = submit(&engine, SequenceRequest { priority: 1, ..request(3, lark("held")) });
        for others in [running, submit(&engine, request(4, None))] {
            let (answer, end) = finish(&others);
            assert!(!answer.is_empty() && end.is_ok(), "{on:?}: {end:?}");
        }
        assert!(late.try_recv().is_err(), "{on:?}: it has no blocks yet");
        drop(held);
        let (answer, end) = finish(&late);
        assert!(rises(&answer) && end == Ok(FinishReason::Stop), "{on:?}: {answer:?}");
    }
}

/// Takes no event while the lock is held, and so holds the engine's thread within its turn.
struct Held(Arc<Mutex<()>>, Sink);

impl SequenceSink for Held {
    fn has_room(&self, events: usize) -> bool {
        self.1.has_room(events)
    }

    fn send(&mut self, event: SequenceEvent) -> bool {
        let _held = self.0.lock().unwrap();
        self.1.send(event)
    }
}

#[test]
fn grammars_start_while_a_step_runs_as_many_as_a_batch_has_places() {
    let rising = Rising::default();
    let engine = serve(On::Cpu, Some(rising.clone()));
    let (sender, events) = channel();
    let held = rising.0.lock().unwrap();
    let sink = Box::new(Held(rising.0.clone(), Sink(sender)));
    engine.submit(request(9, None), Run::Full, sink).unwrap().detach();
    let late: Vec<_> = (0..6).map(|seed| submit(&engine, request(seed, lark("rising")))).collect();
    let (starts, until) = (|| rising.1.load(Ordering::Relaxed), Instant::now() + FOREVER);
    while starts() < 4 {
        assert!(Instant::now() < until, "{} grammars have started", starts());
        std::thread::yield_now();
    }
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(starts(), 4);
    drop(held);
    for events in late.iter().chain([&events]) {
        assert!(finish(events).1.is_ok());
    }
    assert_eq!(starts(), 6);
}

#[test]
fn a_grammar_that_is_refused_computes_nothing() {
    let engine = serve(On::Cpu, Some(Rising::default()));
    let (answer, end) = finish(&submit(&engine, request(2, Some(Grammar::Regex("a".into())))));
    assert_eq!((answer.len(), end.unwrap_err().0), (0, ErrorKind::InvalidRequest));
    assert_eq!(engine.load().prefill_rows, 0);
}

#[test]
fn without_grammars_a_sequence_with_one_is_refused() {
    let engine = serve(On::Cpu, None);
    let (sender, _events) = channel();
    let refused = engine.submit(request(1, lark("rising")), Run::Full, Box::new(Sink(sender))).map(drop).unwrap_err();
    assert!(refused.to_string().contains("this model has no grammars"), "{refused}");
}

/// No worker is to blame, and no other one would find a token.
#[test]
fn parameters_that_leave_no_token_are_the_requests_own_error() {
    for on in [On::Cpu, On::Lagging] {
        let engine = serve(on, None);
        let mut nothing = request(1, None);
        nothing.sampling.allowed_token_ids = vec![5];
        nothing.sampling.bad_words = vec![vec![5]];
        let (answer, end) = finish(&submit(&engine, nothing));
        let (kind, told) = end.unwrap_err();
        assert_eq!((answer.len(), kind), (0, ErrorKind::InvalidRequest), "{told}");
        assert!(told.contains("bad words"), "{told}");
        assert_eq!(finish(&submit(&engine, request(2, None))).0.len(), 90, "the engine goes on");
    }
}

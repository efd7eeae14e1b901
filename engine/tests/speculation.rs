//! Proposed tokens over real (small) models: tokens, log-probabilities and ends have the same bits with and without, however tokens are
//! drawn, whatever runs beside a sequence, and wherever its blocks are.

mod common;

use baton_engine::formats::{HuggingFaceModel, ModelSource, RandomModel};
use baton_engine::{
    DraftModel, Engine, EngineConfig, EngineHandle, Load, Model, Run, SequenceControl, SequenceEvent, SequenceRequest,
    SpeculationConfig, SpeculationMethod, StepTime,
};
use baton_kernels::cpu::{CpuConfig, CpuDevice};
use baton_kernels::device::Device;
use baton_kernels::lagging::{LagConfig, Lagging};
use baton_kernels::numerics::Numerics;
use baton_memory::PoolMemory;
use baton_types::{Dtype, FinishReason, GroupKind, KvPoolMap, SamplingParams, TokenId};
use common::{Bits, FOREVER, Sink, bits, cached};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

const MODEL: &str = "random:hidden=66,layers=2,heads=4,kv_heads=2,head_dim=18,ffn=97,vocab=301,context=256,seed=5";

/// Two of three layers have a state.
const STATES: &str = "random:hidden=66,layers=3,heads=4,kv_heads=2,head_dim=18,ffn=97,vocab=301,context=256,seed=5,delta=4,delta_keys=2,\
                      delta_key_dim=14,delta_dim=21,attention_every=3,gate=true";

/// The same with other weights, and one of other tokens.
const OTHER: &str = "random:hidden=66,layers=2,heads=4,kv_heads=2,head_dim=18,ffn=97,vocab=301,context=256,seed=6";
const OTHER_TOKENS: &str = "random:layers=1,vocab=302,context=256";

/// Steps take long beside their rows, so that every likely proposal gets one.
const STEP_TIME: StepTime = StepTime { first: Duration::from_millis(1), row: Duration::from_micros(10) };

/// Those of the draft model take hardly any.
const DRAFT_STEP_TIME: StepTime = StepTime { first: Duration::from_micros(100), row: Duration::from_micros(1) };

#[derive(Clone, Copy, Debug)]
struct Setup {
    method: SpeculationMethod,
    block_tokens: u32,
    /// Blocks of a full group, and of one with a window or of states.
    blocks: [u32; 2],
    chunk: usize,
    running: usize,
    lagging: bool,
    /// Blocks of the draft model's pool, by group as `blocks`.
    draft_blocks: [u32; 2],
}

const ALONE: Setup = Setup {
    method: SpeculationMethod::Off,
    block_tokens: 16,
    blocks: [32, 8],
    chunk: 64,
    running: 1,
    lagging: false,
    draft_blocks: [120, 30],
};

const PROPOSED: Setup = Setup { method: SpeculationMethod::Ngram, ..ALONE };

fn serve(source: &dyn ModelSource, kv: Dtype, setup: Setup) -> EngineHandle {
    serve_with(source, None, kv, setup)
}

fn serve_with(source: &dyn ModelSource, draft: Option<&dyn ModelSource>, kv: Dtype, setup: Setup) -> EngineHandle {
    let config = EngineConfig {
        kv,
        model_len_max: source.spec().context,
        chunk_tokens_max: setup.chunk,
        running_max: setup.running,
        watermark_blocks: 0,
        speculation: SpeculationConfig {
            method: setup.method,
            step_time: Some(STEP_TIME),
            draft_step_time: Some(DRAFT_STEP_TIME),
            ..SpeculationConfig::default()
        },
        ..EngineConfig::default()
    };
    let numerics = if kv == Dtype::F32 { Numerics::F32Fma { weights: Dtype::F32 } } else { Numerics::default() };
    let cpu = CpuDevice::new(CpuConfig { threads: 2, simd: None, numerics }).unwrap();
    let device: Arc<dyn Device> = if setup.lagging { Lagging::new(cpu, LagConfig::default()) } else { cpu };
    let model = Model::load(source, device.as_ref(), config.model_config(), &|_| ()).unwrap();
    let (memory, map) = pool(&model, device.as_ref(), setup.block_tokens, setup.blocks);
    let draft = draft.map(|source| {
        let bounds = config.draft_model_config(source.spec().context);
        let model = Model::load(source, device.as_ref(), bounds, &|_| ()).unwrap();
        let (memory, map) = pool(&model, device.as_ref(), setup.block_tokens, setup.draft_blocks);
        DraftModel::new(model, memory, &map).unwrap()
    });
    Engine::start_with_draft(model, memory, &map, config, draft).unwrap()
}

fn pool(model: &Model, device: &dyn Device, block_tokens: u32, blocks: [u32; 2]) -> (Arc<dyn PoolMemory>, KvPoolMap) {
    let layout = model.layout(block_tokens).unwrap();
    let blocks = layout.groups().iter().map(|group| match group.kind {
        GroupKind::Window(_) | GroupKind::State => blocks[1],
        _ => blocks[0],
    });
    let map = KvPoolMap::with_blocks(layout.clone(), blocks.collect()).unwrap();
    // NaN everywhere: reading what was never stored cannot pass.
    let memory = device.alloc_pool(&map).unwrap();
    memory.write_by(Instant::now() + FOREVER, 0, &vec![0xff; map.bytes()]).unwrap();
    (memory, map)
}

/// All of an answer.
type Answer = (Vec<Bits>, FinishReason);

type Running = (SequenceControl, Receiver<SequenceEvent>);

fn submit(engine: &EngineHandle, request: SequenceRequest) -> Running {
    let (sender, events) = channel();
    (engine.submit(request, Run::Full, Box::new(Sink(sender))).unwrap(), events)
}

fn finish((_control, events): Running) -> Answer {
    let mut output = Vec::new();
    loop {
        match events.recv_timeout(FOREVER).expect("an event") {
            SequenceEvent::Started { .. } | SequenceEvent::Prompt(_) => {}
            SequenceEvent::Token { token, logprobs, .. } => {
                output.push(bits(token, &logprobs.expect("log-probabilities were asked for")));
            }
            SequenceEvent::Finished { reason } => return (output, reason),
            SequenceEvent::Prefilled { .. } => panic!("nobody observes it"),
            SequenceEvent::Failed { message, .. } => panic!("{message}"),
        }
    }
}

fn request(name: String, tokens: &[TokenId], sampling: SamplingParams) -> SequenceRequest {
    cached(common::request(name, tokens.to_vec(), SamplingParams { logprobs: Some(3), ..sampling }))
}

/// Ways to draw among few tokens, so that answers repeat themselves now and then.
fn ways(few: &[TokenId], max_tokens: u32) -> Vec<SamplingParams> {
    let greedy = SamplingParams { max_tokens, ignore_eos: true, ..SamplingParams::default() };
    let drawn = SamplingParams { temperature: 0.9, allowed_token_ids: few.to_vec(), seed: 7, ..greedy.clone() };
    vec![
        greedy.clone(),
        SamplingParams { logit_bias: few.iter().map(|token| (*token, 6.0)).collect(), ..greedy.clone() },
        drawn.clone(),
        SamplingParams { top_p: 0.7, top_k: 2, ..drawn.clone() },
        SamplingParams { frequency_penalty: 0.4, ..drawn.clone() },
        SamplingParams { presence_penalty: -1.0, repetition_penalty: 1.3, ..drawn.clone() },
        SamplingParams { frequency_penalty: 1.5, allowed_token_ids: few.to_vec(), ..greedy.clone() },
        // Ends soon after it may.
        SamplingParams { min_tokens: max_tokens / 2, stop_token_ids: vec![few[0]], ..drawn.clone() },
        SamplingParams { max_tokens: max_tokens / 2 + 1, ..drawn },
    ]
}

fn requests() -> Vec<SequenceRequest> {
    let lengths = [20, 1, 40, 16, 33, 64, 17, 5, 50];
    let mut all = Vec::new();
    for (i, sampling) in ways(&[11, 57, 200], 80).into_iter().enumerate() {
        let tokens: Vec<TokenId> = (0..lengths[i]).map(|t| ((t * t + 7 * i + 3) % 301) as TokenId).collect();
        all.push(request(format!("request-{i}"), &tokens, sampling));
    }
    // Samples of one request.
    let samples: Vec<_> = (1..4).map(|sample_index| SequenceRequest { sample_index, ..all[2].clone() }).collect();
    all.extend(samples);
    all
}

fn answers(engine: &EngineHandle, requests: Vec<SequenceRequest>) -> Vec<Answer> {
    let running: Vec<_> = requests.into_iter().map(|request| submit(engine, request)).collect();
    running.into_iter().map(finish).collect()
}

/// The load of an engine that has come to rest.
fn at_rest(engine: &EngineHandle) -> Load {
    let by = Instant::now() + FOREVER;
    while engine.pool().counts().referenced > 0 {
        assert!(Instant::now() < by, "blocks are held for ever");
        std::thread::sleep(Duration::from_millis(1));
    }
    // The end counts what the last step sampled.
    assert!(engine.stop());
    engine.load()
}

#[test]
fn answers_have_the_bits_that_they_have_without_proposals() {
    [MODEL, STATES].into_iter().for_each(have_the_bits_that_they_have_without_proposals);
}

fn have_the_bits_that_they_have_without_proposals(model: &str) {
    let source = RandomModel::parse(model).unwrap();
    let alone = serve(&source, Dtype::Bf16, ALONE);
    let expected: Vec<Answer> = requests().into_iter().map(|request| finish(submit(&alone, request))).collect();
    assert_eq!(at_rest(&alone).proposed_tokens, 0);
    assert!(expected.iter().any(|(_, reason)| *reason == FinishReason::Stop), "one ends by a token");
    let setups = [
        PROPOSED,
        Setup { running: 16, blocks: [120, 8], ..PROPOSED },
        Setup { running: 8, blocks: [20, 8], chunk: 13, ..PROPOSED },
        Setup { running: 8, blocks: [30, 8], block_tokens: 64, ..PROPOSED },
        Setup { running: 1, lagging: true, ..PROPOSED },
        Setup { running: 8, blocks: [20, 8], lagging: true, ..PROPOSED },
    ];
    let mut preemptions = 0;
    for setup in setups {
        let engine = serve(&source, Dtype::Bf16, setup);
        // In the second round much of it is cached.
        for round in 0..2 {
            for (i, (got, expected)) in answers(&engine, requests()).iter().zip(&expected).enumerate() {
                assert_eq!(got, expected, "request {i} in round {round} with {setup:?}");
            }
        }
        let load = at_rest(&engine);
        let tokens: usize = expected.iter().map(|(tokens, _)| tokens.len()).sum();
        assert_eq!(load.generated_tokens, 2 * tokens as u64, "what was rejected is not counted");
        assert!(load.accepted_tokens > 20, "{setup:?}: {load:?}");
        assert!(load.proposed_tokens > load.accepted_tokens, "{setup:?}: {load:?}");
        preemptions += load.preemptions;
    }
    assert!(preemptions > 0, "some of these pools are too small for all at once");
}

/// Layers `full, window, window`, and `window, window`, and layers with a state.
#[test]
fn windows_and_states_keep_their_bits() {
    for family in ["qwen2", "mistral", "qwen3_5"] {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/families").join(family);
        let source = HuggingFaceModel::open(&folder, None).unwrap();
        let tokens: Vec<TokenId> = serde_json::from_slice(&std::fs::read(folder.join("tokens.json")).unwrap()).unwrap();
        let requests = || {
            let ways = ways(&tokens[..3], (source.spec().context as u32).min(64) - 12);
            let named = ways.into_iter().enumerate();
            named.map(|(i, sampling)| request(format!("request-{i}"), &tokens[..10], sampling)).collect::<Vec<_>>()
        };
        let alone = serve(&source, Dtype::F32, ALONE);
        let expected: Vec<Answer> = requests().into_iter().map(|request| finish(submit(&alone, request))).collect();
        let setups = [
            PROPOSED,
            Setup { running: 4, blocks: [8, 6], chunk: 5, ..PROPOSED },
            Setup { running: 2, blocks: [8, 4], block_tokens: 32, ..PROPOSED },
            Setup { running: 4, blocks: [8, 6], chunk: 5, lagging: true, ..PROPOSED },
        ];
        for setup in setups {
            let engine = serve(&source, Dtype::F32, setup);
            for (i, (got, expected)) in answers(&engine, requests()).iter().zip(&expected).enumerate() {
                assert_eq!(got, expected, "{family}, request {i} with {setup:?}");
            }
            let load = at_rest(&engine);
            assert!(load.accepted_tokens > 0, "{family}, {setup:?}: {load:?}");
        }
    }
}

/// Answers of the test's requests by a model with a draft model, which are those that it gives alone; the load behind them.
fn with_draft(model: &str, expected: &[Answer], draft: &str, setup: Setup) -> Load {
    let (source, draft) = (RandomModel::parse(model).unwrap(), RandomModel::parse(draft).unwrap());
    let engine = serve_with(&source, Some(&draft), Dtype::Bf16, setup);
    for (i, (got, expected)) in answers(&engine, requests()).iter().zip(expected).enumerate() {
        assert_eq!(got, expected, "request {i} with {setup:?}");
    }
    let load = at_rest(&engine);
    assert_eq!(load.draft_blocks, 0, "{setup:?}");
    load
}

#[test]
fn a_draft_model_changes_no_bit() {
    let source = RandomModel::parse(MODEL).unwrap();
    let alone = serve(&source, Dtype::Bf16, ALONE);
    let expected: Vec<Answer> = requests().into_iter().map(|request| finish(submit(&alone, request))).collect();
    at_rest(&alone);
    let setups = [
        PROPOSED,
        Setup { running: 16, blocks: [120, 8], ..PROPOSED },
        Setup { running: 8, blocks: [20, 8], chunk: 13, ..PROPOSED },
        Setup { running: 8, blocks: [60, 8], block_tokens: 64, draft_blocks: [3, 1], ..PROPOSED },
        Setup { running: 8, blocks: [60, 8], lagging: true, ..PROPOSED },
    ];
    // The model itself, which is right wherever nothing is drawn, and another one, which is right by chance.
    let load = |draft, setup| with_draft(MODEL, &expected, draft, setup);
    let loads = setups.map(|setup| (load(MODEL, setup), load(OTHER, setup)));
    assert!(
        loads.iter().all(|(same, other)| same.draft_accepted_tokens > 0 && other.draft_proposed_tokens > 0),
        "{loads:?}"
    );
    assert!(loads.iter().any(|(same, _)| same.preemptions > 0), "one of these pools is too small for all at once");
    let (same, _) = loads[0];
    assert!(
        same.draft_accepted_tokens > 150 && same.draft_accepted_tokens > same.draft_proposed_tokens / 2,
        "{same:?}"
    );
    let proposed = |load: fn(&(Load, Load)) -> u64| loads.iter().map(load).sum::<u64>();
    let (same, other) =
        (proposed(|(same, _)| same.draft_proposed_tokens), proposed(|(_, other)| other.draft_proposed_tokens));
    assert!(other < same / 3, "it ends where it is wrong: {other}, {same} of the model itself");
}

/// A draft model of its own kind may not have states.
#[test]
fn a_draft_model_for_states_changes_no_bit() {
    let source = RandomModel::parse(STATES).unwrap();
    let alone = serve(&source, Dtype::Bf16, ALONE);
    let expected: Vec<Answer> = requests().into_iter().map(|request| finish(submit(&alone, request))).collect();
    at_rest(&alone);
    let setups = [PROPOSED, Setup { running: 8, blocks: [60, 20], ..PROPOSED }];
    let loads = setups.map(|setup| with_draft(STATES, &expected, MODEL, setup));
    assert!(loads.iter().all(|load| load.draft_proposed_tokens > 0), "{loads:?}");
    let refused = std::panic::catch_unwind(|| serve_with(&source, Some(&source), Dtype::Bf16, PROPOSED));
    let message = refused.err().and_then(|error| error.downcast::<String>().ok()).unwrap();
    assert!(message.contains("StatesDrafted"), "{message}");
}

#[test]
fn the_model_itself_is_always_right_where_nothing_is_drawn() {
    let source = RandomModel::parse(MODEL).unwrap();
    for lagging in [false, true] {
        let engine = serve_with(&source, Some(&source), Dtype::Bf16, Setup { lagging, ..PROPOSED });
        let greedy = SamplingParams { max_tokens: 150, ignore_eos: true, ..SamplingParams::default() };
        for seed in 0..4 {
            let tokens: Vec<TokenId> = (0..70).map(|t| (t * t * (seed + 1) + seed) % 301).collect();
            assert_eq!(finish(submit(&engine, request("greedy".into(), &tokens, greedy.clone()))).0.len(), 150);
        }
        let load = at_rest(&engine);
        assert!(load.draft_proposed_tokens > 100, "{load:?}");
        assert_eq!(load.draft_accepted_tokens, load.draft_proposed_tokens, "{load:?}");
    }
}

#[test]
fn draft_models_with_windows_are_right_too() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/families/mistral");
    let source = HuggingFaceModel::open(&folder, None).unwrap();
    let tokens: Vec<TokenId> = serde_json::from_slice(&std::fs::read(folder.join("tokens.json")).unwrap()).unwrap();
    let greedy = SamplingParams { max_tokens: 40, ignore_eos: true, ..SamplingParams::default() };
    let answer =
        |engine: &EngineHandle| finish(submit(engine, request("greedy".into(), &tokens[..10], greedy.clone())));
    let alone = serve(&source, Dtype::F32, ALONE);
    let expected = answer(&alone);
    for draft_blocks in [[30, 30], [8, 4]] {
        let setup = Setup { chunk: 5, draft_blocks, ..PROPOSED };
        let engine = serve_with(&source, Some(&source), Dtype::F32, setup);
        assert_eq!(answer(&engine), expected);
        let load = at_rest(&engine);
        assert!(load.draft_accepted_tokens > 5, "{load:?}");
        assert_eq!(load.draft_accepted_tokens, load.draft_proposed_tokens, "{load:?}");
    }
}

#[test]
fn a_draft_model_of_other_tokens_is_refused() {
    let (source, draft) = (RandomModel::parse(MODEL).unwrap(), RandomModel::parse(OTHER_TOKENS).unwrap());
    let refused = std::panic::catch_unwind(|| serve_with(&source, Some(&draft), Dtype::Bf16, PROPOSED));
    let message = refused.err().and_then(|error| error.downcast::<String>().ok()).unwrap();
    assert!(message.contains("301") && message.contains("302"), "{message}");
}

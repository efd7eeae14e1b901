//! A model with recurrent layers, through the whole engine: the logits that transformers recorded come out, whatever is chunked, decoded, found in
//! the cache, proposed, handed over or late.

mod common;

use baton_engine::formats::{HuggingFaceModel, ModelSource};
use baton_engine::{
    Engine, EngineConfig, EngineHandle, LogitObserver, Model, Run, SequenceEvent, SequenceRequest, SpeculationConfig,
    SpeculationMethod,
};
use baton_kernels::cpu::{CpuConfig, CpuDevice};
use baton_kernels::device::Device;
use baton_kernels::lagging::{LagConfig, Lagging};
use baton_kernels::numerics::Numerics;
use baton_memory::PoolMemory;
use baton_types::{BlockTables, Dtype, GroupKind, KvPoolMap, RequestId, SamplingParams, TokenId};
use common::{FOREVER, Kept, Sink};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Instant;

const FAMILIES: [&str; 2] = ["qwen3_5", "qwen3_5_images"];
const LENGTH: usize = 48;

fn folder(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/families").join(family)
}

/// The prompt, and the logits of each of its positions.
fn recorded(family: &str) -> (Vec<TokenId>, Vec<Vec<f32>>) {
    let tokens = std::fs::read(folder(family).join("tokens.json")).unwrap();
    let tokens: Vec<TokenId> = serde_json::from_slice(&tokens).unwrap();
    let logits = std::fs::read(folder(family).join("logits.f32")).unwrap();
    let logits: Vec<f32> = logits.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    let vocab = logits.len() / tokens.len();
    (tokens, logits.chunks_exact(vocab).map(<[f32]>::to_vec).collect())
}

#[derive(Clone, Copy, Debug)]
struct Setup {
    block_tokens: u32,
    /// States that fit.
    states: u32,
    chunk: usize,
    lagging: bool,
    method: SpeculationMethod,
}

const WIDE: Setup = Setup { block_tokens: 16, states: 8, chunk: 64, lagging: false, method: SpeculationMethod::Off };
/// No more than a sequence needs.
const SMALL: Setup = Setup { states: 2, chunk: 5, ..WIDE };

/// Logits, by the position of the token.
type Rows = BTreeMap<usize, Vec<f32>>;

#[derive(Clone, Default)]
struct Seen(Arc<Mutex<Rows>>);

impl LogitObserver for Seen {
    fn computed(&self, _: &RequestId, position: usize, _: &BlockTables, logits: &[f32]) {
        self.0.lock().unwrap().insert(position, logits.to_vec());
    }
}

struct Served {
    engine: EngineHandle,
    memory: Arc<dyn PoolMemory>,
    map: KvPoolMap,
    seen: Seen,
}

fn serve(family: &str, setup: Setup) -> Served {
    let source = HuggingFaceModel::open(&folder(family), None).unwrap();
    let config = EngineConfig {
        kv: Dtype::F32,
        model_len_max: source.spec().context.min(64),
        chunk_tokens_max: setup.chunk,
        running_max: 2,
        watermark_blocks: 0,
        speculation: SpeculationConfig { method: setup.method, ..SpeculationConfig::default() },
        ..EngineConfig::default()
    };
    let numerics = Numerics::F32Fma { weights: Dtype::F32 };
    let cpu = CpuDevice::new(CpuConfig { threads: 1, simd: None, numerics }).unwrap();
    let device: Arc<dyn Device> = if setup.lagging { Lagging::new(cpu, LagConfig::default()) } else { cpu };
    let model = Model::load(&source, device.as_ref(), config.model_config(), &|_| ()).unwrap();
    let layout = model.layout(setup.block_tokens).unwrap();
    let kinds: Vec<_> = layout.groups().iter().map(|group| group.kind).collect();
    assert_eq!(kinds, [GroupKind::Full, GroupKind::State]);
    let map = KvPoolMap::with_blocks(layout, vec![8, setup.states]).unwrap();
    // NaN everywhere: reading what was never stored cannot pass.
    let memory = device.alloc_pool(&map).unwrap();
    memory.write_by(Instant::now() + FOREVER, 0, &vec![0xff; map.bytes()]).unwrap();
    let engine = Engine::start(model, memory.clone(), &map, config).unwrap();
    let seen = Seen::default();
    engine.set_logit_observer(Some(Arc::new(seen.clone())));
    Served { engine, memory, map, seen }
}

fn request(tokens: &[TokenId], max_tokens: u32) -> SequenceRequest {
    let sampling = SamplingParams { temperature: 0.0, max_tokens, ignore_eos: true, ..SamplingParams::default() };
    common::request("request", tokens.to_vec(), sampling)
}

fn cached(tokens: &[TokenId], max_tokens: u32) -> SequenceRequest {
    common::cached(request(tokens, max_tokens))
}

impl Served {
    fn run(&self, request: SequenceRequest, run: Run) -> Vec<TokenId> {
        let (sender, events) = channel();
        let _control = self.engine.submit(request, run, Box::new(Sink(sender))).unwrap();
        let mut tokens = Vec::new();
        loop {
            match events.recv_timeout(FOREVER).expect("an event") {
                SequenceEvent::Started { .. } | SequenceEvent::Prompt(_) => {}
                SequenceEvent::Token { token, .. } => tokens.push(token),
                SequenceEvent::Prefilled { .. } | SequenceEvent::Finished { .. } => return tokens,
                SequenceEvent::Failed { message, .. } => panic!("{message}"),
            }
        }
    }

    /// What it computed since it was asked last.
    fn take(&self) -> Rows {
        std::mem::take(&mut *self.seen.0.lock().unwrap())
    }

    /// Bits of the logits.
    fn take_bits(&self) -> BTreeMap<usize, Vec<u32>> {
        let bits = |row: Vec<f32>| row.into_iter().map(f32::to_bits).collect();
        self.take().into_iter().map(|(position, row)| (position, bits(row))).collect()
    }
}

/// Prompt by prompt, in chunks.
#[test]
fn prefill_computes_the_recorded_logits() {
    for family in FAMILIES {
        let (tokens, logits) = recorded(family);
        let spread = logits.iter().flatten().fold(0.0f32, |most, x| most.max(x.abs()));
        let setups = [
            WIDE,
            SMALL,
            Setup { lagging: true, ..SMALL },
            Setup { chunk: 1, ..SMALL },
            Setup { block_tokens: 64, chunk: 9, ..SMALL },
            Setup { block_tokens: 32, lagging: true, chunk: 17, ..SMALL },
        ];
        let mut all = Vec::new();
        for setup in setups {
            let served = serve(family, setup);
            let mut rows = Vec::new();
            for len in 1..=tokens.len() {
                served.run(request(&tokens[..len], 1), Run::Full);
                let row = served.take().remove(&len).expect("logits of the last position");
                let difference = row.iter().zip(&logits[len - 1]).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(difference / spread < 2e-5, "{family}, {len} tokens, {setup:?}: {difference}");
                rows.push(row.into_iter().map(f32::to_bits).collect::<Vec<_>>());
            }
            assert_eq!(served.engine.pool().counts().referenced, 0);
            all.push(rows);
        }
        assert!(all.iter().all(|rows| *rows == all[0]), "{family}: no bit depends on chunks, blocks or delays");
    }
}

/// What decode computes has the bits of a prefill of the same tokens, which are the recorded ones (above).
#[test]
fn decode_has_the_bits_of_prefill() {
    for family in FAMILIES {
        let (tokens, _) = recorded(family);
        let whole = serve(family, WIDE);
        let proposed = Setup { method: SpeculationMethod::Ngram, ..SMALL };
        for setup in [SMALL, Setup { lagging: true, ..SMALL }, proposed, Setup { lagging: true, ..proposed }] {
            let served = serve(family, setup);
            let more = served.run(request(&tokens[..5], (LENGTH - 5) as u32), Run::Full);
            let all = [&tokens[..5], &more].concat();
            let seen = served.take_bits();
            assert!(seen.len() >= LENGTH - 5, "{setup:?}");
            for (position, row) in seen {
                whole.run(request(&all[..position], 1), Run::Full);
                assert!(row == whole.take_bits().remove(&position).unwrap(), "{family}, {position} tokens, {setup:?}");
            }
        }
    }
}

#[test]
fn a_cached_prefix_has_the_bits_of_one_that_is_computed() {
    for family in FAMILIES {
        let (tokens, _) = recorded(family);
        let whole = serve(family, WIDE);
        for setup in [WIDE, Setup { states: 4, ..SMALL }, Setup { states: 4, lagging: true, ..SMALL }] {
            let served = serve(family, setup);
            served.run(cached(&tokens[..33], 1), Run::Full);
            served.take();
            let more = served.run(cached(&tokens, 8), Run::Full);
            // A state was left behind the last whole block.
            assert_eq!(served.engine.load().cached_tokens, 32, "{family}, {setup:?}");
            let got = served.take_bits();
            assert_eq!(whole.run(request(&tokens, 8), Run::Full), more);
            assert!(got == whole.take_bits(), "{family}, {setup:?}");
        }
    }
}

/// Copies what the next position needs between pools: KV token by token, and the one state.
fn copy(from: (&Served, &BlockTables), to: (&Served, &BlockTables), tokens: usize) {
    let deadline = Instant::now() + FOREVER;
    for (g, group) in from.0.map.layout().groups().iter().enumerate() {
        let is_state = group.kind == GroupKind::State;
        for (layer, plane) in (0..group.layers.len()).flat_map(|layer| [(layer, 0), (layer, 1)]) {
            for token in if is_state { tokens - 1..tokens } else { 0..tokens } {
                let place = |(served, tables): (&Served, &BlockTables)| {
                    let size = served.map.layout().block_tokens() as usize;
                    let block = tables.0[g].get(token / size).expect("a block that is live");
                    let within = if is_state { 0 } else { (token % size) as u32 };
                    served.map.token_range(g, layer, block, plane, within..within + 1)
                };
                let mut bytes = vec![0; place(from).len()];
                from.0.memory.read_by(deadline, place(from).start, &mut bytes).unwrap();
                to.0.memory.write_by(deadline, place(to).start, &bytes).unwrap();
            }
        }
    }
}

#[test]
fn a_sequence_that_is_handed_over_has_the_bits_it_has_alone() {
    for family in FAMILIES {
        let (tokens, _) = recorded(family);
        for (source, sink) in [(SMALL, Setup { lagging: true, ..SMALL }), (Setup { block_tokens: 32, ..WIDE }, SMALL)] {
            for len in [tokens.len(), 32] {
                let (tokens, source, sink) = (&tokens[..len], serve(family, source), serve(family, sink));
                let expected = source.run(request(tokens, 8), Run::Full);
                let mut bits = source.take_bits();
                let kept = Kept::default();
                let first = source.run(request(tokens, 1), Run::PrefillOnly { observer: Box::new(kept.clone()) });
                let from = kept.0.lock().unwrap().take().expect("blocks");
                let lease = sink.engine.reserve(len, &[]).expect("room");
                assert_eq!(lease.tables().0[1].blocks.len(), 1, "one state");
                copy((&source, from.tables()), (&sink, lease.tables()), len);
                let continued = SequenceRequest { prompt_len: len, ..request(&[tokens, &first].concat(), 8) };
                let more = sink.run(continued, Run::Adopted { lease, turn: None });
                assert_eq!([first, more].concat(), expected, "{family}");
                bits.remove(&len);
                assert!(sink.take_bits() == bits, "{family}, {len} tokens");
            }
        }
    }
}

//! Models that do not keep the whole past in every layer, through the whole engine: some have windows, some recurrent layers. The logits that
//! transformers recorded come out, whatever is chunked, decoded, found in the cache, proposed, handed over or late; and of windows and states, only
//! what is needed is held and moved.

mod common;

use baton_engine::formats::{HuggingFaceModel, ModelSource, RandomModel};
use baton_engine::{
    Engine, EngineConfig, EngineHandle, LogitObserver, Model, Run, SequenceEvent, SequenceRequest, SpeculationConfig,
    SpeculationMethod,
};
use baton_kernels::cpu::{CpuConfig, CpuDevice};
use baton_kernels::device::Device;
use baton_kernels::lagging::{LagConfig, Lagging};
use baton_kernels::numerics::Numerics;
use baton_kv_cache::{Fill, PoolShape, Reserve, SharedPool};
use baton_memory::PoolMemory;
use baton_types::{BlockTables, Dtype, GroupKind, KvPoolMap, RequestId, SamplingParams, TokenId};
use common::{FOREVER, Kept, Sink};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// Tokens that the layers with a window attend to, in both families that have some.
const WINDOW: u32 = 7;
/// Blocks of one full group: two sequences of [`LENGTH`] tokens, with blocks of 16.
const FULL_BLOCKS: u32 = 8;
const LENGTH: usize = 48;

/// Windows in some layers and in all of them, and recurrent layers.
const FAMILIES: [(&str, &[GroupKind]); 4] = [
    ("qwen2", &[GroupKind::Full, GroupKind::Window(WINDOW)]),
    ("mistral", &[GroupKind::Window(WINDOW)]),
    ("qwen3_5", &[GroupKind::Full, GroupKind::State]),
    ("qwen3_5_images", &[GroupKind::Full, GroupKind::State]),
];

fn folder(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/families").join(family)
}

/// The prompt, and the logits of each of its positions.
fn recorded(family: &str) -> (Vec<TokenId>, Vec<Vec<f32>>) {
    let tokens = std::fs::read(folder(family).join("tokens.json")).unwrap();
    let tokens: Vec<TokenId> = serde_json::from_slice(&tokens).unwrap();
    let logits = std::fs::read(folder(family).join("logits.f32")).unwrap();
    let logits: Vec<f32> = logits.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    let vocab = logits.len() / tokens.len();
    (tokens, logits.chunks_exact(vocab).map(<[f32]>::to_vec).collect())
}

#[derive(Clone, Copy, Debug)]
struct Setup {
    block_tokens: u32,
    /// Blocks of the group with the window, or states.
    other_blocks: u32,
    chunk: usize,
    lagging: bool,
    method: SpeculationMethod,
}

const WIDE: Setup =
    Setup { block_tokens: 16, other_blocks: 8, chunk: 64, lagging: false, method: SpeculationMethod::Off };
/// No more than a sequence needs, which is less than a prompt: 6 tokens before two chunks of 5 are in two blocks of 16 at most, and the state
/// before a step and the one behind it are two.
const SMALL: Setup = Setup { other_blocks: 2, chunk: 5, ..WIDE };

/// What was computed for a token.
struct Row {
    logits: Vec<f32>,
    /// The sequence's tables then.
    tables: BlockTables,
}

/// By the position of the token.
type Rows = BTreeMap<usize, Row>;

#[derive(Clone, Default)]
struct Seen(Arc<Mutex<Rows>>);

impl LogitObserver for Seen {
    fn computed(&self, _: &RequestId, position: usize, blocks: &BlockTables, logits: &[f32]) {
        self.0.lock().unwrap().insert(position, Row { logits: logits.to_vec(), tables: blocks.clone() });
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
    let blocks = layout.groups().iter().map(|group| match group.kind {
        GroupKind::Full => FULL_BLOCKS,
        _ => setup.other_blocks,
    });
    let map = KvPoolMap::with_blocks(layout.clone(), blocks.collect()).unwrap();
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

fn finish(events: &Receiver<SequenceEvent>) -> Vec<TokenId> {
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

impl Served {
    fn run(&self, request: SequenceRequest, run: Run) -> Vec<TokenId> {
        let (sender, events) = channel();
        let _control = self.engine.submit(request, run, Box::new(Sink(sender))).unwrap();
        finish(&events)
    }

    /// What it computed since it was asked last, by position.
    fn take(&self) -> Rows {
        std::mem::take(&mut *self.seen.0.lock().unwrap())
    }

    /// Bits of the logits.
    fn take_bits(&self) -> BTreeMap<usize, Vec<u32>> {
        let bits = |row: Row| row.logits.into_iter().map(f32::to_bits).collect();
        self.take().into_iter().map(|(position, row)| (position, bits(row))).collect()
    }

    /// A table begins with the block that the first position computed last attends to, and none is later than the last position.
    fn check_held(&self, tables: &BlockTables, positions: std::ops::Range<usize>) {
        let size = self.map.layout().block_tokens() as usize;
        let groups = tables.0.iter().zip(self.map.layout().groups());
        for (table, group) in groups.filter(|(_, group)| group.kind.is_by_position()) {
            let live = group.kind.live(positions.clone(), size);
            assert_eq!(table.first, live.start, "{:?}, {positions:?}", group.kind);
            assert!(table.covers(&live) && table.end() <= LENGTH / 16 + 1, "{table:?}");
        }
    }
}

/// Prompt by prompt, in chunks.
#[test]
fn prefill_computes_the_recorded_logits_and_holds_what_it_needs() {
    for (family, kinds) in FAMILIES {
        let (tokens, logits) = recorded(family);
        let spread = logits.iter().flatten().fold(0.0f32, |most, x| most.max(x.abs()));
        let setups = [
            WIDE,
            SMALL,
            Setup { lagging: true, ..SMALL },
            Setup { chunk: 1, ..SMALL },
            Setup { block_tokens: 64, chunk: 9, ..SMALL },
            Setup { block_tokens: 32, lagging: true, chunk: 9, ..SMALL },
            Setup { block_tokens: 32, lagging: true, chunk: 17, ..SMALL },
        ];
        let mut all = Vec::new();
        for setup in setups {
            let served = serve(family, setup);
            let groups: Vec<GroupKind> = served.map.layout().groups().iter().map(|group| group.kind).collect();
            assert_eq!(groups, kinds);
            let mut rows = Vec::new();
            for len in 1..=tokens.len() {
                served.run(request(&tokens[..len], 1), Run::Full);
                let Row { logits: row, tables } = served.take().remove(&len).expect("logits of the last position");
                let difference = row.iter().zip(&logits[len - 1]).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(difference / spread < 2e-5, "{family}, {len} tokens, {setup:?}: {difference}");
                let last_chunk = (len - 1) / setup.chunk * setup.chunk..len;
                if !setup.lagging {
                    served.check_held(&tables, last_chunk);
                }
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
fn decode_exchanges_blocks_and_has_the_bits_of_prefill() {
    for (family, _) in FAMILIES {
        let (tokens, _) = recorded(family);
        let whole = serve(family, WIDE);
        let proposed = Setup { method: SpeculationMethod::Ngram, ..SMALL };
        for setup in [SMALL, Setup { lagging: true, ..SMALL }, proposed, Setup { lagging: true, ..proposed }] {
            let served = serve(family, setup);
            let more = served.run(request(&tokens[..5], (LENGTH - 5) as u32), Run::Full);
            let seen = served.take();
            assert!(seen.len() >= LENGTH - 5, "{setup:?}");
            // A step has one row, so that what it holds is known.
            let is_row_by_row = !setup.lagging && setup.method == SpeculationMethod::Off;
            for (position, row) in seen.iter().filter(|(position, _)| **position > 5 && is_row_by_row) {
                served.check_held(&row.tables, position - 1..*position);
            }
            let all = [&tokens[..5], &more].concat();
            for (position, row) in seen {
                whole.run(request(&all[..position], 1), Run::Full);
                let want = whole.take_bits().remove(&position).unwrap();
                assert!(row.logits.into_iter().map(f32::to_bits).eq(want), "{family}, {position} tokens, {setup:?}");
            }
        }
    }
}

#[test]
fn a_cached_prefix_has_the_bits_of_one_that_is_computed() {
    for (family, _) in FAMILIES {
        let (tokens, _) = recorded(family);
        let whole = serve(family, WIDE);
        let more = Setup { other_blocks: 4, ..SMALL };
        for setup in [WIDE, Setup { other_blocks: 3, ..SMALL }, more, Setup { lagging: true, ..more }] {
            let served = serve(family, setup);
            served.run(cached(&tokens[..33], 1), Run::Full);
            served.take();
            let more = served.run(cached(&tokens, 8), Run::Full);
            // Behind the last whole block, a state was left too.
            assert_eq!(served.engine.load().cached_tokens, 32, "{family}, {setup:?}");
            let got = served.take_bits();
            assert_eq!(whole.run(request(&tokens, 8), Run::Full), more);
            assert!(got == whole.take_bits(), "{family}, {setup:?}");
        }
    }
}

/// Copies what the next position needs between pools: KV token by token, and of states the one.
fn copy(from: (&Served, &BlockTables), to: (&Served, &BlockTables), tokens: usize) {
    let deadline = Instant::now() + FOREVER;
    for (g, group) in from.0.map.layout().groups().iter().enumerate() {
        let first = match group.kind {
            GroupKind::Window(window) => (tokens + 1).saturating_sub(window as usize),
            GroupKind::State => tokens - 1,
            _ => 0,
        };
        for (layer, plane) in (0..group.layers.len()).flat_map(|layer| [(layer, 0), (layer, 1)]) {
            for token in first..tokens {
                let place = |(served, tables): (&Served, &BlockTables)| {
                    let size = served.map.layout().block_tokens() as usize;
                    let block = tables.0[g].get(token / size).expect("a block that is live");
                    let within = if group.kind.is_by_position() { (token % size) as u32 } else { 0 };
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
    for (family, _) in FAMILIES {
        let (tokens, _) = recorded(family);
        for (source, sink) in [(SMALL, Setup { lagging: true, ..SMALL }), (Setup { block_tokens: 32, ..WIDE }, SMALL)] {
            for tokens in [&tokens[..], &tokens[..32]] {
                let (source, sink) = (serve(family, source), serve(family, sink));
                let expected = source.run(request(tokens, 8), Run::Full);
                let mut bits = source.take_bits();
                let kept = Kept::default();
                let first = source.run(request(tokens, 1), Run::PrefillOnly { observer: Box::new(kept.clone()) });
                let from = kept.0.lock().unwrap().take().expect("blocks");
                let lease = sink.engine.reserve(tokens.len(), &[]).expect("room");
                let size = sink.map.layout().block_tokens() as usize;
                for (table, group) in lease.tables().0.iter().zip(sink.map.layout().groups()) {
                    let first = group.kind.first_for(tokens.len(), size);
                    assert_eq!(table.indices(), first..tokens.len().div_ceil(size), "{:?}", group.kind);
                    assert!(group.kind != GroupKind::State || table.blocks.len() == 1, "one state");
                }
                copy((&source, from.tables()), (&sink, lease.tables()), tokens.len());
                let continued = SequenceRequest { prompt_len: tokens.len(), ..request(&[tokens, &first].concat(), 8) };
                let more = sink.run(continued, Run::Adopted { lease, turn: None });
                assert_eq!([first, more].concat(), expected, "{family}");
                bits.remove(&tokens.len());
                assert!(sink.take_bits() == bits, "{family}, {} tokens", tokens.len());
            }
        }
    }
}

/// Sequences of so many tokens that a pool holds at once, each in decode.
fn sequences_in(map: &KvPoolMap, tokens: usize) -> usize {
    let pool = SharedPool::try_new(PoolShape::from(map)).unwrap();
    let decoding = || {
        let (fill, now) = (Fill::Received { peer_block_tokens: None }, Instant::now());
        pool.try_reserve(Reserve { hashes: &[], reuse_tokens_max: 0, tokens, fill, keep_free: &[], now })
    };
    std::iter::from_fn(decoding).collect::<Vec<_>>().len()
}

/// Layers, heads and windows of gpt-oss-20b, in the memory of half as many sequences as run at once.
#[test]
fn a_pool_of_gpt_oss_holds_nearly_twice_the_sequences_of_uniform_blocks() {
    let shape =
        "random:layers=24,heads=64,kv_heads=8,head_dim=64,hidden=64,vocab=300,window=128,full_every=2,context=131072";
    let model = RandomModel::parse(shape).unwrap();
    let layout = model.spec().kv_layout(16, Dtype::Bf16).unwrap();
    let layers: Vec<_> = layout.groups().iter().map(|group| (group.kind, group.layers.len())).collect();
    assert_eq!(layers, [(GroupKind::Full, 12), (GroupKind::Window(128), 12)]);
    for tokens in [8_192, 32_768, 131_072] {
        let config = EngineConfig { model_len_max: tokens, ..EngineConfig::default() };
        let uniform = config.running_max / 2;
        let kv_cache_bytes = (uniform * tokens * layout.bytes_per_token()) as u64;
        let config = EngineConfig { kv_cache_bytes, ..config };
        let pool = config.pool_map(layout.clone()).unwrap();
        assert!(pool.bytes() as u64 <= kv_cache_bytes);
        // The same memory with as many blocks in each group.
        let blocks = u32::try_from(kv_cache_bytes / layout.bytes_per_block() as u64).unwrap();
        let of_uniform = KvPoolMap::with_blocks(layout.clone(), vec![blocks; 2]).unwrap();
        assert_eq!(sequences_in(&of_uniform, tokens), uniform, "{tokens} tokens");
        let held = sequences_in(&pool, tokens);
        assert!(held as f64 >= 1.9 * uniform as f64, "{held} sequences of {tokens} tokens, not {uniform}");
    }
}

//! SmolLM2 on the CPU backend with blocks for every case.

use crate::golden::Golden;
use baton_engine::formats::GgufModel;
use baton_engine::model::{Model, ModelConfig};
use baton_kernels::adapter::AdapterBounds;
use baton_kernels::cpu::{self, CpuConfig};
use baton_kernels::numerics::Numerics;
use baton_kernels::step::{StepSegment, TableSteps};
use baton_memory::HostPool;
use baton_types::{BlockId, BlockTable, Dtype, KvPoolMap, TokenId};
use std::path::PathBuf;
use std::sync::Arc;

/// Rows of one step: large enough for full GEMMs, small enough to cut the longest prompts into several chunks.
const ROWS_MAX: usize = 512;

/// Logit rows of one step: 256 rows of this vocabulary are 50 MB.
const LOGIT_ROWS_MAX: usize = 256;

const BLOCK_TOKENS: u32 = 16;

/// The model and where each case keeps its KV.
pub(crate) struct Rig {
    model: Model,
    memory: Arc<HostPool>,
    map: KvPoolMap,
    blocks: Vec<Vec<BlockId>>,
    steps: TableSteps,
}

/// Tokens to compute for one case.
pub(crate) struct Rows<'a> {
    pub(crate) sequence: usize,
    pub(crate) tokens: &'a [TokenId],
    /// Position of the first of them.
    pub(crate) position: usize,
    /// First of them whose logits are wanted; all later ones are too.
    pub(crate) wanted: usize,
}

/// `BATON_TEST_MODEL`, or where `scripts/fetch-model` puts the default model.
fn model_path() -> PathBuf {
    let path = std::env::var_os("BATON_TEST_MODEL").map_or_else(cached_model, PathBuf::from);
    let help = "run scripts/fetch-model (make test does), or set BATON_TEST_MODEL to SmolLM2-135M-Instruct.Q4_1.gguf";
    assert!(path.is_file(), "{} is not there: {help}", path.display());
    path
}

fn cached_model() -> PathBuf {
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = cache.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")));
    cache.expect("HOME is set").join("baton/models/smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf")
}

impl Rig {
    pub(crate) fn new(numerics: Numerics, kv: Dtype, cases: &[Golden]) -> Self {
        let source = GgufModel::open(&model_path(), None).expect("a model that can be served");
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
        let device = cpu::device(CpuConfig { threads, simd: None, numerics }).expect("a device");
        let (rows_max, logit_rows_max, slots_max) = (ROWS_MAX, LOGIT_ROWS_MAX, cases.len());
        let config = ModelConfig {
            kv,
            rows_max,
            logit_rows_max,
            slots_max,
            model_len_max: 2048,
            adapters: AdapterBounds::default(),
        };
        let mut model = Model::load(&source, &*device, config, &|_| ()).expect("weights");
        let layout = model.layout(BLOCK_TOKENS).expect("a layout");
        let mut next = 0;
        let blocks = cases.iter().map(|case| {
            let first = next;
            next += layout.blocks_for(case.forced().len()) as u32;
            (first..next).map(BlockId).collect()
        });
        let blocks = blocks.collect();
        let map = KvPoolMap::try_new(layout, next).expect("a pool");
        let memory = HostPool::filled(map.bytes(), 0xff).unwrap();
        model.bind(memory.clone(), &map).expect("a matching pool");
        Self { model, memory, map, blocks, steps: TableSteps::default() }
    }

    /// Fills the KV of a case from `position` on with NaN: whoever reads it before storing it is found out.
    pub(crate) fn forget(&self, sequence: usize, position: usize) {
        let tokens = BLOCK_TOKENS as usize;
        let group = &self.map.layout().groups()[0];
        for (i, &block) in self.blocks[sequence].iter().enumerate().skip(position / tokens) {
            let first = position.saturating_sub(i * tokens) as u32;
            for (layer, plane) in (0..group.layers.len()).flat_map(|l| (0..group.planes.len()).map(move |p| (l, p))) {
                let range = self.map.token_range(0, layer, block, plane, first..BLOCK_TOKENS);
                self.memory.copy_in(range.start, &vec![0xff; range.len()]);
            }
        }
    }

    /// Computes all rows, as many a step as fit, and calls `each` with case and logits of every wanted row, in order.
    pub(crate) fn run(&mut self, mut todo: Vec<Rows<'_>>, each: &mut dyn FnMut(usize, &[f32])) {
        while !todo.is_empty() {
            let (mut ids, mut segments, mut logit_rows) = (Vec::new(), Vec::new(), Vec::new());
            let mut owners = Vec::new();
            for rows in &mut todo {
                let first = ids.len();
                let room_for_logits = rows.wanted + LOGIT_ROWS_MAX - owners.len();
                let n = rows.tokens.len().min(ROWS_MAX - first).min(room_for_logits);
                if n == 0 {
                    break;
                }
                let (now, later) = rows.tokens.split_at(n);
                ids.extend(now);
                let blocks = self.blocks[rows.sequence].clone();
                segments.push(StepSegment { position: rows.position, rows: n, table: BlockTable::from_start(blocks) });
                logit_rows.extend((rows.wanted..n).map(|row| first + row));
                owners.extend((rows.wanted..n).map(|_| rows.sequence));
                (rows.tokens, rows.position, rows.wanted) = (later, rows.position + n, rows.wanted.saturating_sub(n));
            }
            todo.retain(|rows| !rows.tokens.is_empty());
            let step = self.steps.step(ids, segments, logit_rows, 0);
            self.model.launch(&step, &mut |_, _| ()).expect("a step");
            let logits = self.model.finish().expect("a step").logits;
            owners.iter().enumerate().for_each(|(i, &sequence)| each(sequence, logits.row(i)));
        }
    }
}

//! The subject of a reference run: a model, the backends that compute it, and the requests.

use super::case::Setup;
use super::quantized::Quantized;
use baton_engine::formats::{ModelSource, RandomModel};
use baton_engine::{PrefixUse, SequenceRequest};
use baton_kernels::cpu::{self, CpuConfig};
use baton_kernels::cuda;
use baton_kernels::device::Device;
use baton_kernels::lagging::{LagConfig, Lagging};
use baton_kernels::mutant::{Mutant, MutantKind};
use baton_kernels::numerics::{K_SLAB, Numerics, PARTITIONS_MAX};
use baton_kernels::reference::ReferenceDevice;
use baton_kernels::storage::StorageFormat;
use baton_kv_cache::PrefixHasher;
use baton_types::{Digest, RequestId, SamplingParams, Share, TokenId};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest time of a request: far above the duration of a case on a busy machine.
pub(super) const PATIENCE: Duration = Duration::from_secs(240);

/// Tokens that a [`World::long`] knows.
const LONG_VOCAB: usize = 67;

/// The kind of backends of a world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// SIMD on 1 or more threads.
    Cpu,
    /// Scalar, without threads.
    Reference,
    /// A recorded GPU, of a tensor-core class: every kernel's host twin, late.
    Recorded,
    /// GEMM slabs depend on the number of rows.
    RowCount,
    /// Attention slabs depend on the chunk's start.
    ChunkStart,
    /// GEMM slabs depend on the number of threads.
    ThreadCount,
    /// Splits of attention depend on the chunk's start: only a [`World::long`] shows it.
    SplitStart,
}

impl Family {
    /// The mutants that short prompts show: each must be caught.
    pub const MUTANTS: [Self; 3] = [Self::RowCount, Self::ChunkStart, Self::ThreadCount];

    /// A device of this family.
    pub(super) fn device(self, numerics: Numerics, setup: &Setup) -> anyhow::Result<Arc<dyn Device>> {
        let &Setup { threads, simd, lagging, .. } = setup;
        let device: Arc<dyn Device> = match self {
            Self::Cpu => cpu::device(CpuConfig { threads, simd, numerics })?,
            Self::Recorded => match numerics {
                Numerics::TensorCore { cores, half } => cuda::recorded(cores, half),
                other => anyhow::bail!("a GPU does not compute {other}"),
            },
            Self::Reference => ReferenceDevice::new(numerics),
            Self::RowCount => Mutant::new(MutantKind::RowCount, numerics),
            Self::ChunkStart => Mutant::new(MutantKind::ChunkStart, numerics),
            Self::ThreadCount => Mutant::new(MutantKind::ThreadCount { threads }, numerics),
            Self::SplitStart => Mutant::new(MutantKind::SplitStart, numerics),
        };
        // A GPU is late by itself.
        Ok(if lagging && self != Self::Recorded { Lagging::new(device, LagConfig::default()) } else { device })
    }
}

/// A model with requests for it.
pub struct World {
    /// The kind of backends.
    pub family: Family,
    /// What they compute.
    pub numerics: Numerics,
    pub(super) source: Arc<dyn ModelSource>,
    /// In which the matrices of a random model are stored.
    pub(super) formats: Vec<StorageFormat>,
    pub(super) requests: Vec<SequenceRequest>,
}

impl World {
    /// Requests with these prompts and between half of `outputs` and `outputs` tokens each, greedy and sampled, with and without
    /// penalties.
    pub fn new(
        family: Family,
        numerics: Numerics,
        source: Arc<dyn ModelSource>,
        prompts: Vec<Vec<TokenId>>,
        outputs: u32,
    ) -> Self {
        let requests = prompts.into_iter().enumerate().map(|(index, tokens)| request(index, tokens, outputs)).collect();
        Self { family, numerics, source, formats: Vec::new(), requests }
    }

    /// A small random model and one request for each of `lengths`.
    ///
    /// No dimension is a multiple of any tile. Every GEMM has a K of two slabs of 256 and a ragged third (with two KV heads, attention output
    /// has two partitions of a slab and a ragged second); `lengths` over 128 reach into a third attention slab of 64. With an even seed, K
    /// of attention output and MLP down is in four partitions, of two and of three slabs, the last of each ragged.
    ///
    /// In `i8x32`, matrices are stored in quantized formats: every K is an odd number of blocks of 32, that of MLP down three super-blocks of
    /// 256. Two layers have all formats but Q5_K, whose products the kernels' own test compares.
    pub fn random(
        family: Family,
        numerics: Numerics,
        seed: u64,
        layers: usize,
        lengths: &[usize],
        outputs: u32,
    ) -> anyhow::Result<Self> {
        Self::random_with(family, numerics, seed, lengths, outputs, &format!("layers={layers}"))
    }

    /// [`World::random`] of two layers, whose tokens attend to the last `window` ones.
    pub fn windowed(
        family: Family,
        numerics: Numerics,
        seed: u64,
        window: u32,
        lengths: &[usize],
        outputs: u32,
    ) -> anyhow::Result<Self> {
        Self::random_with(family, numerics, seed, lengths, outputs, &format!("layers=2,window={window}"))
    }

    /// [`World::random`] of three layers: the tokens of two attend to the last `window` ones, those of the last, which has no rotary embedding, to all.
    pub fn mixed(
        family: Family,
        numerics: Numerics,
        seed: u64,
        window: u32,
        lengths: &[usize],
        outputs: u32,
    ) -> anyhow::Result<Self> {
        Self::random_with(
            family,
            numerics,
            seed,
            lengths,
            outputs,
            &format!("layers=3,window={window},full_every=3,nope_every=3"),
        )
    }

    /// A small model of two layers for prompts of several splits of attention, with quantized matrices in each class.
    pub fn long(
        family: Family,
        numerics: Numerics,
        seed: u64,
        lengths: &[usize],
        outputs: u32,
    ) -> anyhow::Result<Self> {
        let context = lengths.iter().max().unwrap_or(&0) + outputs as usize + 1;
        let spec = format!(
            "random:hidden=64,heads=3,kv_heads=1,head_dim=32,ffn=96,vocab={LONG_VOCAB},context={context},layers=2,seed={seed}"
        );
        let prompts = prompts(&mut StdRng::seed_from_u64(seed), LONG_VOCAB, lengths);
        Self::quantized(family, numerics, RandomModel::parse(&spec)?, prompts, outputs)
    }

    fn random_with(
        family: Family,
        numerics: Numerics,
        seed: u64,
        lengths: &[usize],
        outputs: u32,
        layers: &str,
    ) -> anyhow::Result<Self> {
        let mut rng = StdRng::seed_from_u64(seed);
        // Odd, so that no power of two divides them and K is one partition.
        let mut odd = |low: usize, high: usize| low + 2 * rng.random_range(0..(high - low) / 2);
        let (mut hidden, mut ffn, vocab) = (odd(521, 601), odd(523, 621), odd(257, 339));
        let (mut kv_heads, mut group) = [(1, 5), (2, 3), (3, 2), (1, 6)][odd(1, 9) / 2];
        if seed.is_multiple_of(2) {
            (ffn, kv_heads, group) = (4 * odd(551, 601), 4, 3);
        }
        // Twice an odd number: over 512 for all heads together.
        let mut head_dim = 2 * odd(53, 63);
        if numerics == Numerics::I8x32 {
            (hidden, ffn) = (32 * odd(17, 21), 3 * 256);
            (kv_heads, group) = [(1, 16), (2, 8), (4, 4)][odd(1, 7) / 2];
            head_dim = 2 * odd(17, 23);
        }
        if family == Family::Recorded {
            // Whole vectors of GPU kernels.
            [&mut hidden, &mut ffn, &mut head_dim].into_iter().for_each(|size| *size = size.next_multiple_of(8));
        }
        let tied = odd(1, 5) == 1;
        let heads = kv_heads * group;
        let spec = format!(
            "random:hidden={hidden},heads={heads},kv_heads={kv_heads},head_dim={head_dim},ffn={ffn},vocab={vocab},\
             context=256,tied={tied},seed={seed},{layers}"
        );
        let prompts = prompts(&mut rng, vocab, lengths);
        let model = RandomModel::parse(&spec)?;
        if numerics == Numerics::I8x32 {
            return Self::quantized(family, numerics, model, prompts, outputs);
        }
        let world = Self::new(family, numerics, Arc::new(model), prompts, outputs);
        Ok(Self { formats: vec![StorageFormat::F32], ..world })
    }

    fn quantized(
        family: Family,
        numerics: Numerics,
        model: RandomModel,
        prompts: Vec<Vec<TokenId>>,
        outputs: u32,
    ) -> anyhow::Result<Self> {
        let model = Quantized::new(model)?;
        let formats = model.formats();
        Ok(Self { formats, ..Self::new(family, numerics, Arc::new(model), prompts, outputs) })
    }

    /// Adds `more` samples of a request: they differ from it only in their random numbers.
    pub fn with_samples(mut self, of: usize, more: u32) -> Self {
        for sample_index in 1..=more {
            let id = name(self.requests.len());
            self.requests.push(SequenceRequest { id, sample_index, ..self.requests[of].clone() });
        }
        self
    }

    /// The model's name, which fully describes a random model.
    pub fn model(&self) -> &str {
        self.source.name()
    }

    /// Number of requests.
    pub fn requests(&self) -> usize {
        self.requests.len()
    }

    /// Partitions of K, and slabs of each, of attention output and of MLP down.
    pub(super) fn splits(&self) -> [[usize; 2]; 2] {
        // The layers of a random model are alike.
        let layer = &self.source.spec().layers[0];
        let split = |k: usize, extent: usize| {
            let partitioned = matches!(self.numerics, Numerics::F32Fma { .. });
            let parts = if partitioned { (1 << extent.trailing_zeros()).min(PARTITIONS_MAX) } else { 1 };
            [parts, (k / parts).div_ceil(K_SLAB)]
        };
        [split(layer.attention.attended_dim(), layer.attention.kv_heads), split(layer.ffn, layer.ffn)]
    }

    /// Most tokens of one request, prompt and output.
    pub(super) fn len_max(&self) -> usize {
        self.requests.iter().map(|r| r.prompt_len + r.sampling.max_tokens as usize).max().unwrap_or(0)
    }
}

/// Most prompts share half or all of their tokens with another one.
fn prompts(rng: &mut StdRng, vocab: usize, lengths: &[usize]) -> Vec<Vec<TokenId>> {
    let mut prompts: Vec<Vec<TokenId>> = Vec::new();
    for &len in lengths {
        let common = match prompts.iter().max_by_key(|other| other.len()) {
            Some(other) if rng.random_range(0..3) > 0 => {
                other[..other.len().min(len - rng.random_range(0..=len / 2))].to_vec()
            }
            _ => vec![],
        };
        let own = (common.len()..len).map(|_| rng.random_range(0..vocab as TokenId));
        prompts.push(common.into_iter().chain(own).collect());
    }
    prompts
}

fn request(index: usize, tokens: Vec<TokenId>, outputs: u32) -> SequenceRequest {
    let sampling = SamplingParams {
        temperature: if index.is_multiple_of(3) { 0.0 } else { 1.2 },
        top_p: if index % 4 == 1 { 0.9 } else { 1.0 },
        repetition_penalty: if index.is_multiple_of(2) { 1.2 } else { 1.0 },
        frequency_penalty: if index.is_multiple_of(5) { 0.3 } else { 0.0 },
        seed: index as u64,
        // So that they leave the batch at different steps.
        max_tokens: outputs - (index as u32 * 3) % (outputs / 2),
        ignore_eos: true,
        ..SamplingParams::default()
    };
    SequenceRequest {
        id: name(index),
        prompt_len: tokens.len(),
        prefix: Some(prefix(&tokens)),
        tokens,
        sampling,
        sample_index: 0,
        deadline: Instant::now() + PATIENCE,
        priority: 0,
        share: Share::default(),
        adapter: None,
    }
}

/// All requests share their prefixes.
pub(super) fn prefix(tokens: &[TokenId]) -> PrefixUse {
    PrefixUse::new(PrefixHasher::new(&Digest([1; 32]), b""), tokens)
}

/// Requests are named by their index.
fn name(index: usize) -> RequestId {
    RequestId::try_new(format!("request-{index}")).expect("a short name")
}

/// Inverse of `name`.
pub(super) fn index_of(id: &RequestId) -> usize {
    id.as_str().rsplit('-').next().and_then(|n| n.parse().ok()).expect("a request of this harness")
}

//! Groups of a pool as kernels address them: planes of keys and of values or of states, and the place of each layer. Offsets, whatever memory they are in.

use crate::device::{Bounds, DeviceError};
use crate::program::Program;
use crate::step::{GroupLimits, StepLimits, StepSegment};
use baton_types::{BlockId, BlockTable, Dtype, GroupKind, KvGroup, KvPoolMap};
use std::ops::Range;

/// The plane that is keys and values.
const LATENT: &str = "latent";

/// The planes of a group of states: inputs of the convolution `[inputs, channels]`, and the states of the heads `[heads, key_dim * value_dim]`.
const STATE: [&str; 2] = ["conv", "state"];

/// Contiguous tokens within one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) block: BlockId,
    /// First token, counted within the block.
    pub(crate) token: usize,
    pub(crate) tokens: usize,
}

/// What a layer stores, as a pool and a program have it.
#[allow(missing_docs, reason = "the names of fields say it")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stored {
    /// Keys and values.
    Heads {
        heads: usize,
        dim: usize,
    },
    Latent {
        dim: usize,
    },
    /// Elements of a head's state, and inputs of the convolution that are kept.
    State {
        heads: usize,
        dim: usize,
        inputs: usize,
        channels: usize,
    },
}

impl std::fmt::Display for Stored {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Heads { heads, dim } => write!(f, "({heads}, {dim}) [heads, dim] of keys and values"),
            Self::Latent { dim } => write!(f, "(1, {dim}) [heads, dim] of a latent"),
            Self::State { heads, dim, inputs, channels } => {
                write!(f, "({heads}, {dim}) [heads, elements] of a state, with ({inputs}, {channels}) inputs")
            }
        }
    }
}

impl Run {
    /// All of a state.
    fn state(block: BlockId) -> Self {
        Self { block, token: 0, tokens: 1 }
    }
}

/// One group of a pool, checked to have what a layer needs: planes `k` and `v`, or a plane `latent`, which is both, or, of states, planes `conv`
/// and `state`. A value of a latent is the beginning of its token's key.
#[derive(Clone, Debug)]
pub struct GroupLayout {
    map: KvPoolMap,
    group: usize,
    /// Keys, or the inputs of a convolution.
    k: usize,
    /// Values, or the states of heads.
    v: usize,
}

impl GroupLayout {
    /// Checks that the group has what a layer needs: planes `k` and `v` of equal heads and dim, or one plane `latent` of one head, or, of states,
    /// planes `conv` and `state` in f32.
    ///
    /// # Panics
    /// If the layout has no such group.
    pub(crate) fn try_new(map: &KvPoolMap, group: usize) -> Result<Self, DeviceError> {
        let refuse = |message: String| Err(DeviceError::Shape { op: "bind", message });
        let KvGroup { kind, planes, .. } = &map.layout().groups()[group];
        if *kind == GroupKind::State {
            let names: Vec<_> = planes.iter().map(|plane| (plane.name(), plane.dtype())).collect();
            if names != STATE.map(|name| (name, Dtype::F32)) {
                return refuse(format!(
                    "group {group} of kind {kind:?} needs planes {STATE:?} in f32, it has {names:?}"
                ));
            }
            return Ok(Self { map: map.clone(), group, k: 0, v: 1 });
        }
        if let [plane] = planes.as_slice()
            && (plane.name(), plane.heads()) == (LATENT, 1)
        {
            return Ok(Self { map: map.clone(), group, k: 0, v: 0 });
        }
        if *kind == GroupKind::Latent {
            return refuse(format!("group {group} needs one plane `{LATENT}` of one head"));
        }
        let plane = |name| planes.iter().position(|p| p.name() == name);
        let (Some(k), Some(v)) = (plane("k"), plane("v")) else {
            return refuse(format!("group {group} needs planes k and v"));
        };
        let shape = |p: usize| (planes[p].heads(), planes[p].dim());
        if shape(k) != shape(v) {
            return refuse(format!("k is {:?} [heads, dim] but v is {:?}", shape(k), shape(v)));
        }
        Ok(Self { map: map.clone(), group, k, v })
    }

    fn group(&self) -> &KvGroup {
        &self.map.layout().groups()[self.group]
    }

    /// Bytes of the whole pool.
    pub(crate) fn pool_bytes(&self) -> usize {
        self.map.bytes()
    }

    /// Number of KV heads.
    pub fn heads(&self) -> usize {
        self.group().planes[self.k].heads() as usize
    }

    /// Elements of one head's key, and of its value unless the group is latent.
    pub fn dim(&self) -> usize {
        self.group().planes[self.k].dim() as usize
    }

    /// Whether its blocks hold states.
    pub(crate) fn is_state(&self) -> bool {
        self.kind() == GroupKind::State
    }

    /// What each of its layers stores.
    pub(crate) fn stored(&self) -> Stored {
        let of =
            |plane: usize| (self.group().planes[plane].heads() as usize, self.group().planes[plane].dim() as usize);
        let (heads, dim) = of(self.v);
        match (self.is_state(), self.is_latent()) {
            (true, _) => {
                let (inputs, channels) = of(self.k);
                Stored::State { heads, dim, inputs, channels }
            }
            (false, true) => Stored::Latent { dim },
            (false, false) => Stored::Heads { heads, dim },
        }
    }

    /// Whether one plane is keys and values.
    pub(crate) fn is_latent(&self) -> bool {
        self.k == self.v
    }

    /// Which positions its blocks keep.
    pub(crate) fn kind(&self) -> GroupKind {
        self.group().kind
    }

    /// Layers of the group.
    pub fn layers(&self) -> usize {
        self.group().layers.len()
    }

    /// Blocks of the group.
    pub(crate) fn blocks(&self) -> u32 {
        self.map.blocks(self.group)
    }

    pub(crate) fn block_tokens(&self) -> usize {
        self.map.layout().block_tokens() as usize
    }

    /// Planes of keys and of values, or of inputs and of states, as [`GroupLayout::offset`] takes them.
    pub(crate) fn planes(&self) -> [usize; 2] {
        [self.k, self.v]
    }

    /// The same, each plane once.
    pub(crate) fn distinct_planes(&self) -> impl Iterator<Item = usize> + use<> {
        std::iter::once(self.k).chain((self.v != self.k).then_some(self.v))
    }

    pub(crate) fn dtype(&self, plane: usize) -> Dtype {
        self.group().planes[plane].dtype()
    }

    /// Bytes from one token to the next within a block's plane; of states, which have no tokens, all of it.
    pub(crate) fn token_stride(&self, plane: usize) -> usize {
        self.group().planes[plane].token_stride()
    }

    /// Byte offset of head 0 of a token; head `h` follows at `h * dim` elements.
    pub(crate) fn offset(&self, layer: usize, plane: usize, block: BlockId, token: usize) -> usize {
        self.map.plane_offset(self.group, layer, block, plane) + token * self.token_stride(plane)
    }

    /// Bytes of a plane of a block.
    pub(crate) fn plane_bytes(&self, plane: usize) -> usize {
        self.token_stride(plane) * self.group().block_rows(self.map.layout().block_tokens()) as usize
    }

    /// What a step reads of a segment's blocks.
    pub(crate) fn reads(&self, segment: &StepSegment) -> Vec<Run> {
        if self.is_state() {
            return segment.states().0.map(Run::state).into_iter().collect();
        }
        let first = self.kind().live(segment.position..segment.end(), self.block_tokens()).start * self.block_tokens();
        self.runs(&segment.table, first..segment.end()).collect()
    }

    /// What it stores to them without having read it.
    pub(crate) fn overwrites(&self, segment: &StepSegment) -> Vec<Run> {
        if self.is_state() {
            let (read, written) = segment.states();
            return (read != Some(written)).then(|| Run::state(written)).into_iter().collect();
        }
        self.runs(&segment.table, segment.position..segment.end()).collect()
    }

    /// Divides `tokens` of a sequence at block boundaries. Its table has the blocks of all of them.
    pub(crate) fn runs<'a>(&self, table: &'a BlockTable, tokens: Range<usize>) -> impl Iterator<Item = Run> + use<'a> {
        let (size, first) = (self.block_tokens(), table.first);
        let mut at = tokens.start;
        std::iter::from_fn(move || {
            (at < tokens.end).then(|| {
                let run = Run {
                    block: table.blocks[at / size - first],
                    token: at % size,
                    tokens: (size - at % size).min(tokens.end - at),
                };
                at += run.tokens;
                run
            })
        })
    }
}

/// Where the KV of a model's layer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LayerPlace {
    pub(crate) group: usize,
    /// The layer within the group.
    pub(crate) layer: usize,
}

/// The layout of a pool on which a program runs: its groups, and the place of each layer.
#[derive(Clone, Debug)]
pub(crate) struct PoolLayout {
    groups: Vec<GroupLayout>,
    /// By layer of the program.
    places: Vec<LayerPlace>,
    limits: StepLimits,
}

impl PoolLayout {
    /// Finds the layers of `program`, and checks that each group has what they need.
    pub(crate) fn try_new(
        map: &KvPoolMap,
        program: &Program,
        bounds: Bounds,
        vocab: usize,
    ) -> Result<Self, DeviceError> {
        let groups = (0..map.layout().groups().len()).map(|group| GroupLayout::try_new(map, group));
        let groups = groups.collect::<Result<Vec<_>, _>>()?;
        let place = |layer: u32| {
            let of_group = |kv: &GroupLayout| kv.group().layers.iter().position(|other| *other == layer);
            let mut all = groups.iter().enumerate();
            let place = all.find_map(|(group, kv)| Some(LayerPlace { group, layer: of_group(kv)? }));
            let message = || format!("layer {layer} is in no group of the pool");
            place.ok_or_else(|| DeviceError::Shape { op: "bind", message: message() })
        };
        let places = (0..program.layers()).map(place).collect::<Result<Vec<_>, _>>()?;
        let limits = StepLimits {
            bounds,
            vocab,
            layers: program.layers(),
            block_tokens: map.layout().block_tokens() as usize,
            groups: groups.iter().map(|kv| GroupLimits { kind: kv.kind(), blocks: kv.blocks() }).collect(),
        };
        let pool = Self { groups, places, limits };
        program.check_pool(&pool)?;
        Ok(pool)
    }

    pub(crate) fn groups(&self) -> &[GroupLayout] {
        &self.groups
    }

    pub(crate) fn place(&self, layer: u32) -> LayerPlace {
        self.places[layer as usize]
    }

    /// The group of a layer.
    pub(crate) fn of_layer(&self, layer: u32) -> &GroupLayout {
        &self.groups[self.place(layer).group]
    }

    /// What bounds a step.
    pub(crate) fn limits(&self) -> &StepLimits {
        &self.limits
    }
}

//! Experts whose tensors are one for a layer, as elements or as MXFP4; see [`ConfigFamily::stacked`].

use super::mxfp4;
use super::tensors::Stored;
use crate::families::{ConfigFamily, DecoderSpec, StackedTensor, TensorName, layer_index};
use crate::formats::StoredTensor;
use safetensors::Dtype;
use std::collections::{BTreeMap, HashMap};

const BLOCKS: &str = "_blocks";
const SCALES: &str = "_scales";

/// What a tensor of all experts of a layer holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Elements,
    Blocks,
    Scales,
}

/// A name in a file.
pub(super) struct Stacked {
    layer: usize,
    tensor: &'static StackedTensor,
    kind: Kind,
}

impl Stacked {
    /// The tensor of this name, if it is one of all experts of a layer.
    pub(super) fn parse(name: &str, family: &ConfigFamily) -> Option<Self> {
        let (layer, of_layer) = name.strip_prefix("model.layers.")?.split_once('.')?;
        let layer = layer_index(layer)?;
        family.stacked.iter().find_map(|tensor| {
            let kind = match of_layer.strip_prefix(tensor.0)? {
                "" => Kind::Elements,
                BLOCKS if !is_vector(tensor) => Kind::Blocks,
                SCALES if !is_vector(tensor) => Kind::Scales,
                _ => return None,
            };
            Some(Self { layer, tensor, kind })
        })
    }

    /// Types and shape that it must have; `None` if the model has no such tensor.
    pub(super) fn expected(&self, spec: &DecoderSpec) -> Option<(&'static [Dtype], Vec<usize>)> {
        let first = TensorName::Expert(self.layer, 0, self.tensor.1[0]);
        if !spec.has_tensor(first) {
            return None;
        }
        let experts = spec.layers[self.layer].experts?.count;
        let ([rows, columns], parts) = (spec.tensor_dims(first), self.tensor.1.len());
        let blocks = columns.div_ceil(mxfp4::BLOCK);
        Some(match self.kind {
            Kind::Elements if is_vector(self.tensor) => (ELEMENTS, vec![experts, parts * columns]),
            Kind::Elements => (ELEMENTS, vec![experts, columns, parts * rows]),
            Kind::Blocks => (&[Dtype::U8], vec![experts, parts * rows, blocks, mxfp4::BLOCK_BYTES]),
            Kind::Scales => (&[Dtype::U8], vec![experts, parts * rows, blocks]),
        })
    }
}

const ELEMENTS: &[Dtype] = &[Dtype::F32, Dtype::F16, Dtype::BF16];

fn is_vector(tensor: &StackedTensor) -> bool {
    TensorName::Expert(0, 0, tensor.1[0]).is_vector()
}

/// Where the tensors of all experts of a layer are.
#[derive(Default)]
struct Found {
    elements: Option<Stored>,
    blocks: Option<Stored>,
    scales: Option<Stored>,
}

/// All that were found in files, by layer and name behind the layer's number.
#[derive(Default)]
pub(super) struct AllStacked {
    found: BTreeMap<(usize, &'static str), (&'static StackedTensor, Found)>,
}

impl AllStacked {
    /// Adds a tensor of a checked shape. `false`: it is there already.
    pub(super) fn add(&mut self, stacked: &Stacked, place: Stored) -> bool {
        let (_, found) =
            self.found.entry((stacked.layer, stacked.tensor.0)).or_insert_with(|| (stacked.tensor, Found::default()));
        let to = match stacked.kind {
            Kind::Elements => &mut found.elements,
            Kind::Blocks => &mut found.blocks,
            Kind::Scales => &mut found.scales,
        };
        to.replace(place).is_none()
    }

    /// Every expert's tensors. The message says what is missing, or there in two forms.
    pub(super) fn slices(self, spec: &DecoderSpec) -> Result<HashMap<TensorName, Slice>, String> {
        let mut slices = HashMap::new();
        for ((layer, name), (tensor, found)) in self.found {
            let spelled = format!("model.layers.{layer}.{name}");
            let form = match (found.elements, found.blocks, found.scales) {
                (Some(elements), None, None) => Form::Elements(elements),
                (None, Some(blocks), Some(scales)) => Form::Mxfp4 { blocks, scales },
                (None, Some(_), None) => return Err(format!("tensor {spelled}{SCALES} is missing")),
                (None, None, Some(_)) => return Err(format!("tensor {spelled}{BLOCKS} is missing")),
                _ => return Err(format!("tensor {spelled} is there both as elements and as MXFP4")),
            };
            let experts = spec.layers[layer].experts.map_or(0, |experts| experts.count);
            let parts = tensor.1.len();
            for expert in 0..experts {
                let form = form.of(expert, experts);
                for (part, of) in tensor.1.iter().enumerate() {
                    let name = TensorName::Expert(layer, expert, *of);
                    let [rows, columns] = spec.tensor_dims(name);
                    if matches!(form, Form::Mxfp4 { .. }) && !columns.is_multiple_of(mxfp4::BLOCK) {
                        let block = mxfp4::BLOCK;
                        return Err(format!(
                            "tensor {spelled}{BLOCKS} has rows of {columns}, not whole blocks of {block}"
                        ));
                    }
                    slices.insert(name, Slice { form: form.clone(), part, parts, rows, columns });
                }
            }
        }
        Ok(slices)
    }
}

/// One expert's part of such tensors.
#[derive(Clone)]
pub(super) enum Form {
    Elements(Stored),
    Mxfp4 { blocks: Stored, scales: Stored },
}

impl Form {
    fn of(&self, expert: usize, experts: usize) -> Self {
        let of = |place: &Stored| {
            let each = place.bytes.len() / experts;
            let start = place.bytes.start + expert * each;
            Stored { bytes: start..start + each, ..*place }
        };
        match self {
            Self::Elements(place) => Self::Elements(of(place)),
            Self::Mxfp4 { blocks, scales } => Self::Mxfp4 { blocks: of(blocks), scales: of(scales) },
        }
    }
}

/// One matrix or bias of an expert: every `parts`-th row of its `form`, from `part` on.
pub(super) struct Slice {
    pub(super) form: Form,
    part: usize,
    parts: usize,
    rows: usize,
    columns: usize,
}

/// Columns that are turned into rows together: a cache line of most elements.
const TOGETHER: usize = 32;

impl Slice {
    /// Rows of elements that are stored as `[columns, rows * parts]`, of `size` bytes each.
    pub(super) fn gather(&self, stored: &[u8], size: usize) -> Vec<u8> {
        let Self { part, parts, rows, columns, .. } = *self;
        let mut out = vec![0; rows * columns * size];
        for first in (0..columns).step_by(TOGETHER) {
            for row in 0..rows {
                for column in first..(first + TOGETHER).min(columns) {
                    let (from, to) = (((column * rows + row) * parts + part) * size, (row * columns + column) * size);
                    out[to..to + size].copy_from_slice(&stored[from..from + size]);
                }
            }
        }
        out
    }

    /// Rows of MXFP4, in a format that has their values. Fails with a scale that is none.
    pub(super) fn convert(&self, blocks: &[u8], scales: &[u8]) -> Result<StoredTensor<'static>, u8> {
        let Self { part, parts, rows, columns, .. } = *self;
        let each = columns / mxfp4::BLOCK;
        let of_row = |row| {
            let at = row * parts + part;
            let blocks = &blocks[at * each * mxfp4::BLOCK_BYTES..(at + 1) * each * mxfp4::BLOCK_BYTES];
            (blocks, &scales[at * each..(at + 1) * each])
        };
        mxfp4::convert((0..rows).map(of_row))
    }
}

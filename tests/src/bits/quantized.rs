//! Random models whose matrices are stored in quantized formats: class `i8x32` multiplies integers only where a file stores them.

use baton_engine::families::{DecoderSpec, TensorName};
use baton_engine::formats::{ModelSource, RandomModel, StoredTensor, TextSource, WeightsError};
use baton_kernels::quantize::quantize;
use baton_kernels::storage::StorageFormat;
use baton_types::{Digest, SamplingDefaults, TokenId};
use std::borrow::Cow;
use std::collections::BTreeMap;

/// Formats of rows that are whole blocks of 256 values, and of all others.
const FORMATS: [[StorageFormat; 3]; 2] = [
    [StorageFormat::Q5K, StorageFormat::Q6K, StorageFormat::Q4K],
    [StorageFormat::Q4_1, StorageFormat::Q8_0, StorageFormat::Q4_0],
];

/// A random model whose matrices take turns in all quantized formats that their rows allow.
pub(super) struct Quantized {
    model: RandomModel,
    matrices: BTreeMap<TensorName, (StorageFormat, Vec<u8>)>,
}

impl Quantized {
    pub(super) fn new(model: RandomModel) -> anyhow::Result<Self> {
        let spec = model.spec();
        let names = spec.tensor_names().filter(|name| !name.is_vector()).enumerate();
        let quantized = names.map(|(turn, name)| {
            let [_, k] = spec.tensor_dims(name);
            let mut allowed = FORMATS.map(|formats| formats[turn % 3]).into_iter();
            let format = allowed.find(|format| format.row_bytes(k).is_some());
            let format = format.ok_or_else(|| anyhow::anyhow!("{name}: {k} columns are no whole blocks"))?;
            anyhow::Ok((name, (format, quantize(format, &model.tensor(name)?))))
        });
        let matrices = quantized.collect::<anyhow::Result<_>>()?;
        Ok(Self { model, matrices })
    }

    /// The formats of all matrices.
    pub(super) fn formats(&self) -> Vec<StorageFormat> {
        self.matrices.values().map(|(format, _)| *format).collect()
    }
}

impl ModelSource for Quantized {
    fn spec(&self) -> &DecoderSpec {
        self.model.spec()
    }

    fn stored(&self, name: TensorName) -> Result<StoredTensor<'_>, WeightsError> {
        let Some((format, bytes)) = self.matrices.get(&name) else { return self.model.stored(name) };
        Ok(StoredTensor { format: *format, bytes: Cow::Borrowed(bytes) })
    }

    fn is_quantized(&self) -> bool {
        true
    }

    /// That of the numbers: a case knows no other model of the same ones.
    fn fingerprint(&self) -> Digest {
        self.model.fingerprint()
    }

    fn end_tokens(&self) -> &[TokenId] {
        self.model.end_tokens()
    }

    fn sampling_defaults(&self) -> SamplingDefaults {
        self.model.sampling_defaults()
    }

    fn text(&self) -> TextSource {
        self.model.text()
    }

    fn name(&self) -> &str {
        self.model.name()
    }
}
